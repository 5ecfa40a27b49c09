// What may differ from run to run of one plan.

#ifndef JAXOFFLOAD_LAUNCHER_RUN_OPTIONS_H_
#define JAXOFFLOAD_LAUNCHER_RUN_OPTIONS_H_

#include <cstdint>

namespace jaxoffload {

// Which of a lane's ready vertices starts first.
enum class Policy : int32_t {
  // The largest priority; ties in serial order. No lane waits while it has a ready vertex.
  kWorkConserving = 0,
  // A lane runs its vertices strictly in serial order and waits for the next one: the ablation.
  kFixed = 1,
  // Any ready vertex, all equally likely: for tests, together with delays.
  kRandom = 2,
};

struct RunOptions {
  Policy policy = Policy::kWorkConserving;
  uint64_t seed = 0;
  // With kRandom: a vertex may sleep up to this long before it starts and again before its
  // completion is made known. How long is a function of (seed, vertex) alone.
  int64_t max_delay_us = 0;
  // Watch the ranges that are in use (live_ranges.h); takes a lock at each vertex.
  bool check = false;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_LAUNCHER_RUN_OPTIONS_H_

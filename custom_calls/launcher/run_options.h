// What may differ from run to run of one plan.

#ifndef JAXOFFLOAD_LAUNCHER_RUN_OPTIONS_H_
#define JAXOFFLOAD_LAUNCHER_RUN_OPTIONS_H_

#include <cstdint>

#include "launcher/policy.h"

namespace jaxoffload {

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

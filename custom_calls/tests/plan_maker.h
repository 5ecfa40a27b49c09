// Makes plans for tests: by hand, vertex by vertex, or at random.

#ifndef JAXOFFLOAD_TESTS_PLAN_MAKER_H_
#define JAXOFFLOAD_TESTS_PLAN_MAKER_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "plan/loaded_plan.h"

namespace jaxoffload::testing {

class PlanMaker {
 public:
  static constexpr int32_t kDevices = 2;

  // A version at a place; the range grows to hold it.
  int32_t Version(Space space, int32_t index, int64_t offset, int64_t bytes);

  // `overwritten`, if given, has one entry for each output.
  int32_t Kernel(std::vector<int32_t> inputs, std::vector<int32_t> outputs, double priority = 0,
                 std::vector<int32_t> overwritten = {}, int32_t device = 0,
                 Kind kind = Kind::kKernel) {
    overwritten.resize(outputs.size(), -1);
    return Add(kind, Lanes(kDevices).Of(kind, device), priority, inputs, outputs, overwritten);
  }

  int32_t Copy(Kind kind, int32_t from, int32_t to, int32_t device = 0, double priority = 0) {
    return Add(kind, Lanes(kDevices).Of(kind, device), priority, {from}, {to}, {-1});
  }

  // What vertices add to one place in any order, the first of them the first.
  void Sum(const std::vector<int32_t>& parts) {
    a_.first_of_sum.resize(a_.kind.size(), -1);
    for (const int32_t part : parts) a_.first_of_sum[part] = parts[0];
  }

  void Edge(int32_t tail, int32_t head) { edges_.emplace(tail, head); }
  void RemoveEdge(int32_t tail, int32_t head) { edges_.erase({tail, head}); }
  const std::set<std::pair<int32_t, int32_t>>& edges() const { return edges_; }
  int32_t writer(int32_t version) const { return writer_[version]; }

  PlanArrays Arrays() const;

  std::shared_ptr<const LoadedPlan> Load() const;

 private:
  int32_t Add(Kind kind, int32_t lane, double priority, const std::vector<int32_t>& inputs,
              const std::vector<int32_t>& outputs, const std::vector<int32_t>& overwritten);
  void Grow(Space space, int32_t index, int64_t end);

  PlanArrays a_;
  std::set<std::pair<int32_t, int32_t>> edges_;
  std::vector<int32_t> writer_;
};

// A random stream that is the same everywhere, which those of <random> are not.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(Mix(seed)) {}
  // In [0, bound).
  int64_t Below(int64_t bound) {
    state_ = Mix(state_);
    return static_cast<int64_t>(state_ % static_cast<uint64_t>(bound));
  }

 private:
  uint64_t state_;
};

// A random plan that is free of races: kernels with several inputs and outputs, in place or not,
// of two devices and of the host's, reloads, offloads and transfers, in arenas so small that places
// are reused all the time. What is left at the end is copied to results.
PlanMaker RandomPlan(uint64_t seed, int32_t num_vertices);

}  // namespace jaxoffload::testing

#endif  // JAXOFFLOAD_TESTS_PLAN_MAKER_H_

// Launch policies: which of a lane's ready vertices starts first. What they are called and how they
// choose is said here alone; Python reads the names from jaxoffload._native.

#ifndef JAXOFFLOAD_LAUNCHER_POLICY_H_
#define JAXOFFLOAD_LAUNCHER_POLICY_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/hash.h"
#include "plan/loaded_plan.h"

namespace jaxoffload {

enum class Policy : int32_t {
  // The largest priority; ties in serial order. No lane waits while it has a ready vertex.
  kWorkConserving = 0,
  // A lane runs its vertices strictly in serial order and waits for the next one: the ablation.
  kFixed = 1,
  // Any ready vertex, all equally likely: for tests, together with delays.
  kRandom = 2,
};
constexpr std::array<const char*, 3> kPolicyNames = {"work-conserving", "fixed", "random"};

// Throws std::invalid_argument if no policy has this number.
inline Policy PolicyOf(int64_t number) {
  if (number < 0 || number >= static_cast<int64_t>(kPolicyNames.size())) {
    std::string known;
    for (size_t i = 0; i < kPolicyNames.size(); ++i) {
      known += (i ? ", " : "") + std::to_string(i) + " (" + kPolicyNames[i] + ")";
    }
    throw std::invalid_argument("run: policy=" + std::to_string(number) +
                                " is unknown. Use one of " + known + ".");
  }
  return static_cast<Policy>(number);
}

// A lane's ready vertices. Used by one thread only; allocates when made, never afterwards.
class ReadyQueue {
 public:
  ReadyQueue(const LoadedPlan& plan, int32_t lane, Policy policy, uint64_t seed)
      : plan_(plan),
        order_(plan.lane_order(lane)),
        policy_(policy),
        random_(Mix(seed, static_cast<uint64_t>(lane))) {
    ready_.reserve(order_.size());
  }

  bool empty() const { return ready_.empty(); }

  void Push(int32_t vertex_id) {
    ready_.push_back(vertex_id);
    if (policy_ != Policy::kRandom) std::push_heap(ready_.begin(), ready_.end(), Later{this});
  }

  // The vertex to start now, removed; -1 if none may start (none is ready, or, with kFixed, the
  // lane's next one is not).
  int32_t Pop() {
    if (ready_.empty()) return -1;
    if (policy_ == Policy::kRandom) {
      random_ = Mix(random_);
      std::swap(ready_[random_ % ready_.size()], ready_.back());
    } else {
      if (policy_ == Policy::kFixed && ready_.front() != order_[cursor_]) return -1;
      std::pop_heap(ready_.begin(), ready_.end(), Later{this});
    }
    const int32_t vertex_id = ready_.back();
    ready_.pop_back();
    ++cursor_;
    return vertex_id;
  }

 private:
  struct Later {
    const ReadyQueue* queue;
    bool operator()(int32_t x, int32_t y) const {
      if (queue->policy_ == Policy::kFixed) return x > y;
      return queue->plan_.rank(x) > queue->plan_.rank(y);
    }
  };

  const LoadedPlan& plan_;
  const std::vector<int32_t>& order_;
  const Policy policy_;
  std::vector<int32_t> ready_;
  size_t cursor_ = 0;
  uint64_t random_;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_LAUNCHER_POLICY_H_

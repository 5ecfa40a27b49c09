// A lane's ready vertices and the rule by which one of them goes first. Used by one thread only;
// allocates when made, never afterwards.

#ifndef JAXOFFLOAD_LAUNCHER_READY_QUEUE_H_
#define JAXOFFLOAD_LAUNCHER_READY_QUEUE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/hash.h"
#include "launcher/run_options.h"
#include "plan/loaded_plan.h"

namespace jaxoffload {

class ReadyQueue {
 public:
  ReadyQueue(const LoadedPlan& plan, int32_t lane, const RunOptions& options)
      : plan_(plan),
        order_(plan.lane_order(lane)),
        policy_(options.policy),
        random_(Mix(options.seed, static_cast<uint64_t>(lane))) {
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

#endif  // JAXOFFLOAD_LAUNCHER_READY_QUEUE_H_

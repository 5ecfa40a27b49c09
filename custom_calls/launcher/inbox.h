// A lane's inbox: vertices that other lanes made ready. Many producers, one consumer, no locks, no
// allocation: an intrusive stack of vertex ids whose links are a preallocated array.
//
// One word holds everything: the id on top, or that the stack is empty, or that the consumer
// sleeps on the word (a futex), or that it must stop. So a push that finds the consumer asleep
// knows it from the value that it replaced, and no wake-up can be lost. The consumer takes the
// whole stack at once, which rules out ABA. Order within the stack does not matter: the consumer
// puts what it takes into its ready queue.

#ifndef JAXOFFLOAD_LAUNCHER_INBOX_H_
#define JAXOFFLOAD_LAUNCHER_INBOX_H_

#include <atomic>
#include <chrono>
#include <cstdint>

#include "base/patience.h"

namespace jaxoffload {

class Inbox {
 public:
  static constexpr auto kNever = Patience::Clock::time_point::max();
  static constexpr int32_t kEmpty = -1;
  static constexpr int32_t kStop = -3;
  static constexpr int32_t kCalled = -4;

  // Adds a vertex. `next` is the array of links; next[vertex_id] belongs to the stack from here
  // until the consumer has taken it.
  void Push(int32_t vertex_id, int32_t* next) {
    int32_t top = top_.load(std::memory_order_relaxed);
    do {
      next[vertex_id] = top < 0 ? kEmpty : top;
      // Release: the consumer sees the link and whatever made the vertex ready. Pushes before
      // this one stay visible too, for a read-modify-write continues their release sequence.
    } while (!top_.compare_exchange_weak(top, vertex_id, std::memory_order_release,
                                         std::memory_order_relaxed));
    if (top == kAsleep) Wake();
  }

  // Takes everything: the first id, from which `next` leads to kEmpty; kEmpty if there is nothing.
  int32_t TryTake() {
    if (top_.load(std::memory_order_relaxed) == kEmpty) return kEmpty;
    int32_t top = top_.exchange(kEmpty, std::memory_order_acquire);
    if (top == kStop) top_.store(kStop, std::memory_order_relaxed);
    return top;
  }

  // As TryTake, but waits for something: looks for a while, then sleeps. Returns kStop after Stop,
  // and kEmpty only when the time is up. `patience` is the consumer's own.
  int32_t Take(Patience& patience, Patience::Clock::time_point until = kNever);

  // Makes the consumer return kCalled, unless it has something to take; a push takes that back.
  void Call();

  // Makes the consumer return kStop for ever. Nothing may be pushed afterwards.
  void Stop();

  // As new, once the consumer has gone.
  void Restart() { top_.store(kEmpty, std::memory_order_relaxed); }

 private:
  static constexpr int32_t kAsleep = -2;

  void Sleep(Patience::Clock::time_point until);
  void Wake();

  // On a cache line of its own: producers hammer it.
  alignas(64) std::atomic<int32_t> top_{kEmpty};
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_LAUNCHER_INBOX_H_

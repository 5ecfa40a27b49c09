#include "launcher/inbox.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace jaxoffload {
static_assert(sizeof(std::atomic<int32_t>) == sizeof(int32_t), "the futex word is the atomic");

int32_t Inbox::Take(Patience& patience, Patience::Clock::time_point until) {
  int32_t top = kEmpty;
  const auto has_some = [&] { return (top = TryTake()) != kEmpty; };
  patience.Await(has_some, [&] {
    do {
      Sleep(until);
    } while (!has_some() && (until == kNever || Patience::Clock::now() < until));
  });
  return top;
}

void Inbox::Sleep(Patience::Clock::time_point until) {
  int32_t expected = kEmpty;
  // Relaxed on success: nothing is published by going to sleep.
  if (!top_.compare_exchange_strong(expected, kAsleep, std::memory_order_relaxed)) return;
  while (top_.load(std::memory_order_relaxed) == kAsleep) {
    timespec left{};
    if (until != kNever) {
      const std::chrono::nanoseconds time = until - Patience::Clock::now();
      if (time.count() <= 0) {
        expected = kAsleep;  // unless something has come meanwhile
        top_.compare_exchange_strong(expected, kEmpty, std::memory_order_relaxed);
        return;
      }
      left = {static_cast<time_t>(time.count() / 1'000'000'000),
              static_cast<decltype(left.tv_nsec)>(time.count() % 1'000'000'000)};
    }
    syscall(SYS_futex, reinterpret_cast<int32_t*>(&top_), FUTEX_WAIT_PRIVATE, kAsleep,
            until == kNever ? nullptr : &left, nullptr, 0);
  }
}

void Inbox::Call() {
  int32_t top = top_.load(std::memory_order_relaxed);
  do {
    if (top >= 0 || top == kStop) return;
  } while (!top_.compare_exchange_weak(top, kCalled, std::memory_order_release,
                                       std::memory_order_relaxed));
  if (top == kAsleep) Wake();
}

void Inbox::Wake() {
  syscall(SYS_futex, reinterpret_cast<int32_t*>(&top_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr,
          nullptr, 0);
}

void Inbox::Stop() {
  top_.store(kStop, std::memory_order_release);
  Wake();
}

}  // namespace jaxoffload

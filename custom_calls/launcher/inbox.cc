#include "launcher/inbox.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace jaxoffload {
static_assert(sizeof(std::atomic<int32_t>) == sizeof(int32_t), "the futex word is the atomic");

int32_t Inbox::Take(Patience& patience) {
  int32_t top = kEmpty;
  const auto has_some = [&] { return (top = TryTake()) != kEmpty; };
  patience.Await(has_some, [&] {
    do {
      Sleep();
    } while (!has_some());
  });
  return top;
}

void Inbox::Sleep() {
  int32_t expected = kEmpty;
  // Relaxed on success: nothing is published by going to sleep.
  if (!top_.compare_exchange_strong(expected, kAsleep, std::memory_order_relaxed)) return;
  while (top_.load(std::memory_order_relaxed) == kAsleep) {
    syscall(SYS_futex, reinterpret_cast<int32_t*>(&top_), FUTEX_WAIT_PRIVATE, kAsleep, nullptr,
            nullptr, 0);
  }
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

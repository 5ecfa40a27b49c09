#include "launcher/inbox.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace jaxoffload {
namespace {

// Rounds of looking before sleeping, about 4 us. Measured on two cores: a hop from lane to lane
// takes 2.1 us without spinning and 0.15 us with this (tests/overhead.cc); a chain of 256x256
// products with reloads beside it is as fast as without, while 5000 rounds cost it 10%, for they
// take the core from XLA's own threads.
constexpr int kSpins = 200;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

static_assert(sizeof(std::atomic<int32_t>) == sizeof(int32_t), "the futex word is the atomic");

int32_t Inbox::Take() {
  for (int spin = 0; spin < kSpins; ++spin) {
    const int32_t top = TryTake();
    if (top != kEmpty) return top;
    Pause();
  }
  for (;;) {
    int32_t expected = kEmpty;
    // Relaxed on success: nothing is published by going to sleep.
    if (!top_.compare_exchange_strong(expected, kAsleep, std::memory_order_relaxed)) {
      const int32_t top = TryTake();
      if (top != kEmpty) return top;
      continue;
    }
    while (top_.load(std::memory_order_relaxed) == kAsleep) {
      syscall(SYS_futex, reinterpret_cast<int32_t*>(&top_), FUTEX_WAIT_PRIVATE, kAsleep, nullptr,
              nullptr, 0);
    }
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

// How long a thread that waits for another looks before it sleeps.

#ifndef JAXOFFLOAD_BASE_PATIENCE_H_
#define JAXOFFLOAD_BASE_PATIENCE_H_

#include <algorithm>
#include <chrono>

namespace jaxoffload {

// To sleep and be woken takes 5 to 60 us; to look takes a core, from XLA's own threads where there
// are few. So one looks for long only where waits have been short of late: for kernels of some
// microseconds, not of milliseconds. For one thread at a time.
class Patience {
 public:
  using Clock = std::chrono::steady_clock;
  using Duration = std::chrono::nanoseconds;

  // Looks whether it is over, for as long as that pays, and then sleeps until it is.
  template <typename IsOver, typename Sleep>
  void Await(IsOver is_over, Sleep sleep) {
    if (is_over()) return;
    const Clock::time_point start = Clock::now();
    if (!Look(is_over)) sleep();
    Waited(Clock::now() - start);
  }

  // Looks for as long as that pays; whether it is over.
  template <typename IsOver>
  bool Look(IsOver is_over) const {
    constexpr int kLooks = 16;  // between two looks at the clock
    const Clock::time_point end = Clock::now() + limit();
    do {
      for (int look = 0; look < kLooks; ++look) {
        if (is_over()) return true;
        Pause();
      }
    } while (Clock::now() < end);
    return false;
  }

  // How long to look this time.
  Duration limit() const { return average_ < kLong ? std::max(kShort, 2 * average_) : kShort; }

  // How long a wait was, with sleep and all.
  void Waited(Duration time) {
    time = std::min(time, kCap);
    average_ = has_waited_ ? average_ + (time - average_) / 8 : time;
    has_waited_ = true;
  }

 private:
  static constexpr Duration kShort = std::chrono::microseconds(4);
  static constexpr Duration kLong = std::chrono::microseconds(50);
  static constexpr Duration kCap = std::chrono::microseconds(400);

  static void Pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  Duration average_ = kCap;
  bool has_waited_ = false;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_BASE_PATIENCE_H_

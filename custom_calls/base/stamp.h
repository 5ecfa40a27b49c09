// Which contents a piece of memory has. Whoever may change them renews it, and no two contents ever
// have the same, whatever is at an address later.

#ifndef JAXOFFLOAD_BASE_STAMP_H_
#define JAXOFFLOAD_BASE_STAMP_H_

#include <atomic>
#include <cstdint>

namespace jaxoffload {

// Of memory of which nobody tells when it changes.
constexpr uint64_t kNoStamp = 0;

class Stamp {
 public:
  Stamp() { Renew(); }

  uint64_t value() const { return value_.load(std::memory_order_relaxed); }
  void Renew() { value_.store(Next(), std::memory_order_relaxed); }
  // Whether some of the contents may be elsewhere, owed (tiers/residents.h).
  bool may_be_owed() const { return may_be_owed_.load(std::memory_order_relaxed); }
  void MayBeOwed() { may_be_owed_.store(true, std::memory_order_relaxed); }

  // The first of as many new ones, for contents that nobody renews.
  static uint64_t Next(uint64_t count = 1) {
    static std::atomic<uint64_t> next{kNoStamp + 1};
    return next.fetch_add(count, std::memory_order_relaxed);
  }

 private:
  std::atomic<uint64_t> value_;
  std::atomic<bool> may_be_owed_{false};
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_BASE_STAMP_H_

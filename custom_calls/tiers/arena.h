// The arena of a device on CPU: host memory whose address never changes.
//
// All plans of a client share it, since runs are executed one at a time: places of different plans
// overlap, and what is resident is what the largest plan has touched. A plan leases its bytes; when
// a lease ends, pages beyond the largest remaining one go back to the operating system.

#ifndef JAXOFFLOAD_TIERS_ARENA_H_
#define JAXOFFLOAD_TIERS_ARENA_H_

#include <cstdint>
#include <set>
#include <string>

#include "base/mutex.h"
#include "tiers/address_range.h"

namespace jaxoffload {

class Arena {
 public:
  // Reserves addresses, not memory: up to `reserve_bytes`, less where the system refuses. Throws
  // std::runtime_error.
  explicit Arena(std::string name, int64_t reserve_bytes = int64_t{1} << 40);

  char* base() const { return range_.base(); }

  // Makes [0, bytes) usable for as long as the lease is held. Throws std::runtime_error when the
  // address range is too small or the system refuses.
  void Acquire(int64_t bytes) EXCLUDES(mutex_);
  // Ends a lease. No run may be using the arena beyond the other leases.
  void Release(int64_t bytes) EXCLUDES(mutex_);

  // Gives back the pages from there on. What is in them is lost; no run may be using them.
  void TrimBeyond(int64_t bytes) EXCLUDES(mutex_);
  // Gives every page back. What is in the arena is lost; no run may be using it.
  void Trim() EXCLUDES(mutex_);

  // Bytes of the largest lease but for one of so many.
  int64_t leased_bytes_without(int64_t bytes) const EXCLUDES(mutex_);
  // Bytes of the largest lease.
  int64_t leased_bytes() const EXCLUDES(mutex_);
  // Bytes of pages that are in memory now.
  int64_t resident_bytes() const EXCLUDES(mutex_);

 private:
  const std::string name_;
  const AddressRange range_;

  mutable Mutex mutex_;
  std::multiset<int64_t> leases_ GUARDED_BY(mutex_);
  int64_t usable_ GUARDED_BY(mutex_) = 0;  // bytes from the start that may be touched
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_TIERS_ARENA_H_

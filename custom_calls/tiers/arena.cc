#include "tiers/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/pages.h"

namespace jaxoffload {
Arena::Arena(std::string name, int64_t reserve_bytes)
    : name_(std::move(name)), range_(reserve_bytes) {
  if (base() != nullptr) return;
  throw std::runtime_error("cannot reserve addresses for " + name_ + ": " + std::strerror(errno));
}

void Arena::Acquire(int64_t bytes) {
  MutexLock lock(mutex_);
  if (bytes > range_.bytes()) {
    throw std::runtime_error(name_ + " has room for " + std::to_string(range_.bytes()) +
                             " bytes of addresses, but the plan needs " + std::to_string(bytes) +
                             ". Raise the limit on address space (ulimit -v).");
  }
  const int64_t wanted = RoundUp(bytes, bytes >= kHugePage ? kHugePage : kPage);
  if (wanted > usable_) {
    if (!range_.Open(wanted)) {
      throw std::runtime_error("cannot get " + std::to_string(wanted) + " bytes for " + name_ +
                               ": " + std::strerror(errno));
    }
    // Advice only: a kernel without huge pages says no, and small ones do.
    if (wanted >= kHugePage) madvise(base(), wanted, MADV_HUGEPAGE);
    usable_ = wanted;
  }
  leases_.insert(bytes);
}

void Arena::Release(int64_t bytes) {
  MutexLock lock(mutex_);
  const auto lease = leases_.find(bytes);
  if (lease == leases_.end()) return;
  leases_.erase(lease);
  range_.Discard(leases_.empty() ? 0 : RoundUp(*leases_.rbegin(), kPage), usable_);
}

void Arena::TrimBeyond(int64_t bytes) {
  MutexLock lock(mutex_);
  range_.Discard(RoundUp(bytes, kPage), usable_);
}

void Arena::Trim() { TrimBeyond(0); }

int64_t Arena::leased_bytes_without(int64_t bytes) const {
  MutexLock lock(mutex_);
  auto last = leases_.rbegin();
  if (last != leases_.rend() && *last == bytes) ++last;
  return last == leases_.rend() ? 0 : *last;
}

int64_t Arena::leased_bytes() const {
  MutexLock lock(mutex_);
  return leases_.empty() ? 0 : *leases_.rbegin();
}

int64_t Arena::resident_bytes() const {
  MutexLock lock(mutex_);
  std::vector<unsigned char> pages(usable_ / kPage);
  if (pages.empty() || mincore(base(), usable_, pages.data()) != 0) return 0;
  return kPage * std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return p & 1; });
}

}  // namespace jaxoffload

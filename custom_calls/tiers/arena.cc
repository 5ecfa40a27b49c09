#include "tiers/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

namespace jaxoffload {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kPage = 4096;

int64_t RoundUp(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

Arena::Arena(std::string name, int64_t reserve_bytes) : name_(std::move(name)) {
  // A limit on address space (ulimit -v) may forbid the whole: take what can be had.
  for (int64_t bytes = reserve_bytes; bytes >= kHugePage; bytes /= 2) {
    void* const range = mmap(nullptr, bytes + kHugePage, PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) continue;
    char* const start = static_cast<char*>(range);
    const int64_t skip = (kHugePage - reinterpret_cast<uintptr_t>(start) % kHugePage) % kHugePage;
    if (skip > 0) munmap(start, skip);
    if (skip < kHugePage) munmap(start + skip + bytes, kHugePage - skip);
    base_ = start + skip;
    reserved_ = bytes;
    return;
  }
  throw std::runtime_error("cannot reserve addresses for " + name_ + ": " + std::strerror(errno));
}

Arena::~Arena() { munmap(base_, reserved_); }

void Arena::Acquire(int64_t bytes) {
  MutexLock lock(mutex_);
  if (bytes > reserved_) {
    throw std::runtime_error(name_ + " has room for " + std::to_string(reserved_) +
                             " bytes of addresses, but the plan needs " + std::to_string(bytes) +
                             ". Raise the limit on address space (ulimit -v).");
  }
  const int64_t wanted = RoundUp(bytes, bytes >= kHugePage ? kHugePage : kPage);
  if (wanted > usable_) {
    if (mprotect(base_, wanted, PROT_READ | PROT_WRITE) != 0) {
      throw std::runtime_error("cannot get " + std::to_string(wanted) + " bytes for " + name_ +
                               ": " + std::strerror(errno));
    }
    // Advice only: a kernel without huge pages says no, and small ones do.
    if (wanted >= kHugePage) madvise(base_, wanted, MADV_HUGEPAGE);
    usable_ = wanted;
  }
  leases_.insert(bytes);
}

void Arena::Release(int64_t bytes) {
  MutexLock lock(mutex_);
  const auto lease = leases_.find(bytes);
  if (lease == leases_.end()) return;
  leases_.erase(lease);
  Discard(leases_.empty() ? 0 : RoundUp(*leases_.rbegin(), kPage));
}

void Arena::Trim() {
  MutexLock lock(mutex_);
  Discard(0);
}

void Arena::Discard(int64_t from) {
  if (from < usable_) madvise(base_ + from, usable_ - from, MADV_DONTNEED);
}

int64_t Arena::leased_bytes() const {
  MutexLock lock(mutex_);
  return leases_.empty() ? 0 : *leases_.rbegin();
}

int64_t Arena::resident_bytes() const {
  MutexLock lock(mutex_);
  std::vector<unsigned char> pages(usable_ / kPage);
  if (pages.empty() || mincore(base_, usable_, pages.data()) != 0) return 0;
  return kPage * std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return p & 1; });
}

}  // namespace jaxoffload

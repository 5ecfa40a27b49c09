#include "tiers/host_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>

namespace jaxoffload {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kPage = 4096;

int64_t RoundedSize(int64_t bytes) {
  const int64_t unit = bytes >= kHugePage ? kHugePage : kPage;
  return std::max(kPage, (bytes + unit - 1) / unit * unit);
}

char* Map(int64_t size) {
  const int64_t alignment = size >= kHugePage ? kHugePage : kPage;
  const int64_t extra = alignment - kPage;
  void* const range = mmap(nullptr, size + extra, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) throw std::bad_alloc();
  char* const start = static_cast<char*>(range);
  const int64_t skip = (alignment - reinterpret_cast<uintptr_t>(start) % alignment) % alignment;
  if (skip > 0) munmap(start, skip);
  if (extra > skip) munmap(start + skip + size, extra - skip);
  if (size >= kHugePage) madvise(start + skip, size, MADV_HUGEPAGE);  // advice only
  return start + skip;
}

}  // namespace

HostPool::~HostPool() { ReleaseFree(); }

char* HostPool::Allocate(int64_t bytes) {
  const int64_t size = RoundedSize(bytes);
  MutexLock lock(mutex_);
  const auto found = free_.find(size);
  char* block = nullptr;
  if (found != free_.end()) {
    block = found->second.back();
    found->second.pop_back();
    if (found->second.empty()) free_.erase(found);
    stats_.free_bytes -= size;
    ++stats_.num_reused;
  } else {
    block = Map(size);
    ++stats_.num_mapped;
  }
  stats_.in_use_bytes += size;
  return block;
}

void HostPool::Free(char* block, int64_t bytes) {
  const int64_t size = RoundedSize(bytes);
  MutexLock lock(mutex_);
  stats_.in_use_bytes -= size;
  if (size > cap_bytes_) {
    munmap(block, size);
    return;
  }
  ShrinkTo(cap_bytes_ - size);
  free_[size].push_back(block);
  stats_.free_bytes += size;
}

void HostPool::ShrinkTo(int64_t bytes) {
  while (stats_.free_bytes > bytes) {
    const auto largest = std::prev(free_.end());
    munmap(largest->second.back(), largest->first);
    stats_.free_bytes -= largest->first;
    largest->second.pop_back();
    if (largest->second.empty()) free_.erase(largest);
  }
}

void HostPool::ReleaseFree() {
  MutexLock lock(mutex_);
  ShrinkTo(0);
}

void HostPool::SetCap(int64_t cap_bytes) {
  MutexLock lock(mutex_);
  cap_bytes_ = cap_bytes;
  ShrinkTo(cap_bytes_);
}

HostPool::Stats HostPool::stats() const {
  MutexLock lock(mutex_);
  return stats_;
}

HostPool& HostPool::Global() {
  // A quarter of the machine's memory: enough for the results of a training step, and what is kept
  // counts as used by this process.
  static HostPool* const pool =
      new HostPool(int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE) / 4);
  return *pool;
}

}  // namespace jaxoffload

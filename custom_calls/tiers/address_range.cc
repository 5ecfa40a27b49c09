#include "tiers/address_range.h"

#include <sys/mman.h>

#include "base/pages.h"

namespace jaxoffload {

AddressRange::AddressRange(int64_t wanted_bytes) {
  for (int64_t bytes = wanted_bytes; bytes >= kHugePage; bytes /= 2) {
    void* const found = mmap(nullptr, bytes + kHugePage, PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) continue;
    char* const start = static_cast<char*>(found);
    const int64_t skip = (kHugePage - reinterpret_cast<uintptr_t>(start) % kHugePage) % kHugePage;
    if (skip > 0) munmap(start, skip);
    if (skip < kHugePage) munmap(start + skip + bytes, kHugePage - skip);
    base_ = start + skip;
    bytes_ = bytes;
    return;
  }
}

AddressRange::~AddressRange() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

bool AddressRange::Open(int64_t bytes) const {
  // Without access addresses count against no limit on memory.
  return mprotect(base_, bytes, PROT_READ | PROT_WRITE) == 0;
}

void AddressRange::Discard(int64_t begin, int64_t end) const {
  if (begin < end) madvise(base_ + begin, end - begin, MADV_DONTNEED);
}

}  // namespace jaxoffload

#include "tiers/disk_source.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/pages.h"

namespace jaxoffload {
namespace {

char* NextTag(int64_t bytes) {
  // Addresses of the kernel's half, which no memory of a process has.
  static std::atomic<uint64_t> next{uint64_t{1} << 63};
  return reinterpret_cast<char*>(next.fetch_add(RoundUp(std::max<int64_t>(bytes, 1), kPage)));
}

}  // namespace

void ThrowDiskError(int code, const std::string& what) {
  throw DiskError(code, what + ": " + std::strerror(code));
}

DiskSource::DiskSource(int64_t bytes) : tag_(NextTag(bytes)) {}

DiskBuffer::DiskBuffer(int64_t bytes)
    : data_(static_cast<char*>(
          std::aligned_alloc(kPage, RoundUp(std::max<int64_t>(bytes, 1), kPage)))) {
  if (data_ == nullptr) throw std::bad_alloc();
}

}  // namespace jaxoffload

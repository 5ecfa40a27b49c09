#include "tiers/disk_source.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/pages.h"
#include "tiers/row_cache.h"

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

bool DiskSource::ReadRows(const Rows& rows, char* to, const std::atomic<bool>& abort,
                          std::string* error, int64_t* read) const {
  const std::shared_ptr<RowCache> cache = row_cache();
  Rows left = rows;
  std::vector<int64_t> ids, places;
  if (cache != nullptr) {
    cache->Take(rows, to, &ids, &places);
    left = {ids.data(), static_cast<int64_t>(ids.size()), rows.bytes, places.data()};
  }
  if (read != nullptr) *read = left.count;
  return ReadRowsFromDisk(left, to, abort, error);  // none, too: a file may have changed
}

bool DiskSource::KeepRowsIn(const std::shared_ptr<RowCache>& cache) {
  home_.CheckNotForked();  // it would wait for its parent's writes
  const MutexLock lock(cache_mutex_);
  if (!cache_.expired()) return false;
  cache_ = cache;
  has_cache_ = true;
  while (num_unseen_ > 0) unseen_ended_.Wait(cache_mutex_);
  return true;
}

DiskSource::Writing::Writing(DiskSource& source) : source_(source) {
  const MutexLock lock(source.cache_mutex_);
  cache_ = source.cache_.lock();
  if (cache_ == nullptr) ++source.num_unseen_;
}

DiskSource::Writing::~Writing() {
  if (cache_ != nullptr) return;
  const MutexLock lock(source_.cache_mutex_);
  if (--source_.num_unseen_ == 0) source_.unseen_ended_.NotifyAll();
}

std::shared_ptr<RowCache> DiskSource::row_cache() const {
  if (!has_cache_ || home_.IsForked()) return nullptr;
  const MutexLock lock(cache_mutex_);
  return cache_.lock();
}

DiskBuffer::DiskBuffer(int64_t bytes)
    : data_(static_cast<char*>(
          std::aligned_alloc(kPage, RoundUp(std::max<int64_t>(bytes, 1), kPage)))) {
  if (data_ == nullptr) throw std::bad_alloc();
}

}  // namespace jaxoffload

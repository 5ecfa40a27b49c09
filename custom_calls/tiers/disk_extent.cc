#include "tiers/disk_extent.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/pages.h"
#include "tiers/crc32c.h"
#include "tiers/disk_store.h"
#include "tiers/row_cache.h"

namespace jaxoffload {
namespace {

// Cuts [offset, offset + bytes) at the borders of blocks and goes through it in order, until
// something returns false: part(at, length) for what is less than a block, at either end, and
// blocks(at, length, buffer) for whole ones. `at` counts from `offset`, as `memory` does. `buffer`
// is null where the memory is aligned; else at most as long as it is comes at once.
template <typename Part, typename Blocks>
bool InBlocks(int64_t offset, const char* memory, int64_t bytes, const Part& part,
              const Blocks& blocks) {
  const int64_t begin = std::min(bytes, RoundUp(offset, kDiskBlock) - offset);
  const int64_t end = begin + RoundDown(bytes - begin, kDiskBlock);
  if (begin > 0 && !part(0, begin)) return false;
  if (begin < end && reinterpret_cast<uintptr_t>(memory + begin) % kPage == 0) {
    if (!blocks(begin, end - begin, nullptr)) return false;
  } else if (begin < end) {
    const DiskBuffer buffer(std::min(end - begin, kDiskWindow));
    for (int64_t at = begin; at < end; at += kDiskWindow) {
      if (!blocks(at, std::min(end - at, kDiskWindow), buffer.get())) return false;
    }
  }
  return end == bytes || part(end, bytes - end);
}

}  // namespace

DiskExtent::DiskExtent(std::shared_ptr<DiskStore> store, int64_t start, int64_t bytes)
    : DiskSource(bytes),
      store_(std::move(store)),
      start_(start),
      bytes_(bytes),
      sums_(RoundUp(bytes, kDiskBlock) / kDiskBlock),
      written_(RoundUp(bytes, kDiskBlock) / kDiskBlock) {}

DiskExtent::~DiskExtent() { store_->Free(start_, RoundUp(bytes_, kDiskBlock)); }

bool DiskExtent::CheckBlocks(int64_t offset, const char* data, int64_t bytes,
                             std::string* error) const {
  for (int64_t at = 0; at < bytes; at += kDiskBlock) {
    const int64_t block = (offset + at) / kDiskBlock;
    if (!written_[block]) {
      *error = "bytes at " + std::to_string(offset + at) + " of an extent of " +
               store_->JoinedPaths() + " were never written";
      return false;
    }
    const uint32_t found = QuarteredCrc32c(data + at, kDiskBlock);
    if (found == sums_[block]) continue;
    *error = "the " + std::to_string(kDiskBlock) + " bytes at " + std::to_string(offset + at) +
             " of an extent of " + store_->JoinedPaths() + " came back changed: their CRC32C is " +
             std::to_string(found) + " and was " + std::to_string(sums_[block]) +
             (store_->home_.IsForked()
                  ? ". Process " + std::to_string(store_->home_.pid()) +
                        ", off which this one was forked, has overwritten or deleted it since"
                  : ". Check that drive; nothing of it was used");
    return false;
  }
  return true;
}

bool DiskExtent::ReadSpans(const std::vector<DiskSpan>& spans, const std::atomic<bool>& abort,
                           std::string* error) const {
  std::vector<DiskRequest> requests;
  std::vector<int64_t> offsets;  // of each request, in this extent
  for (const DiskSpan& span : spans) {
    for (const DiskRequest& request :
         store_->Requests(start_ + span.offset, span.address, span.bytes, /*is_write=*/false)) {
      requests.push_back(request);
      offsets.push_back(span.offset + (request.address - span.address));
    }
  }
  const auto nothing = [](size_t, std::string*) { return true; };
  const auto check = [&](size_t position, std::string* failure) {
    const DiskRequest& request = requests[position];
    store_->bytes_read_ += request.bytes;
    return CheckBlocks(offsets[position], request.address, request.bytes, failure);
  };
  if (store_->engine_->Transfer(requests, abort, nothing, check, error)) return true;
  *error = store_->JoinedPaths() + ": " + *error;
  return false;
}

bool DiskExtent::WriteSpans(const std::vector<DiskSpan>& spans, const std::atomic<bool>& abort,
                            std::string* error) {
  std::vector<DiskRequest> requests;
  std::vector<int64_t> offsets;
  for (const DiskSpan& span : spans) {
    for (const DiskRequest& request :
         store_->Requests(start_ + span.offset, span.address, span.bytes, /*is_write=*/true)) {
      requests.push_back(request);
      offsets.push_back(span.offset + (request.address - span.address));
    }
  }
  const auto sum = [&](size_t position, std::string*) {
    const DiskRequest& request = requests[position];
    for (int64_t at = 0; at < request.bytes; at += kDiskBlock) {
      const int64_t block = (offsets[position] + at) / kDiskBlock;
      sums_[block] = QuarteredCrc32c(request.address + at, kDiskBlock);
      written_[block] = 1;
    }
    return true;
  };
  const auto count = [&](size_t position, std::string*) {
    store_->bytes_written_ += requests[position].bytes;
    return true;
  };
  if (store_->engine_->Transfer(requests, abort, sum, count, error)) return true;
  *error = store_->JoinedPaths() + ": " + *error;
  return false;
}

bool DiskExtent::ReadBlocks(int64_t offset, char* to, int64_t bytes, const std::atomic<bool>& abort,
                            std::string* error) const {
  return ReadSpans({{offset, to, bytes}}, abort, error);
}

bool DiskExtent::WriteBlocks(int64_t offset, const char* from, int64_t bytes,
                             const std::atomic<bool>& abort, std::string* error) {
  return WriteSpans({{offset, const_cast<char*>(from), bytes}}, abort, error);
}

bool DiskExtent::ReadRowsFromDisk(const Rows& rows, char* to, const std::atomic<bool>& abort,
                                  std::string* error) const {
  const auto read = [&](const std::vector<DiskSpan>& spans, const std::vector<DiskSpan>&,
                        const std::vector<RowPiece>& pieces) {
    if (store_->home_.IsForked()) {
      if (!ReadSpans(spans, abort, error)) return false;  // as in ReadPart
    } else {
      const MutexLock lock(partial_);
      if (!ReadSpans(spans, abort, error)) return false;
    }
    for (const RowPiece& piece : pieces) std::memcpy(to + piece.outside, piece.inside, piece.bytes);
    return true;
  };
  return ForEachWindow(rows, 0, kDiskBlock, read);
}

bool DiskExtent::WriteRows(const Rows& rows, const char* from, const std::atomic<bool>& abort,
                           std::string* error) {
  if (IsRefusedInChild(error)) return false;
  MayChange();
  const auto write = [&](const std::vector<DiskSpan>& spans, const std::vector<DiskSpan>& partial,
                         const std::vector<RowPiece>& pieces) {
    const MutexLock lock(partial_);
    if (!ReadSpans(partial, abort, error)) return false;
    for (const RowPiece& piece : pieces)
      std::memcpy(piece.inside, from + piece.outside, piece.bytes);
    return WriteSpans(spans, abort, error);
  };
  const Writing seen(*this);
  RowCache::Write kept(seen.cache(), rows);
  const bool is_done = ForEachWindow(rows, 0, kDiskBlock, write);
  if (is_done) kept.Succeeded(from);
  MayChange();
  return is_done;
}

bool DiskExtent::IsRefusedInChild(std::string* error) const {
  if (!store_->home_.IsForked()) return false;
  *error = store_->JoinedPaths() + ": this process was forked off process " +
           std::to_string(store_->home_.pid()) +
           ", whose bytes these are. Put the array on disk anew here";
  return true;
}

bool DiskExtent::Read(int64_t offset, char* to, int64_t bytes, const std::atomic<bool>& abort,
                      std::string* error) const {
  const auto part = [&](int64_t at, int64_t length) {
    return ReadPart(offset + at, to + at, length, abort, error);
  };
  const auto blocks = [&](int64_t at, int64_t length, char* buffer) {
    if (buffer == nullptr) return ReadBlocks(offset + at, to + at, length, abort, error);
    if (!ReadBlocks(offset + at, buffer, length, abort, error)) return false;
    std::memcpy(to + at, buffer, length);
    return true;
  };
  return InBlocks(offset, to, bytes, part, blocks);
}

bool DiskExtent::Write(int64_t offset, const char* from, int64_t bytes,
                       const std::atomic<bool>& abort, std::string* error) {
  if (IsRefusedInChild(error)) return false;
  MayChange();
  const auto part = [&](int64_t at, int64_t length) {
    return WritePart(offset + at, from + at, length, abort, error);
  };
  const auto blocks = [&](int64_t at, int64_t length, char* buffer) {
    if (buffer == nullptr) return WriteBlocks(offset + at, from + at, length, abort, error);
    std::memcpy(buffer, from + at, length);
    return WriteBlocks(offset + at, buffer, length, abort, error);
  };
  const Writing seen(*this);
  const RowCache::Write kept(seen.cache(), offset, bytes);
  const bool is_done = InBlocks(offset, from, bytes, part, blocks);
  MayChange();  // who has read meanwhile has read something in between
  return is_done;
}

bool DiskExtent::ReadPart(int64_t offset, char* to, int64_t bytes, const std::atomic<bool>& abort,
                          std::string* error) const {
  const int64_t first = RoundDown(offset, kDiskBlock);
  const DiskBuffer buffer(kDiskBlock);
  if (store_->home_.IsForked()) {
    // Nobody writes here, and the lock may be held by a thread of the parent's.
    if (!ReadBlocks(first, buffer.get(), kDiskBlock, abort, error)) return false;
  } else {
    const MutexLock lock(partial_);
    if (!ReadBlocks(first, buffer.get(), kDiskBlock, abort, error)) return false;
  }
  std::memcpy(to, buffer.get() + (offset - first), bytes);
  return true;
}

bool DiskExtent::WritePart(int64_t offset, const char* from, int64_t bytes,
                           const std::atomic<bool>& abort, std::string* error) {
  const int64_t block = offset / kDiskBlock;
  const int64_t first = block * kDiskBlock;
  const DiskBuffer buffer(kDiskBlock);
  MutexLock lock(partial_);
  const bool is_rest = offset == first && offset + bytes == bytes_;
  if (written_[block] && !is_rest) {
    if (!ReadBlocks(first, buffer.get(), kDiskBlock, abort, error)) return false;
  } else {
    std::memset(buffer.get(), 0, kDiskBlock);
  }
  std::memcpy(buffer.get() + (offset - first), from, bytes);
  return WriteBlocks(first, buffer.get(), kDiskBlock, abort, error);
}

}  // namespace jaxoffload

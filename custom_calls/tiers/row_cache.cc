#include "tiers/row_cache.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace jaxoffload {

RowCache::RowCache(int64_t bytes, int64_t row_bytes, int64_t room)
    : row_bytes_(row_bytes), num_rows_(row_bytes > 0 ? bytes / row_bytes : 0), room_(room) {
  if (room < 1 || room > num_rows_ || room > std::numeric_limits<int32_t>::max())
    throw std::invalid_argument("a table of " + std::to_string(bytes) + " bytes in rows of " +
                                std::to_string(row_bytes) + " has no " + std::to_string(room) +
                                " rows to keep");
  data_.resize(room * row_bytes);
  slots_.resize(room);
  for (int32_t slot = static_cast<int32_t>(room) - 1; slot >= 0; --slot) free_.push_back(slot);
  slot_of_.assign(num_rows_, -1);
  taken_.assign(num_rows_, 0.0f);
}

void RowCache::Take(const Rows& rows, char* to, std::vector<int64_t>* ids,
                    std::vector<int64_t>* places) {
  const bool is_mine = rows.bytes == row_bytes_;
  const MutexLock lock(mutex_);
  for (int64_t i = 0; i < rows.count; ++i) {
    const int64_t place = rows.places == nullptr ? i : rows.places[i];
    const int32_t slot = is_mine ? SlotOf(rows.ids[i]) : -1;
    if (is_mine) taken_[rows.ids[i]] += 1;
    if (slot >= 0 && slots_[slot].is_valid) {
      std::memcpy(to + place * row_bytes_, At(slot), row_bytes_);
    } else {
      ids->push_back(rows.ids[i]);
      places->push_back(place);
    }
  }
  if (!is_mine) return;
  counts_.misses += static_cast<int64_t>(ids->size());
  counts_.hits += rows.count - static_cast<int64_t>(ids->size());
}

template <typename Visit>
void RowCache::ForEachWritten(const Write& write, const Visit& visit) {
  const Rows& rows = write.rows_;
  const auto part = [&](int64_t offset, int64_t bytes) NO_THREAD_SAFETY_ANALYSIS {
    if (bytes == 0) return;
    const int64_t last = std::min(num_rows_ - 1, (offset + bytes - 1) / row_bytes_);
    for (int64_t row = offset / row_bytes_; row <= last; ++row)
      if (const int32_t slot = SlotOf(row); slot >= 0) visit(slot, int64_t{-1});
  };
  part(write.offset_, write.bytes_);
  for (int64_t i = 0; i < rows.count; ++i) {
    if (rows.bytes != row_bytes_) {
      part(rows.ids[i] * rows.bytes, rows.bytes);
    } else if (const int32_t slot = SlotOf(rows.ids[i]); slot >= 0) {
      visit(slot, rows.places == nullptr ? i : rows.places[i]);
    }
  }
}

void RowCache::Begin(const Write& write) {
  const MutexLock lock(mutex_);
  writes_.push_back(&write);
  ForEachWritten(write, [this](int32_t slot, int64_t) NO_THREAD_SAFETY_ANALYSIS {
    Slot& found = slots_[slot];
    found.is_valid = found.is_read = false;
    found.is_torn = found.num_writing++ > 0;
  });
}

void RowCache::End(const Write& write) {
  const MutexLock lock(mutex_);
  writes_.erase(std::find(writes_.begin(), writes_.end(), &write));
  ForEachWritten(write, [&](int32_t slot, int64_t place) NO_THREAD_SAFETY_ANALYSIS {
    const bool is_known = write.from_ != nullptr && place >= 0;
    EndOf(slots_[slot], At(slot), is_known ? write.from_ + place * row_bytes_ : nullptr);
  });
}

void RowCache::EndOf(Slot& slot, char* kept, const char* bytes) {
  if (--slot.num_writing > 0 || slot.is_torn || bytes == nullptr) return;
  std::memcpy(kept, bytes, row_bytes_);
  slot.is_valid = true;
}

RowCache::Write::Write(std::shared_ptr<RowCache> cache, const Rows& rows)
    : cache_(std::move(cache)), rows_(rows) {
  if (cache_ != nullptr) cache_->Begin(*this);
}

RowCache::Write::Write(std::shared_ptr<RowCache> cache, int64_t offset, int64_t bytes)
    : cache_(std::move(cache)), offset_(offset), bytes_(bytes) {
  if (cache_ != nullptr) cache_->Begin(*this);
}

RowCache::Write::~Write() {
  if (cache_ != nullptr) cache_->End(*this);
}

std::vector<int64_t> RowCache::MakeRoom(const std::vector<int64_t>& ids) {
  std::vector<int64_t> missing;
  const MutexLock lock(mutex_);
  for (int32_t slot = 0; slot < static_cast<int32_t>(slots_.size()); ++slot) {
    const int64_t row = slots_[slot].row;
    if (row < 0 || std::binary_search(ids.begin(), ids.end(), row)) continue;
    slot_of_[row] = -1;
    slots_[slot] = {};
    free_.push_back(slot);
  }
  std::vector<bool> is_new(slots_.size());
  for (const int64_t row : ids) {
    if (SlotOf(row) >= 0) continue;
    const int32_t slot = free_.back();
    free_.pop_back();
    slot_of_[row] = slot;
    slots_[slot].row = row;
    is_new[slot] = true;
  }
  for (const Write* const write : writes_) {
    ForEachWritten(*write, [&](int32_t slot, int64_t) NO_THREAD_SAFETY_ANALYSIS {
      if (is_new[slot]) slots_[slot].is_torn = slots_[slot].num_writing++ > 0;
    });
  }
  for (const int64_t row : ids) {
    Slot& slot = slots_[SlotOf(row)];
    slot.is_read = !slot.is_valid && slot.num_writing == 0;
    if (slot.is_read) missing.push_back(row);
  }
  return missing;
}

void RowCache::Put(const Rows& rows, const char* from) {
  const MutexLock lock(mutex_);
  for (int64_t i = 0; i < rows.count; ++i) {
    const int32_t slot = SlotOf(rows.ids[i]);
    if (!slots_[slot].is_read) continue;
    std::memcpy(At(slot), from + i * row_bytes_, row_bytes_);
    slots_[slot].is_valid = true;
    slots_[slot].is_read = false;
  }
}

bool RowCache::Keep(const DiskSource& source, const std::vector<int64_t>& ids,
                    const std::atomic<bool>& abort, std::string* error) {
  const MutexLock keeping(keeping_);
  for (size_t i = 1; i < ids.size(); ++i)
    if (ids[i] <= ids[i - 1])
      throw std::invalid_argument("ids must ascend, and have no row twice.");
  if (static_cast<int64_t>(ids.size()) > room_)
    throw std::invalid_argument(std::to_string(ids.size()) + " ids are more than the " +
                                std::to_string(room_) + " rows that there is room for.");
  const std::vector<int64_t> missing = MakeRoom(ids);
  const int64_t step = std::max<int64_t>(1, kDiskWindow / row_bytes_);
  std::vector<char> window(std::min<int64_t>(step, missing.size()) * row_bytes_);
  for (int64_t at = 0; at < static_cast<int64_t>(missing.size()); at += step) {
    const int64_t count = std::min<int64_t>(step, missing.size() - at);
    const Rows rows{missing.data() + at, count, row_bytes_};
    if (!source.ReadRowsFromDisk(rows, window.data(), abort, error)) return false;
    Put(rows, window.data());
  }
  return true;
}

std::vector<float> RowCache::taken() const {
  const MutexLock lock(mutex_);
  return taken_;
}

void RowCache::Age(float by) {
  const MutexLock lock(mutex_);
  for (float& count : taken_) count *= by;
}

std::vector<int64_t> RowCache::kept() const {
  std::vector<int64_t> rows;
  const MutexLock lock(mutex_);
  for (const Slot& slot : slots_)
    if (slot.is_valid) rows.push_back(slot.row);
  std::sort(rows.begin(), rows.end());
  return rows;
}

RowCache::Counts RowCache::counts() const {
  const MutexLock lock(mutex_);
  return counts_;
}

}  // namespace jaxoffload

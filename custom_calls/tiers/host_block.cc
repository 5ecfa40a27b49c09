#include "tiers/host_block.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <new>
#include <utility>

#include "base/pages.h"

namespace jaxoffload {
namespace {

constexpr int64_t kHugePages = kHugePage / kPage;
constexpr int64_t kPinPages = HostBlock::kPinBytes / kPage;

// Advice only. What is left behind the last whole huge page is in small ones, whatever was there
// before: another huge one would take up to 2 MiB that nobody asked for.
void AdviseHugePages(char* place, int64_t bytes) {
  const int64_t in_huge = RoundDown(bytes, kHugePage);
  madvise(place, in_huge, MADV_HUGEPAGE);
  if (in_huge < bytes) madvise(place + in_huge, bytes - in_huge, MADV_NOHUGEPAGE);
}

int HighestBit(uint64_t value) { return 63 - __builtin_clzll(value); }

}  // namespace

HostBlock::HostBlock(int64_t cap_bytes, int64_t reserve_bytes)
    : range_(reserve_bytes), pages_(range_.bytes() / kPage), cap_pages_(cap_bytes / kPage) {
  if (base() == nullptr) throw std::bad_alloc();
  MutexLock lock(mutex_);
  auto whole = std::make_unique<Extent>();
  whole->size = pages_;
  last_ = whole.get();
  Insert(last_);
  extents_.emplace(0, std::move(whole));
}

HostBlock::~HostBlock() {
  MutexLock lock(mutex_);
  for (size_t chunk = 0; chunk < pinned_.size(); ++chunk) UnpinChunk(static_cast<int64_t>(chunk));
}

void HostBlock::ListOf(int64_t size, int* first, int* second) {
  if (size < kSecond) {
    *first = 0;
    *second = static_cast<int>(size);
    return;
  }
  const int bit = HighestBit(static_cast<uint64_t>(size));
  *first = bit - 3;  // 16 pages are in list 1
  *second = static_cast<int>((size >> (bit - 4)) - kSecond);
}

void HostBlock::Insert(Extent* extent) {
  int first;
  int second;
  ListOf(extent->size, &first, &second);
  extent->is_free = true;
  extent->previous = nullptr;
  extent->next = lists_[first][second];
  if (extent->next != nullptr) extent->next->previous = extent;
  lists_[first][second] = extent;
  second_map_[first] |= uint32_t{1} << second;
  first_map_ |= uint64_t{1} << first;
  kept_pages_ += extent->kept;
}

void HostBlock::Remove(Extent* extent) {
  int first;
  int second;
  ListOf(extent->size, &first, &second);
  if (extent->previous != nullptr) {
    extent->previous->next = extent->next;
  } else {
    lists_[first][second] = extent->next;
    if (extent->next == nullptr) {
      second_map_[first] &= ~(uint32_t{1} << second);
      if (second_map_[first] == 0) first_map_ &= ~(uint64_t{1} << first);
    }
  }
  if (extent->next != nullptr) extent->next->previous = extent->previous;
  extent->is_free = false;
  kept_pages_ -= extent->kept;
}

HostBlock::Extent* HostBlock::FindFree(int64_t size) {
  // Rounded up to the start of the next list, so that whatever is found there is long enough.
  int64_t wanted = size;
  if (size >= kSecond) {
    const int bit = HighestBit(static_cast<uint64_t>(size));
    wanted = RoundUp(size, int64_t{1} << (bit - 4));
  }
  int first;
  int second;
  ListOf(wanted, &first, &second);
  uint32_t seconds = second_map_[first] & (~uint32_t{0} << second);
  if (seconds == 0) {
    const uint64_t firsts = first + 1 < 64 ? first_map_ & (~uint64_t{0} << (first + 1)) : 0;
    if (firsts == 0) return nullptr;
    first = __builtin_ctzll(firsts);
    seconds = second_map_[first];
  }
  return lists_[first][__builtin_ctz(seconds)];
}

void HostBlock::Split(Extent* extent, int64_t size) {
  if (extent->size == size) return;
  auto rest = std::make_unique<Extent>();
  rest->start = extent->start + size;
  rest->size = extent->size - size;
  rest->kept = std::max<int64_t>(extent->kept - size, 0);
  rest->before = extent;
  rest->after = extent->after;
  if (extent->after != nullptr) {
    extent->after->before = rest.get();
  } else {
    last_ = rest.get();
  }
  extent->after = rest.get();
  extent->size = size;
  extent->kept = std::min(extent->kept, size);
  Insert(rest.get());
  extents_.emplace(rest->start, std::move(rest));
}

HostBlock::Extent* HostBlock::Join(Extent* extent) {
  for (const bool forward : {false, true}) {
    Extent* const low = forward ? extent : extent->before;
    Extent* const high = forward ? extent->after : extent;
    if (low == nullptr || high == nullptr) continue;
    Extent* const other = forward ? high : low;
    if (!other->is_free) continue;
    Remove(other);
    low->size += high->size;
    low->kept += high->kept;
    low->after = high->after;
    if (low->after != nullptr) {
      low->after->before = low;
    } else {
      last_ = low;
    }
    extents_.erase(high->start);
    extent = low;
  }
  return extent;
}

void HostBlock::GrowTo(int64_t pages) {
  // In steps, for each is a system call.
  const int64_t wanted = std::min(pages_, RoundUp(pages, 8 * kHugePages));
  if (wanted <= usable_pages_) return;
  if (!range_.Open(wanted * kPage)) throw std::bad_alloc();
  usable_pages_ = wanted;
}

char* HostBlock::Allocate(int64_t bytes) {
  // Before anything is added to it.
  if (bytes < 0 || bytes > pages_ * kPage) throw std::bad_alloc();
  const bool is_huge = bytes >= kHugePage;
  const int64_t size = std::max<int64_t>(1, RoundUp(bytes, kPage) / kPage);
  MutexLock lock(mutex_);
  Extent* extent = FindFree(is_huge ? size + kHugePages - 1 : size);
  if (extent == nullptr) throw std::bad_alloc();
  const int64_t skip = is_huge ? RoundUp(extent->start, kHugePages) - extent->start : 0;
  GrowTo(extent->start + skip + size);
  PinRange(extent->start + skip, size);
  Remove(extent);
  if (skip > 0) {
    Extent* const lead = extent;
    Split(lead, skip);
    extent = lead->after;
    Remove(extent);
    Insert(lead);
  }
  Split(extent, size);
  extent->kept = size;  // it will be touched
  stats_.in_use_bytes += size * kPage;
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.in_use_bytes);
  ++stats_.num_allocated;
  char* const place = base() + extent->start * kPage;
  if (is_huge) AdviseHugePages(place, size * kPage);
  return place;
}

void HostBlock::Free(char* place) {
  MutexLock lock(mutex_);
  const int64_t offset = place - base();
  const auto found = offset % kPage == 0 ? extents_.find(offset / kPage) : extents_.end();
  if (found == extents_.end() || found->second->is_free) {
    std::fprintf(stderr, "jaxoffload: %p is no place of the host tier, or was freed before\n",
                 static_cast<void*>(place));
    std::abort();
  }
  stats_.in_use_bytes -= found->second->size * kPage;
  ++stats_.num_freed;
  Insert(Join(found->second.get()));
  ShrinkTo(KeepPages());
}

void HostBlock::Discard(Extent* extent) {
  const int64_t start = extent->start;
  const int64_t end = std::min(extent->start + extent->size, usable_pages_);
  int64_t gone = extent->kept;
  if (!pin_) {
    range_.Discard(start * kPage, end * kPage);
  } else {
    // A device still knows the pages of a pinned range, so those go only with the whole range.
    int64_t discarded = 0;
    for (int64_t page = RoundUp(start, kPinPages); page + kPinPages <= end; page += kPinPages) {
      if (!UnpinChunk(page / kPinPages)) continue;
      range_.Discard(page * kPage, (page + kPinPages) * kPage);
      discarded += kPinPages;
    }
    gone = std::min(extent->kept, discarded);
  }
  kept_pages_ -= gone;
  extent->kept -= gone;
}

void HostBlock::PinRange(int64_t start, int64_t size) {
  if (!pin_) return;
  pinned_.resize((pages_ + kPinPages - 1) / kPinPages);
  for (int64_t chunk = start / kPinPages; chunk * kPinPages < start + size; ++chunk) {
    if (pinned_[chunk]) continue;
    const int64_t first = chunk * kPinPages;
    const int64_t pages = std::min(kPinPages, pages_ - first);
    GrowTo(first + pages);
    if (pin_(base() + first * kPage, pages * kPage)) {
      pinned_[chunk] = true;
      stats_.pinned_bytes += pages * kPage;
    } else {
      ++stats_.num_pin_failures;
    }
  }
}

bool HostBlock::UnpinChunk(int64_t chunk) {
  if (chunk >= static_cast<int64_t>(pinned_.size()) || !pinned_[chunk]) return true;
  if (!unpin_(base() + chunk * kPinBytes)) {
    ++stats_.num_unpin_failures;
    return false;
  }
  pinned_[chunk] = false;
  stats_.pinned_bytes -= std::min(kPinPages, pages_ - chunk * kPinPages) * kPage;
  return true;
}

void HostBlock::PinWith(Pin pin, Unpin unpin) {
  MutexLock lock(mutex_);
  if (pin_) return;
  pin_ = std::move(pin);
  unpin_ = std::move(unpin);
  for (const Extent* extent = last_; extent != nullptr; extent = extent->before) {
    if (!extent->is_free) PinRange(extent->start, extent->size);
  }
}

bool HostBlock::IsPinned(const char* place, int64_t bytes) const {
  const int64_t offset = place - base();
  if (offset < 0 || bytes < 0 || bytes > pages_ * kPage - offset) return false;
  MutexLock lock(mutex_);
  for (int64_t chunk = offset / kPinBytes; chunk * kPinBytes < offset + bytes; ++chunk) {
    if (chunk >= static_cast<int64_t>(pinned_.size()) || !pinned_[chunk]) return false;
  }
  return true;
}

int64_t HostBlock::BytesToPinBorder(const char* place) const {
  const int64_t offset = place - base();
  if (offset < 0 || offset >= pages_ * kPage) return std::numeric_limits<int64_t>::max();
  return kPinBytes - offset % kPinBytes;
}

void HostBlock::ShrinkTo(int64_t pages) {
  for (int first = kFirst - 1; first >= 0 && kept_pages_ > pages; --first) {
    for (int second = kSecond - 1; second >= 0; --second) {
      for (Extent* extent = lists_[first][second]; extent != nullptr; extent = extent->next) {
        if (kept_pages_ > pages && extent->kept > 0) Discard(extent);
      }
    }
  }
}

int64_t HostBlock::KeepPages() const {
  if (expected_.empty()) return cap_pages_;
  return std::max(cap_pages_, RoundUp(*expected_.rbegin(), kHugePage) / kPage);
}

void HostBlock::Expect(int64_t bytes) {
  MutexLock lock(mutex_);
  expected_.insert(std::min(bytes, pages_ * kPage));
}

void HostBlock::Forget(int64_t bytes) {
  MutexLock lock(mutex_);
  const auto found = expected_.find(std::min(bytes, pages_ * kPage));
  if (found != expected_.end()) expected_.erase(found);
  ShrinkTo(KeepPages());
}

void HostBlock::ReleaseFree() {
  MutexLock lock(mutex_);
  ShrinkTo(0);
}

void HostBlock::SetCap(int64_t cap_bytes) {
  MutexLock lock(mutex_);
  cap_pages_ = cap_bytes / kPage;
  ShrinkTo(KeepPages());
}

HostBlock::Stats HostBlock::stats() const {
  MutexLock lock(mutex_);
  Stats found = stats_;
  found.kept_bytes = kept_pages_ * kPage;
  bool below = false;
  for (const Extent* extent = last_; extent != nullptr; extent = extent->before) {
    if (!extent->is_free) {
      below = true;
    } else if (below) {
      found.hole_bytes += extent->size * kPage;
      found.largest_hole_bytes = std::max(found.largest_hole_bytes, extent->size * kPage);
    }
  }
  return found;
}

HostBlock& HostBlock::Global() {
  // A quarter of the machine's memory: enough for the results of a training step, and what is kept
  // counts as used by this process.
  static HostBlock* const block =
      new HostBlock(int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE) / 4);
  return *block;
}

}  // namespace jaxoffload

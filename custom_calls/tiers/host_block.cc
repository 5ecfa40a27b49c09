#include "tiers/host_block.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <new>
#include <utility>

namespace jaxoffload {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kHugePages = kHugePage / kPage;
constexpr int64_t kPinPages = HostBlock::kPinBytes / kPage;

int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

int HighestBit(uint64_t value) { return 63 - __builtin_clzll(value); }

}  // namespace

HostBlock::HostBlock(int64_t cap_bytes, int64_t reserve_bytes) : cap_pages_(cap_bytes / kPage) {
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
    pages_ = bytes / kPage;
    MutexLock lock(mutex_);
    auto whole = std::make_unique<Run>(Run{0, pages_, true, 0, nullptr, nullptr, nullptr, nullptr});
    last_ = whole.get();
    Insert(last_);
    runs_.emplace(0, std::move(whole));
    return;
  }
  throw std::bad_alloc();
}

HostBlock::~HostBlock() {
  {
    MutexLock lock(mutex_);
    for (size_t chunk = 0; chunk < pinned_.size(); ++chunk) UnpinChunk(static_cast<int64_t>(chunk));
  }
  munmap(base_, pages_ * kPage);
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

void HostBlock::Insert(Run* run) {
  int first;
  int second;
  ListOf(run->size, &first, &second);
  run->is_free = true;
  run->previous = nullptr;
  run->next = lists_[first][second];
  if (run->next != nullptr) run->next->previous = run;
  lists_[first][second] = run;
  second_map_[first] |= uint32_t{1} << second;
  first_map_ |= uint64_t{1} << first;
  kept_pages_ += run->kept;
}

void HostBlock::Remove(Run* run) {
  int first;
  int second;
  ListOf(run->size, &first, &second);
  if (run->previous != nullptr) {
    run->previous->next = run->next;
  } else {
    lists_[first][second] = run->next;
    if (run->next == nullptr) {
      second_map_[first] &= ~(uint32_t{1} << second);
      if (second_map_[first] == 0) first_map_ &= ~(uint64_t{1} << first);
    }
  }
  if (run->next != nullptr) run->next->previous = run->previous;
  run->is_free = false;
  kept_pages_ -= run->kept;
}

HostBlock::Run* HostBlock::FindFree(int64_t size) {
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

void HostBlock::Split(Run* run, int64_t size) {
  if (run->size == size) return;
  auto rest = std::make_unique<Run>(Run{run->start + size, run->size - size, true,
                                        std::max<int64_t>(run->kept - size, 0), run, run->after,
                                        nullptr, nullptr});
  if (run->after != nullptr) {
    run->after->before = rest.get();
  } else {
    last_ = rest.get();
  }
  run->after = rest.get();
  run->size = size;
  run->kept = std::min(run->kept, size);
  Insert(rest.get());
  runs_.emplace(rest->start, std::move(rest));
}

HostBlock::Run* HostBlock::Join(Run* run) {
  for (const bool forward : {false, true}) {
    Run* const low = forward ? run : run->before;
    Run* const high = forward ? run->after : run;
    if (low == nullptr || high == nullptr) continue;
    Run* const other = forward ? high : low;
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
    runs_.erase(high->start);
    run = low;
  }
  return run;
}

void HostBlock::GrowTo(int64_t pages) {
  // In steps, for each is a system call; without access pages count against no limit.
  const int64_t wanted = std::min(pages_, RoundUp(pages, 8 * kHugePages));
  if (wanted <= usable_pages_) return;
  if (mprotect(base_, wanted * kPage, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  usable_pages_ = wanted;
}

char* HostBlock::Allocate(int64_t bytes) {
  // Before anything is added to it.
  if (bytes < 0 || bytes > pages_ * kPage) throw std::bad_alloc();
  const bool is_huge = bytes >= kHugePage;
  const int64_t size = std::max<int64_t>(1, RoundUp(bytes, is_huge ? kHugePage : kPage) / kPage);
  MutexLock lock(mutex_);
  Run* run = FindFree(is_huge ? size + kHugePages - 1 : size);
  if (run == nullptr) throw std::bad_alloc();
  const int64_t skip = is_huge ? RoundUp(run->start, kHugePages) - run->start : 0;
  GrowTo(run->start + skip + size);
  PinRange(run->start + skip, size);
  Remove(run);
  if (skip > 0) {
    Run* const lead = run;
    Split(lead, skip);
    run = lead->after;
    Remove(run);
    Insert(lead);
  }
  Split(run, size);
  run->kept = size;  // it will be touched
  stats_.in_use_bytes += size * kPage;
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.in_use_bytes);
  ++stats_.num_allocated;
  char* const place = base_ + run->start * kPage;
  if (is_huge) madvise(place, size * kPage, MADV_HUGEPAGE);  // advice only
  return place;
}

void HostBlock::Free(char* place) {
  MutexLock lock(mutex_);
  const int64_t offset = place - base_;
  const auto found = offset % kPage == 0 ? runs_.find(offset / kPage) : runs_.end();
  if (found == runs_.end() || found->second->is_free) {
    std::fprintf(stderr, "jaxoffload: %p is no place of the host tier, or was freed before\n",
                 static_cast<void*>(place));
    std::abort();
  }
  stats_.in_use_bytes -= found->second->size * kPage;
  ++stats_.num_freed;
  Insert(Join(found->second.get()));
  ShrinkTo(KeepPages());
}

void HostBlock::Discard(Run* run) {
  const int64_t start = run->start;
  const int64_t end = std::min(run->start + run->size, usable_pages_);
  int64_t gone = run->kept;
  if (!pin_) {
    if (end > start) madvise(base_ + start * kPage, (end - start) * kPage, MADV_DONTNEED);
  } else {
    // A device still knows the pages of a pinned range, so those go only with the whole range.
    int64_t discarded = 0;
    for (int64_t page = RoundUp(start, kPinPages); page + kPinPages <= end; page += kPinPages) {
      if (!UnpinChunk(page / kPinPages)) continue;
      madvise(base_ + page * kPage, kPinBytes, MADV_DONTNEED);
      discarded += kPinPages;
    }
    gone = std::min(run->kept, discarded);
  }
  kept_pages_ -= gone;
  run->kept -= gone;
}

void HostBlock::PinRange(int64_t start, int64_t size) {
  if (!pin_) return;
  pinned_.resize((pages_ + kPinPages - 1) / kPinPages);
  for (int64_t chunk = start / kPinPages; chunk * kPinPages < start + size; ++chunk) {
    if (pinned_[chunk]) continue;
    const int64_t first = chunk * kPinPages;
    const int64_t pages = std::min(kPinPages, pages_ - first);
    GrowTo(first + pages);
    if (pin_(base_ + first * kPage, pages * kPage)) {
      pinned_[chunk] = true;
      stats_.pinned_bytes += pages * kPage;
    } else {
      ++stats_.num_pin_failures;
    }
  }
}

bool HostBlock::UnpinChunk(int64_t chunk) {
  if (chunk >= static_cast<int64_t>(pinned_.size()) || !pinned_[chunk]) return true;
  if (!unpin_(base_ + chunk * kPinBytes)) {
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
  for (const Run* run = last_; run != nullptr; run = run->before) {
    if (!run->is_free) PinRange(run->start, run->size);
  }
}

bool HostBlock::IsPinned(const char* place, int64_t bytes) const {
  const int64_t offset = place - base_;
  if (offset < 0 || bytes < 0 || bytes > pages_ * kPage - offset) return false;
  MutexLock lock(mutex_);
  for (int64_t chunk = offset / kPinBytes; chunk * kPinBytes < offset + bytes; ++chunk) {
    if (chunk >= static_cast<int64_t>(pinned_.size()) || !pinned_[chunk]) return false;
  }
  return true;
}

int64_t HostBlock::BytesToPinBorder(const char* place) const {
  const int64_t offset = place - base_;
  if (offset < 0 || offset >= pages_ * kPage) return std::numeric_limits<int64_t>::max();
  return kPinBytes - offset % kPinBytes;
}

void HostBlock::ShrinkTo(int64_t pages) {
  for (int first = kFirst - 1; first >= 0 && kept_pages_ > pages; --first) {
    for (int second = kSecond - 1; second >= 0; --second) {
      for (Run* run = lists_[first][second]; run != nullptr; run = run->next) {
        if (kept_pages_ > pages && run->kept > 0) Discard(run);
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
  for (const Run* run = last_; run != nullptr; run = run->before) {
    if (!run->is_free) {
      below = true;
    } else if (below) {
      found.hole_bytes += run->size * kPage;
      found.largest_hole_bytes = std::max(found.largest_hole_bytes, run->size * kPage);
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

// The host tier: one contiguous range of addresses of the process, and what of it is in use.
//
// The block is divided into extents, each in use or free: a two-level segregated fit (Masmano et
// al., ECRTS 2004). Free extents are in lists by size and a bitmap tells which lists have any, so
// Allocate and Free take the same few steps however many there are. Free neighbours are joined at
// once. What the allocator knows is kept outside the range: pages of free extents can be given
// back, and a stray write cannot corrupt it.
//
// Fresh pages cost a fault each (about 0.1 ms a MiB, more than copying it), so free extents keep
// theirs up to a cap; beyond it the longest give theirs back first. A plan tells how many bytes its
// runs take (Expect), and so many are kept even beyond the cap. On a machine with several memory
// nodes a page comes from the node of the thread that first touches it: the lane that copies to it.
//
// Where a device copies by itself, PinWith has ranges of kPinBytes pinned as soon as a place in one
// is taken. A range is unpinned before its pages are given back. Where that fails they stay: the
// device would go on using them when others are at their addresses.

#ifndef JAXOFFLOAD_TIERS_HOST_BLOCK_H_
#define JAXOFFLOAD_TIERS_HOST_BLOCK_H_

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "tiers/address_range.h"

namespace jaxoffload {

class HostBlock {
 public:
  struct Stats {
    int64_t in_use_bytes = 0;
    int64_t peak_bytes = 0;  // the most that was in use at once
    int64_t kept_bytes = 0;  // of free extents, probably resident
    int64_t hole_bytes = 0;  // free below the highest place in use
    int64_t largest_hole_bytes = 0;
    int64_t num_allocated = 0;
    int64_t num_freed = 0;
    int64_t pinned_bytes = 0;
    int64_t num_pin_failures = 0;
    int64_t num_unpin_failures = 0;
  };

  static constexpr int64_t kPinBytes = int64_t{64} << 20;
  // Pins a range, and ends that. False if it cannot be done. Must not throw.
  using Pin = std::function<bool(char* place, int64_t bytes)>;
  using Unpin = std::function<bool(char* place)>;

  // Reserves addresses, not memory: up to `reserve_bytes`, less where the system refuses.
  explicit HostBlock(int64_t cap_bytes, int64_t reserve_bytes = int64_t{1} << 40);
  ~HostBlock();
  HostBlock(const HostBlock&) = delete;
  HostBlock& operator=(const HostBlock&) = delete;

  // Whole pages, from 2 MiB on aligned to 2 MiB with huge pages advised as far as they are full.
  // Contents are anything. Throws std::bad_alloc.
  char* Allocate(int64_t bytes) EXCLUDES(mutex_);
  // What Allocate gave. Ends the process, with a message, if it did not, or has it back already.
  void Free(char* place) EXCLUDES(mutex_);

  // Keeps the pages of so many bytes from one run of a plan to the next, until Forget is told the
  // same number. Of several the largest counts.
  void Expect(int64_t bytes) EXCLUDES(mutex_);
  void Forget(int64_t bytes) EXCLUDES(mutex_);

  // Pins what is in use, and from now on what is allocated. A range that cannot be pinned is used
  // as it is, and counted. The first caller's functions stay.
  void PinWith(Pin pin, Unpin unpin) EXCLUDES(mutex_);
  // Bytes from an address to the end of the range that is pinned together with it; no limit for an
  // address that is not in the block.
  int64_t BytesToPinBorder(const char* place) const;

  // Whether all of it is in the block and pinned.
  bool IsPinned(const char* place, int64_t bytes) const EXCLUDES(mutex_);

  // Gives the pages of free extents back to the system.
  void ReleaseFree() EXCLUDES(mutex_);
  // How many bytes of free extents may stay resident.
  void SetCap(int64_t cap_bytes) EXCLUDES(mutex_);
  Stats stats() const EXCLUDES(mutex_);

  // The one of this process; never destroyed, for places may outlive everything.
  static HostBlock& Global();

 private:
  // Sizes are in pages. Up to 16 pages each size has a list of its own; above, 16 lists a power of
  // two.
  static constexpr int kSecond = 16;
  static constexpr int kFirst = 32;

  struct Extent {
    int64_t start = 0;
    int64_t size = 0;
    bool is_free = true;
    int64_t kept = 0;          // pages that were touched and not given back: the first ones, mostly
    Extent* before = nullptr;  // neighbours by address
    Extent* after = nullptr;
    Extent* previous = nullptr;  // in its list of free extents
    Extent* next = nullptr;
  };

  static void ListOf(int64_t size, int* first, int* second);
  Extent* FindFree(int64_t size) REQUIRES(mutex_);
  void Insert(Extent* extent) REQUIRES(mutex_);
  void Remove(Extent* extent) REQUIRES(mutex_);
  // Cuts an extent that is in no list behind its first `size` pages; the rest becomes free.
  void Split(Extent* extent, int64_t size) REQUIRES(mutex_);
  // Joins an extent that is in no list with its free neighbours; returns what became of it.
  Extent* Join(Extent* extent) REQUIRES(mutex_);
  void Discard(Extent* extent) REQUIRES(mutex_);
  void ShrinkTo(int64_t pages) REQUIRES(mutex_);
  int64_t KeepPages() const REQUIRES(mutex_);

  void PinRange(int64_t start, int64_t size) REQUIRES(mutex_);
  // False if the device keeps it.
  bool UnpinChunk(int64_t chunk) REQUIRES(mutex_);

  // Makes the pages up to there usable. Throws std::bad_alloc.
  void GrowTo(int64_t pages) REQUIRES(mutex_);

  char* base() const { return range_.base(); }

  const AddressRange range_;
  const int64_t pages_;

  mutable Mutex mutex_;
  int64_t cap_pages_ GUARDED_BY(mutex_);
  std::multiset<int64_t> expected_ GUARDED_BY(mutex_);  // bytes
  int64_t usable_pages_ GUARDED_BY(mutex_) = 0;         // from the start; the others have no access
  int64_t kept_pages_ GUARDED_BY(mutex_) = 0;
  uint64_t first_map_ GUARDED_BY(mutex_) = 0;
  std::array<uint32_t, kFirst> second_map_ GUARDED_BY(mutex_){};
  std::array<std::array<Extent*, kSecond>, kFirst> lists_ GUARDED_BY(mutex_){};
  std::unordered_map<int64_t, std::unique_ptr<Extent>> extents_ GUARDED_BY(mutex_);  // by start
  Extent* last_ GUARDED_BY(mutex_) = nullptr;
  Stats stats_ GUARDED_BY(mutex_);
  Pin pin_ GUARDED_BY(mutex_);
  Unpin unpin_ GUARDED_BY(mutex_);
  std::vector<bool> pinned_ GUARDED_BY(mutex_);  // by range of kPinBytes
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_TIERS_HOST_BLOCK_H_

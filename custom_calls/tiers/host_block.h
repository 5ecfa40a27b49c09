// The host tier: one contiguous range of addresses of the process, and who has which part of it.
//
// Two-level segregated fit (Masmano et al., ECRTS 2004): free runs in lists by size, a bitmap tells
// which lists have any, so taking and giving back take the same few steps whatever is in there.
// Neighbours are joined at once. What the allocator knows of a run is kept outside the range, so
// that the pages of free runs can be given back, and a stray write cannot corrupt it.
//
// Fresh pages cost a fault each (about 0.1 ms a MiB, more than copying it), so those of free runs
// are kept, up to a cap, beyond which the longest runs' go back to the system. A plan says what its
// runs will take, and as much is kept for it whatever the cap is. On a machine with
// several memory nodes a page comes from the node of the thread that first touches it, which is the
// lane that copies to it: nothing better is known here.
//
// Where a device copies from and to the tier by itself, PinWith has ranges of kPinBytes pinned as
// soon as a place in one is taken; one is let go when its pages are given back. Pages of a range
// that cannot be let go stay: the device would go on using them when others are at their addresses.

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

namespace jaxoffload {

class HostBlock {
 public:
  struct Stats {
    int64_t in_use_bytes = 0;
    int64_t peak_bytes = 0;  // the most that was in use at once
    int64_t kept_bytes = 0;  // of free runs, probably resident
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

  // Aligned to a page, from 2 MiB on to 2 MiB with huge pages advised. Contents are anything.
  // Throws std::bad_alloc.
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

  // Gives the pages of free runs back to the system.
  void ReleaseFree() EXCLUDES(mutex_);
  // How many bytes of free runs may stay resident.
  void SetCap(int64_t cap_bytes) EXCLUDES(mutex_);
  Stats stats() const EXCLUDES(mutex_);

  // The one of this process; never destroyed, for places may outlive everything.
  static HostBlock& Global();

 private:
  // Sizes are in pages. Up to 16 pages each size has a list of its own; above, 16 lists a power of
  // two.
  static constexpr int kSecond = 16;
  static constexpr int kFirst = 32;

  struct Run {
    int64_t start;
    int64_t size;
    bool is_free;
    int64_t kept;  // pages that were touched and not given back: the first ones, mostly
    Run* before;   // neighbours by address
    Run* after;
    Run* previous;  // in the list of free runs
    Run* next;
  };

  static void ListOf(int64_t size, int* first, int* second);
  Run* FindFree(int64_t size) REQUIRES(mutex_);
  void Insert(Run* run) REQUIRES(mutex_);
  void Remove(Run* run) REQUIRES(mutex_);
  // Cuts a run that is in no list behind its first `size` pages; the rest becomes free.
  void Split(Run* run, int64_t size) REQUIRES(mutex_);
  // Joins a run that is in no list with its free neighbours; returns what became of it.
  Run* Join(Run* run) REQUIRES(mutex_);
  void Discard(Run* run) REQUIRES(mutex_);
  void ShrinkTo(int64_t pages) REQUIRES(mutex_);
  int64_t KeepPages() const REQUIRES(mutex_);

  void PinRange(int64_t start, int64_t size) REQUIRES(mutex_);
  // False if the device keeps it.
  bool UnpinChunk(int64_t chunk) REQUIRES(mutex_);

  // Makes the pages up to there usable. Throws std::bad_alloc.
  void GrowTo(int64_t pages) REQUIRES(mutex_);

  char* base_ = nullptr;
  int64_t pages_ = 0;

  mutable Mutex mutex_;
  int64_t cap_pages_ GUARDED_BY(mutex_);
  std::multiset<int64_t> expected_ GUARDED_BY(mutex_);  // bytes
  int64_t usable_pages_ GUARDED_BY(mutex_) = 0;         // from the start; the others have no access
  int64_t kept_pages_ GUARDED_BY(mutex_) = 0;
  uint64_t first_map_ GUARDED_BY(mutex_) = 0;
  std::array<uint32_t, kFirst> second_map_ GUARDED_BY(mutex_){};
  std::array<std::array<Run*, kSecond>, kFirst> lists_ GUARDED_BY(mutex_){};
  std::unordered_map<int64_t, std::unique_ptr<Run>> runs_ GUARDED_BY(mutex_);  // by start
  Run* last_ GUARDED_BY(mutex_) = nullptr;
  Stats stats_ GUARDED_BY(mutex_);
  Pin pin_ GUARDED_BY(mutex_);
  Unpin unpin_ GUARDED_BY(mutex_);
  std::vector<bool> pinned_ GUARDED_BY(mutex_);  // by range of kPinBytes
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_TIERS_HOST_BLOCK_H_

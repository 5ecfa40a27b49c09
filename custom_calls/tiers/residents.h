// What runs have left in the arenas for runs to come: parts of callers' arrays, at places. Some of
// it is newer than the arrays themselves: it is owed to them, and paid when somebody reads them, or
// when the place is needed.
//
// Every run says first which places it is to find, which bytes it may write over and which arrays
// it reads. So whatever plan runs in between, what is told to be there is there, and what is read
// is up to date.

#ifndef JAXOFFLOAD_TIERS_RESIDENTS_H_
#define JAXOFFLOAD_TIERS_RESIDENTS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace jaxoffload {

// A part of an array, and its place.
struct Resident {
  int32_t device;
  int64_t start;  // in the device's arena
  int64_t bytes;
  uint64_t stamp;      // of the array (base/stamp.h)
  int64_t part_start;  // in the array

  // The array's memory if it is owed these bytes, else null. Nobody is owed when that is gone.
  char* owed_to = nullptr;
  std::weak_ptr<void> owner{};
  // Why the bytes are lost, and so can never be paid; empty if they are not.
  std::string lost{};

  bool IsSame(const Resident& other) const {
    return device == other.device && start == other.start && bytes == other.bytes &&
           stamp == other.stamp && part_start == other.part_start;
  }
};

class Residents {
 public:
  // Copies what is owed to an array. May throw.
  using Pay = std::function<void(const Resident&)>;

  // What a run is to find.
  struct Wanted {
    Resident place;
    bool changes;  // it will be written over, so that nothing is there until it is added again
    // Its bytes are looked for in the array, too, so that they may not be owed.
    bool is_read_elsewhere = false;
    // Others are in its place meanwhile: what is owed is paid, and nothing is there until it is
    // added again.
    bool gives_way = false;
  };
  enum class Found : uint8_t { kNo = 0, kYes = 1, kOwed = 2 };

  // Before a run that uses the first `used` bytes of each device's arena and reads arrays at
  // `read`. Pays what is owed to those, or is in the way, unless it is wanted and nobody looks for
  // it elsewhere; forgets what is in the way. Returns what of `wanted` is in its place.
  std::vector<Found> Keep(const std::vector<int64_t>& used, const std::vector<char*>& read,
                          const std::vector<Wanted>& wanted, const Pay& pay) EXCLUDES(mutex_);
  // After a run: a part is in its place now.
  void Add(const Resident& found) EXCLUDES(mutex_);
  // Pays and forgets what is in a device's arena beyond so many bytes. What cannot be paid is lost:
  // whoever reads its array is told.
  void ForgetBeyond(int32_t device, int64_t bytes, const Pay& pay) EXCLUDES(mutex_);
  // Pays and forgets those.
  void Forget(const std::vector<Resident>& these, const Pay& pay) EXCLUDES(mutex_);
  // Pays all that is owed to an array.
  void Settle(const char* array, const Pay& pay) EXCLUDES(mutex_);

  bool Has(const Resident& wanted) const EXCLUDES(mutex_);
  bool Owes(const char* array) const EXCLUDES(mutex_);
  bool empty() const EXCLUDES(mutex_);
  // How many parts are lost and may still be asked for.
  size_t num_lost() const EXCLUDES(mutex_);

 private:
  using Map = std::map<std::pair<int32_t, int64_t>, Resident>;  // by device and start

  // Null if it is not there.
  const Resident* Find(const Resident& wanted) const REQUIRES(mutex_);
  static void PayOne(Resident& resident, const Pay& pay);

  mutable Mutex mutex_;
  Map found_ GUARDED_BY(mutex_);
  std::vector<Resident> lost_ GUARDED_BY(mutex_);
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_TIERS_RESIDENTS_H_

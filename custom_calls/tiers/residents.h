// What runs have left in the arenas for runs to come: parts of callers' arrays, at places.
//
// Every run says first which places it is to find, and which bytes it may write over. So whatever
// plan runs in between, what is told to be there is there.

#ifndef JAXOFFLOAD_TIERS_RESIDENTS_H_
#define JAXOFFLOAD_TIERS_RESIDENTS_H_

#include <cstdint>
#include <map>
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

  bool operator==(const Resident& other) const {
    return device == other.device && start == other.start && bytes == other.bytes &&
           stamp == other.stamp && part_start == other.part_start;
  }
};

class Residents {
 public:
  // Before a run that uses the first `used` bytes of each device's arena: forgets what is there,
  // but for what it asks for. Returns for each of `wanted` whether it is in its place.
  std::vector<uint8_t> Keep(const std::vector<int64_t>& used, const std::vector<Resident>& wanted)
      EXCLUDES(mutex_);
  // After a run: a part is in its place now.
  void Add(const Resident& found) EXCLUDES(mutex_);
  // Forgets what is in a device's arena beyond so many bytes.
  void ForgetBeyond(int32_t device, int64_t bytes) EXCLUDES(mutex_);
  // Forgets those.
  void Forget(const std::vector<Resident>& these) EXCLUDES(mutex_);
  // Whether it is in its place.
  bool Has(const Resident& wanted) const EXCLUDES(mutex_);
  bool empty() const EXCLUDES(mutex_);

 private:
  bool IsThere(const Resident& wanted) const REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::map<std::pair<int32_t, int64_t>, Resident> found_ GUARDED_BY(mutex_);  // by device and start
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_TIERS_RESIDENTS_H_

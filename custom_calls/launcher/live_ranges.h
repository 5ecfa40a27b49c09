// Watches which bytes are in use while a run goes on, and stops the first vertex that would touch
// what another still needs. Only checked runs have one of these: every call takes a lock.
//
// A version is live from the start of its writer until its last reader has completed; an argument
// from the start of the run until then; a result for ever. To write to a range that overlaps a live
// version is an error, and so is to read a version before its writer has completed. (One that was
// overwritten is never read: while it has readers to come, overwriting it is refused.) A vertex may
// overwrite an input in place once all other readers have completed. Arguments may overlap: a
// caller may pass an array twice.
//
// Of a sum that takes what it adds in any order, whichever vertex comes k-th is taken for the k-th.
//
// Works on addresses, so it also sees clashes between the arenas and the caller's own arrays.

#ifndef JAXOFFLOAD_LAUNCHER_LIVE_RANGES_H_
#define JAXOFFLOAD_LAUNCHER_LIVE_RANGES_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "plan/loaded_plan.h"

namespace jaxoffload {

class LiveRanges {
 public:
  // `address` is of each version; both must outlive this. `by_streams`: a vertex starts when it is
  // put on its lane's stream, where kernels end in that order: the next part of a sum may then
  // start before the one before it has completed.
  LiveRanges(const LoadedPlan& plan, const std::vector<char*>& address, bool by_streams = false);

  // Before a vertex runs. False if it must not, with both vertices named in *error.
  bool Start(int32_t vertex_id, std::string* error) EXCLUDES(mutex_);
  // After a vertex has run.
  void Complete(int32_t vertex_id) EXCLUDES(mutex_);

  // The most bytes of one device's arena that were live at once.
  int64_t peak_device_bytes() const EXCLUDES(mutex_);

 private:
  enum class State : uint8_t { kAbsent, kBeingWritten, kIntact };

  uintptr_t Begin(int32_t version_id) const {
    return reinterpret_cast<uintptr_t>(address_[version_id]);
  }
  uintptr_t End(int32_t version_id) const { return Begin(version_id) + plan_.bytes(version_id); }
  bool Overlap(int32_t x, int32_t y) const { return Begin(x) < End(y) && Begin(y) < End(x); }

  // What a vertex reads and writes at a position of the plan's; of a sum what its turn says.
  int32_t Input(int32_t vertex_id, int64_t entry) const REQUIRES(mutex_) {
    const int32_t turn = turn_[vertex_id];
    const bool is_sum = entry == plan_.inputs(vertex_id).begin;
    return plan_.input(is_sum ? plan_.inputs(turn).begin : entry);
  }
  int64_t OutputEntry(int32_t vertex_id, int64_t entry) const REQUIRES(mutex_) {
    return entry - plan_.outputs(vertex_id).begin + plan_.outputs(turn_[vertex_id]).begin;
  }

  // Whether a version that a vertex reads is what a sum is so far, which its lane has under way.
  bool IsUnderWay(int32_t version_id, int32_t vertex_id) const REQUIRES(mutex_) {
    const int32_t sum = plan_.first_of_sum(vertex_id), writer = plan_.writer(version_id);
    return by_streams_ && sum >= 0 && writer >= 0 && plan_.first_of_sum(writer) == sum &&
           state_[version_id] == State::kBeingWritten;
  }

  void Insert(int32_t version_id) REQUIRES(mutex_);
  void Remove(int32_t version_id) REQUIRES(mutex_);
  bool CheckReads(int32_t vertex_id, std::string* error) REQUIRES(mutex_);
  bool CheckWrite(int32_t vertex_id, int64_t output, std::string* error) REQUIRES(mutex_);
  std::string DescribeVersion(int32_t version_id) const;
  // "vertex 9 (...) has still to read it", or why else a version is live.
  std::string WhyLive(int32_t version_id, int32_t apart_from) const REQUIRES(mutex_);

  const LoadedPlan& plan_;
  const std::vector<char*>& address_;
  const bool by_streams_;
  int64_t longest_ = 0;  // bytes of the largest version: how far back an overlap may begin

  mutable Mutex mutex_;
  std::map<std::pair<uintptr_t, int32_t>, int32_t> live_ GUARDED_BY(mutex_);  // by begin, version
  std::vector<State> state_ GUARDED_BY(mutex_);
  std::vector<int32_t> readers_left_ GUARDED_BY(mutex_);
  std::vector<bool> completed_ GUARDED_BY(mutex_);
  std::vector<int32_t> turn_ GUARDED_BY(mutex_);       // of each vertex, in whose place it comes
  std::vector<int32_t> next_turn_ GUARDED_BY(mutex_);  // of each part of a sum the next, or -1
  std::vector<int32_t> to_come_ GUARDED_BY(mutex_);    // by the first of a sum, whose turn is next
  std::vector<int64_t> device_bytes_ GUARDED_BY(mutex_);
  int64_t peak_device_bytes_ GUARDED_BY(mutex_) = 0;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_LAUNCHER_LIVE_RANGES_H_

// The lower tiers, host memory and disk: which of them has a copy of which tensor.
//
// The host tier is planned as the device is. It has a capacity, and where it is full the tensors
// whose next use is furthest are evicted, to the disk if no copy is there yet. So a tensor reaches
// the disk only when host memory is short, and comes back through it: a load into host memory, then
// a reload.
//
// Nothing but places holds a load back. So at run time loads go on ahead of reloads as far as host
// memory lasts, and reloads ahead of kernels: the prefetch pipeline of Fuyou's section 4. A copy
// stays until its place is needed: a reload of a tensor that has just been stored reads host memory
// (SSDTrain calls it forwarding), and what is stored once is not stored again.

#ifndef JAXOFFLOAD_PLANNER_LOWER_TIERS_H_
#define JAXOFFLOAD_PLANNER_LOWER_TIERS_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "planner/emitter.h"
#include "planner/occupancy.h"
#include "planner/task_table.h"
#include "planner/victims.h"

namespace jaxoffload {

// The next use of a tensor that nobody reads any more.
constexpr int64_t kNever = int64_t{1} << 60;

// The host tier has no room for a tensor that the device has none for either.
struct HostTierFull {
  int32_t tensor;
};

// Copies in the caller's arrays, in the host tier (whose occupancy it is) and on disk. Where a
// tensor has copies, and what changes that:
//
//   caller's array   from the start, or once a result has been written; stays to the end
//   host tier        from `Offload`, `Make` or a load until `Evict` or `Retire`
//   disk             from the start, or once `Evict` or `StoreResult` has stored it; stays until
//                    `Retire`
//
// A tensor may have all three, and the device's besides. What makes copies throws HostTierFull.
class LowerTiers : public Occupancy {
 public:
  // `capacity`: bytes of the host tier; none for no limit. `disk`: whether there is one to store
  // to.
  LowerTiers(const TaskTable& table, Emitter& emitter, std::optional<int64_t> capacity, bool disk);

  // Whether anything is ever evicted, so that uses must be told.
  bool is_capped() const { return is_capped_; }
  // The version of a tensor in the caller's argument, or -1.
  int32_t argument(int32_t tensor) const { return arguments_[tensor]; }
  // One in the caller's memory, argument or result, or -1.
  int32_t callers(int32_t tensor) const { return in_callers_[tensor]; }
  // A version that the device can reload from, or -1.
  int32_t InMemory(int32_t tensor) const;
  // Whether evicting the tensor from its device needs no copy.
  bool HasCopy(int32_t tensor) const { return InMemory(tensor) >= 0 || on_disk_[tensor] >= 0; }
  // Bytes that evicting a tensor of so many bytes from its device makes us copy.
  int64_t SpillCostOf(int32_t tensor, int64_t size) const;

  // Tells when a tensor is next asked for here, and whether its device has it now. What the device
  // has is asked for at the use after the next, if at all. So copies of tensors with one use to
  // come are evicted first. Of those the oldest goes: its own copy is made by then, and the next
  // tensor in its place need not wait for that.
  void NoteUse(int32_t tensor, int64_t next_use, bool on_device);

  // Notes that a kernel or an offload has put a tensor into the caller's memory.
  void AddResult(int32_t tensor, int32_t version);
  // Copies a tensor from its device to the host tier; returns the version there.
  int32_t Offload(int32_t tensor, int32_t source, int64_t vertex);
  // A version in memory to reload from; loads it from disk if it is only there.
  int32_t Fetch(int32_t tensor, int64_t vertex);
  // What a vertex of the host's cores reads and writes is no victim from here to `Release`.
  //
  // The version in the host tier that it reads, copied from `source` if need be, on the device or
  // in the caller's memory, or from disk if that is -1.
  int32_t Hold(int32_t tensor, int32_t source, int64_t vertex);
  // A place for what it writes, `after` as of TakePlace; or one that is an operand's so far, a
  // version in the host tier which it overwrites.
  int32_t Make(int32_t tensor, int64_t vertex, std::vector<int32_t>* after);
  int32_t Inherit(int32_t tensor, int32_t old);
  // After a vertex: drops victims whose next use has come.
  void Release(int64_t vertex);
  // Copies a tensor by way of the host tier to a result part that is on disk. `source`: a version
  // on the device or in the caller's memory, or -1: the tensor is on disk.
  void StoreResult(int32_t tensor, int32_t source, int64_t part, const std::vector<int32_t>& after,
                   int64_t vertex);
  // Gives back what a tensor that nobody reads any more has in the host tier and on disk.
  void Retire(int32_t tensor, int64_t used);
  // Takes a tensor out of the host tier; stores it if that was its only copy.
  void Evict(int32_t tensor, int64_t vertex) override;

 private:
  int32_t Load(int32_t tensor, int64_t vertex);
  // A fresh version in the host tier; `after` gets what must be done before it is written.
  int32_t TakePlace(int32_t tensor, int64_t vertex, std::vector<int32_t>* after);
  void Enter(int32_t tensor, int32_t version);
  void Pin(int32_t tensor);
  // Makes a tensor a possible victim with its present next use and spill cost.
  void UpdateVictim(int32_t tensor);
  void Leave(int32_t tensor, int64_t used);
  // Gives the place back that has rested for longest.
  void Wake();
  void AppendTo(std::vector<int32_t>* after, const Place& place) const;
  int64_t DiskBytes(int32_t tensor) const;
  int32_t device(int32_t tensor) const { return table_.columns().tensor_device[tensor]; }

  const TaskTable& table_;
  Emitter& emitter_;
  const bool has_disk_;
  const bool is_capped_;
  std::vector<int32_t> arguments_, in_callers_, in_host_, on_disk_;  // versions, or -1
  std::vector<int64_t> disk_start_;
  AddressSpace disk_space_;
  std::vector<int64_t> next_use_;
  std::vector<bool> on_device_;
  // Places that vertices of the host's cores were the last to use, in that order. They are not
  // taken again at once, so that what such a vertex reads may arrive, and what it wrote leave,
  // beside the next.
  struct Resting {
    int64_t start, size;
    Dependencies after;
    int64_t used, since;
  };
  std::deque<Resting> resting_;
  int64_t num_host_vertices_ = 0;  // so far
  std::vector<bool> is_pinned_;
  std::vector<int32_t> pinned_;
  Victims rule_;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLANNER_LOWER_TIERS_H_

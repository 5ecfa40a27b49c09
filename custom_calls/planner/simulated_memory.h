// Simulated memory: where each tensor is at a moment of the serial execution.
//
// Is told by build_memgraph.cc what to do next, and gives the emitter the MemGraph vertices that
// this implies. `PlaceVertex` and `Execute` are what BUILDMEMGRAPH does at its two horizons
// (TURNIP, figure 8); `Evict` is the offload half of simMallocOfffld (figure 9). Unlike the
// paper's, a tensor keeps its copy in a lower tier until it dies or is overwritten, so that it is
// offloaded at most once while host memory lasts.

#ifndef JAXOFFLOAD_PLANNER_SIMULATED_MEMORY_H_
#define JAXOFFLOAD_PLANNER_SIMULATED_MEMORY_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "planner/callers_memory.h"
#include "planner/emitter.h"
#include "planner/lower_tiers.h"
#include "planner/occupancy.h"
#include "planner/task_table.h"
#include "planner/victims.h"

namespace jaxoffload {

// How a MemGraph is to be built; see build_memgraph of plan/alloc/build.py.
struct BuildOptions {
  std::vector<int64_t> capacity;  // bytes of each device's arena
  std::optional<int64_t> host_capacity;
  bool disk = false;
  bool in_place_io = false;
  VictimRule victims = VictimRule::kCheapest;
  std::optional<int64_t> lookahead;
  std::vector<int64_t> places;  // of each tensor, -1 for any; or empty
  // Parts of arguments that stay in places of their own: one that is overwritten, with the output
  // over it, which is then the same part of the result.
  std::vector<int32_t> residents;
  bool unreduced = false;
};

// The arenas of all devices, and what the simulation knows of every tensor. The state of a tensor,
// as far as its device is concerned:
//
//   ABSENT     no place in the arena. What has been produced is in a lower tier, or dead.
//   RESERVED   has a place, or will be written over an operand or to a result; not written yet.
//   HELD       has a place and its bytes there; a possible victim.
//   RESULT     written where the caller wants it: its bytes are in no arena of ours.
//
// What a vertex of the host's cores reads and writes is in the lower tiers: its outputs are ABSENT,
// as an argument is.
//
//   ABSENT --place, of an output-----------> RESERVED
//   RESERVED --execute its writer----------> HELD, or RESULT
//   ABSENT --place or fetch, of an operand-> HELD      a reload; none if its bytes are still in the
//                                                      place that it was evicted from
//   HELD --evict---------------------------> ABSENT    an offload, unless a lower tier has it
//   HELD --execute its last reader---------> ABSENT    or the output written over it is HELD
//
// A resident tensor is brought to its place for its first reader and is HELD from then on: no
// victim, and nobody else is ever there, but for the output that is written over it.
//
// `placed_` is false of ABSENT ones only, start >= 0 where there is a place, and use >= 0 of HELD
// ones; tensors without bytes are never victims. Whatever evicts throws HostTierFull.
class SimulatedMemory : public Occupancy {
 public:
  SimulatedMemory(const TaskTable& table, const CallersMemory& callers,
                  const BuildOptions& options);

  const TaskTable& table() const { return table_; }
  int32_t device(int32_t tensor) const { return table_.columns().tensor_device[tensor]; }

  // The alloc horizon: gives a vertex all its places, and emits its reloads. `victims`: evicts
  // where no place is free. Returns whether all could be placed. If not, nothing is changed, but
  // for what was evicted.
  bool PlaceVertex(int64_t vertex, Victims* victims);
  // Reloads the operands of a vertex beyond the alloc horizon, as far as they have been produced.
  // `room`: of a device, the bytes that no vertex before that one needs. Returns whether all could
  // be placed. If not, nothing is changed.
  template <typename Room>
  bool Fetch(int64_t vertex, const Room& room);
  // The exec horizon: emits a placed vertex, then frees what it read for the last time.
  void Execute(int64_t vertex);
  // Evicts from a device, what costs least first, until a vertex can be placed; its own operands
  // too if need be. Legal only where the horizons meet: all has been produced then.
  bool EvictUntilPlaced(int64_t vertex, int32_t device);
  // Whether a tensor never leaves its place once it is there.
  bool stays(int32_t tensor) const { return resident_start_[tensor] >= 0; }
  // Copies arguments that are returned to their results, those that alias their result last.
  void FinishArguments();
  // Takes a tensor off its device for the sake of a vertex; copies it only if it is dirty.
  void Evict(int32_t tensor, int64_t vertex) override;

  MemGraphColumns Finish(bool unreduced) {
    return emitter_.Finish(table_.columns().adds, unreduced);
  }

 private:
  struct Needs {
    int64_t vertex = -1;
    std::vector<int32_t> reloads;
    std::vector<int32_t> wanted;  // reloads and outputs, largest first
  };
  struct Taken {
    int32_t tensor;
    Place place;
  };
  struct Left {
    int64_t start = -1;
    Dependencies after;
  };

  // The tensors that a vertex needs reloaded, and all that it needs placed. Kept until another
  // vertex is asked for. It stays right until the vertex is placed, for its operands are no
  // victims, but in `EvictUntilPlaced`, which therefore forgets it.
  const Needs& NeedsOf(int64_t vertex);
  // Places all of `wanted`; what was evicted and is still in its old place stays there. `pending`
  // gets the vertices that the outputs among them must wait for. Returns whether all could be
  // placed.
  bool PlaceAll(int64_t vertex, const std::vector<int32_t>& reloads,
                const std::vector<int32_t>& wanted, Victims* victims,
                std::vector<int32_t>* pending);
  // Places for all, or for none: then nothing is changed but for evictions.
  bool TryToPlace(int64_t vertex, std::vector<int32_t> wanted, bool stay, Victims* victims,
                  std::vector<Taken>* taken);
  // Takes the places of residents, from the end of each arena down. Throws std::invalid_argument.
  void PlaceResidents(const std::vector<int32_t>& residents);
  // Copies a tensor to its place: from another device that has the same bytes, or else from where
  // it is below.
  void Reload(int32_t tensor, int32_t version, int64_t vertex, const std::vector<int32_t>& after);
  // A tensor of another device with the same bytes that are, or still are, in its place; or kNone.
  int32_t PeerOf(int32_t tensor) const;
  // Brings those that a vertex reads first.
  void BringResidents(int64_t vertex);
  // Whether nothing has taken the place of an evicted tensor since: its bytes are there as they
  // were, and no reload is needed.
  bool IsStillThere(int32_t tensor) const;
  // Whether places cannot be had, however the free memory is arranged (one device only).
  bool LacksRoom(const std::vector<int32_t>& wanted) const;
  void Hold(int32_t tensor, int32_t version, int64_t start);
  // Makes a tensor a possible victim, with its present next use and spill cost.
  void UpdateVictim(int32_t tensor);
  // Writes an output over the version of a dying operand.
  void Inherit(int32_t tensor, int32_t old, std::vector<int32_t>* after);
  // The version of an output that is written where the caller wants it, by a kernel.
  int32_t WriteResult(int32_t tensor, int64_t part, std::vector<int32_t>* after);
  int32_t ResultVersion(int32_t tensor, int64_t part);
  // Readers of the argument bytes that a result part takes.
  void AppendReadersThere(std::vector<int32_t>* after, int64_t part, int32_t tensor);
  // Copies a tensor to every result part that it was not written to directly. `source`: where it
  // was written.
  void OffloadResults(int32_t tensor, int32_t source, int64_t vertex);
  // What a vertex reads and writes, if it runs on its device, and on the host's cores.
  void ExecuteOnDevice(int64_t vertex);
  void ExecuteOnHost(int64_t vertex);
  // Whether a vertex of the host's cores can read its k-th input from a version in the caller's
  // memory.
  bool ReadsCallers(int64_t vertex, int64_t k, int32_t version) const;
  // A version of what it writes over nothing.
  int32_t MakeOnHost(int64_t vertex, int64_t entry, std::vector<int32_t>* after);
  // After a vertex: frees or evicts a tensor that it touched, or tells its next use.
  void Touch(int32_t tensor, int64_t vertex);
  // Frees a tensor that nobody reads any more.
  void Retire(int32_t tensor);
  // Gives a tensor's place back.
  void Leave(int32_t tensor);
  // Position of the reader that is so many after the next one, or kNever.
  int64_t UseAfter(int32_t tensor, int64_t count) const;

  const TaskTable& table_;
  const CallersMemory& callers_;
  const std::vector<int64_t>& places_;
  Emitter emitter_;
  LowerTiers lower_;
  // Of residents and the outputs over them, -1 of all others: the place; and of such an output, the
  // resident.
  std::vector<int64_t> resident_start_;
  std::vector<int32_t> succeeded_;
  std::vector<bool> placed_;
  std::vector<int32_t> version_;     // on the device or in a result, the latest; or -1
  std::vector<int64_t> num_read_;    // readers that have run
  std::vector<int64_t> last_touch_;  // the last vertex that read or wrote it
  std::vector<Left>
      left_;  // of what was evicted: what the next tensor there would have to wait for
  // Of vertices that are placed and not executed: what their outputs must wait for.
  std::deque<std::vector<int32_t>> pending_;
  Needs needs_;
  // Marks of the tensors that `PlaceAll` is about.
  std::vector<uint8_t> is_reload_, is_still_there_;
};

template <typename Room>
bool SimulatedMemory::Fetch(int64_t vertex, const Room& room) {
  std::vector<int32_t> reloads;
  for (const int32_t t : NeedsOf(vertex).reloads) {
    if (lower_.HasCopy(t)) reloads.push_back(t);
  }
  needs_.vertex = -1;  // this vertex is asked about again when its turn comes
  std::stable_sort(reloads.begin(), reloads.end(),
                   [this](int32_t a, int32_t b) { return size(a) > size(b); });
  std::vector<int64_t> bytes(table_.num_devices(), -1);
  for (const int32_t t : reloads) {
    bytes[device(t)] = std::max<int64_t>(bytes[device(t)], 0) + size(t);
  }
  for (int32_t d = 0; d < table_.num_devices(); ++d) {
    if (bytes[d] >= 0 && bytes[d] > room(d)) return false;
  }
  std::vector<int32_t> pending;
  return PlaceAll(vertex, reloads, reloads, nullptr, &pending);
}

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLANNER_SIMULATED_MEMORY_H_

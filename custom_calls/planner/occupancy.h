// Which tensors are in a tier, where, and which of them may be evicted. The device's arenas
// (SimulatedMemory) and the host tier (LowerTiers) have this in common, so that victims are chosen
// in both by the same rules (victims.h).

#ifndef JAXOFFLOAD_PLANNER_OCCUPANCY_H_
#define JAXOFFLOAD_PLANNER_OCCUPANCY_H_

#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "planner/address_space.h"

namespace jaxoffload {

class Occupancy {
 public:
  struct Arena {
    explicit Arena(std::optional<int64_t> capacity) : space(capacity) {}

    AddressSpace space;
    // Which tensor's place starts or ends at an address.
    std::unordered_map<int64_t, int32_t> at_start, at_end;
    // (-next use, tensor): furthest next use first; entries may be out of date.
    std::set<std::pair<int64_t, int32_t>> victims;
  };

  virtual ~Occupancy() = default;
  // Frees a tensor's place for the sake of a vertex; copies the tensor if it must.
  virtual void Evict(int32_t tensor, int64_t vertex) = 0;

  // Bytes of a tensor's place, and its offset in its arena, -1 if it has none.
  int64_t size(int32_t tensor) const { return size_[tensor]; }
  int64_t start(int32_t tensor) const { return start_[tensor]; }
  // Position of the next vertex that reads a tensor, if the tensor may be evicted; else -1.
  int64_t use(int32_t tensor) const { return use_[tensor]; }
  // Bytes that evicting a tensor makes us copy, until it is back.
  int64_t spill_cost(int32_t tensor) const { return spill_cost_[tensor]; }
  int32_t num_tensors() const { return static_cast<int32_t>(size_.size()); }
  Arena& arena(int32_t index) { return arenas_[index]; }
  const Arena& arena(int32_t index) const { return arenas_[index]; }

 protected:
  // `capacity`: bytes of each arena; none for one that grows. `arena_of`: of each tensor.
  Occupancy(std::vector<int64_t> size, const std::vector<std::optional<int64_t>>& capacity,
            std::vector<int32_t> arena_of);

  // Gives a tensor a place that was taken from its arena.
  void Occupy(int32_t tensor, int64_t start);
  // Gives a tensor's place back; arguments as of AddressSpace::Give.
  void Vacate(int32_t tensor, Dependencies after, int64_t used);
  // The first half of that: the tensor has no place any more, and nobody else has it yet.
  void Detach(int32_t tensor);
  // Makes a tensor a possible victim, or tells its next use and cost anew.
  void AllowEviction(int32_t tensor, int64_t use, int64_t spill_cost);
  // Makes a tensor no victim until it is allowed again.
  void ForbidEviction(int32_t tensor) { use_[tensor] = -1; }
  // Drops entries whose next use has come.
  void ForgetVictimsOf(int64_t vertex);
  // A tensor's place passes to another, which will be told by Occupy.
  void Bequeath(int32_t tensor) { start_[tensor] = use_[tensor] = -1; }
  // Tensors with places, in the order in which they got them.
  std::vector<int32_t> ByAge(int32_t arena) const;

 private:
  std::vector<int64_t> size_, start_, use_, spill_cost_, since_;
  std::vector<int32_t> arena_of_;
  std::vector<Arena> arenas_;
  int64_t num_occupied_ = 0;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLANNER_OCCUPANCY_H_

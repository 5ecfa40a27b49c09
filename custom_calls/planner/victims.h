// Chooses what to evict, so that a place of some size becomes free.
//
// TURNIP (section 6) evicts the tensor whose next use is furthest in the future (Belady's rule).
// That is for tensors of one size. With tensors of any size a place needs neighbours, and emptying
// one for a large tensor may cost many copies of small ones:
//
// 1. Take as seeds the few tensors whose next use is furthest.
// 2. From each seed grow a window, over free memory and evictable neighbours, until it is large
//    enough.
// 3. Of all parts of windows that are large enough, empty the one of the least cost: the sum, over
// its
//    tensors, of the spill cost divided by the vertices until the next use.
//
// For clean tensors of equal sizes that is the paper's rule; on irregular graphs it moves up to an
// eighth less (benchmarks/planner.py).

#ifndef JAXOFFLOAD_PLANNER_VICTIMS_H_
#define JAXOFFLOAD_PLANNER_VICTIMS_H_

#include <array>
#include <cstdint>
#include <vector>

#include "planner/occupancy.h"

namespace jaxoffload {

enum class VictimRule : uint8_t { kCheapest, kFurthest };
// What build_memgraph calls them, in that order.
constexpr std::array<const char*, 2> kVictimRules = {"cheapest", "furthest"};

class Victims {
 public:
  // `tier` outlives it; `num_vertices` bounds the number of seeds, and with it planning time.
  Victims(Occupancy& tier, VictimRule rule, int64_t num_vertices);

  // Evicts tensors whose next use comes after vertex `beyond` until `size` bytes are free. Returns
  // whether a place could be freed; if not, nothing was evicted.
  bool FreeAPlace(int32_t arena, int64_t size, int64_t beyond);

 private:
  struct Choice {
    std::vector<int32_t> window;
    double cost;
  };

  // The victims of the furthest next use; entries that are out of date go.
  std::vector<int32_t> Furthest(int32_t arena, int64_t beyond);
  // Tensors, in address order, that with the free memory about them span `size` bytes; or none.
  std::vector<int32_t> Grow(int32_t arena, int32_t seed, int64_t size, int64_t beyond) const;
  // The part of a window that is large enough and cheapest to empty.
  Choice Cheapest(int32_t arena, std::vector<int32_t> window, int64_t size, int64_t beyond) const;
  // A window as it grew, at a cost that orders windows by their earliest next use.
  Choice Whole(std::vector<int32_t> window, int64_t beyond) const;

  Occupancy& tier_;
  const VictimRule rule_;
  const size_t most_seeds_;
  std::vector<int64_t> tried_;  // of each tensor, the last search that came upon it
  int64_t search_ = 0;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLANNER_VICTIMS_H_

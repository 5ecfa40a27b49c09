// Static placement: offsets for buffers whose lifetimes are known, within a capacity.
//
// A depth-first search over canonical placements: each buffer at the lowest offset that those below
// it allow, in the order of offsets, so that no two paths lead to one placement. Stretches of time
// between the ends of lifetimes ("sections") tell early when there is no way on: a section's floor,
// lifted to the lowest offset that a buffer waiting in it can still have, and what waits there must
// fit under the capacity. Where no waiting buffer crosses from one section to the next, both sides
// are problems of their own. Several orders among equal offsets take turns with growing limits.
//
// References: M. D. Moffitt, MiniMalloc: a lightweight memory allocator for hardware-accelerated
// machine learning (ASPLOS 2023), from which the pruning rules are.

#ifndef JAXOFFLOAD_PLANNER_PLACE_INTERVALS_H_
#define JAXOFFLOAD_PLANNER_PLACE_INTERVALS_H_

#include <cstdint>
#include <vector>

namespace jaxoffload {

// Buffer i lives in [lower[i], upper[i]) and takes size[i] > 0 bytes; lower[i] < upper[i].
// `max_steps` buffers are placed at most, all tries together. Empty if nothing was found; something
// may exist. Deterministic. Throws std::invalid_argument: lists of several lengths, an empty
// interval or buffer, or numbers whose sums have no room in 64 bits.
std::vector<int64_t> PlaceIntervals(const std::vector<int64_t>& lower,
                                    const std::vector<int64_t>& upper,
                                    const std::vector<int64_t>& size, int64_t capacity,
                                    int64_t max_steps);

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLANNER_PLACE_INTERVALS_H_

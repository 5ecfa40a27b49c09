// Static placement of many buffers: along a skyline, which tells for each moment the first free
// offset. Its lowest stretch takes the first buffer, in a given order, whose lifetime is within it;
// where none is, the stretch is raised to its lower neighbour.

#ifndef JAXOFFLOAD_PLANNER_SKYLINE_H_
#define JAXOFFLOAD_PLANNER_SKYLINE_H_

#include <cstdint>
#include <vector>

namespace jaxoffload {

// Offsets of buffers as those of PlaceIntervals, or nothing where they take more than the capacity.
// `order`: each buffer's number once, those to be placed first in front. Throws
// std::invalid_argument: lists of several lengths, an empty interval, a negative size, or another
// order.
std::vector<int64_t> PlaceOnSkyline(const std::vector<int64_t>& lower,
                                    const std::vector<int64_t>& upper,
                                    const std::vector<int64_t>& size,
                                    const std::vector<int64_t>& order, int64_t capacity);

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLANNER_SKYLINE_H_

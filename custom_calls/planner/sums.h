// Sums that take what they add in any order (TURNIP, appendix A).
//
// A vertex that adds its second operand to its first, in place, may change places with the next of
// its kind: they are one sum, made in one place, of which others read the last version only. Each
// of them waits for the first version and for what it adds, and what follows waits for all.
//
//     x0 --> +x1 --> +x2 --> +x3 --> reader          x0 --> +x1 --+
//                                                    x0 --> +x2 --+--> reader
//                                                    x0 --> +x3 --+
//
// No two may run at once. They are kernels of one device, and thus of one lane, which has one under
// way or keeps them in order on its stream: no other lock is needed.

#ifndef JAXOFFLOAD_PLANNER_SUMS_H_
#define JAXOFFLOAD_PLANNER_SUMS_H_

#include <cstdint>
#include <vector>

#include "planner/edges.h"
#include "planner/emitter.h"

namespace jaxoffload {

// Of each vertex that is part of a sum of two or more the first one of it, else -1; empty where no
// vertex adds. `adds` is of
// the TaskGraph's vertices; `over` of each version the one that it is written over in place.
std::vector<int32_t> FirstOfSum(const MemGraphColumns& graph, const uint8_t* adds,
                                const std::vector<int32_t>& over);

// The edges of a graph whose sums take what they add in any order.
EdgeRows InAnyOrder(const EdgeRows& rows, const MemGraphColumns& graph,
                    const std::vector<int32_t>& first_of_sum);

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLANNER_SUMS_H_

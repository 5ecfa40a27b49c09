// BUILDMEMGRAPH: a MemGraph by simulated serial execution (TURNIP, figures 8 and 9); what it does
// and how it differs from the paper is told in jaxoffload/plan/alloc/build.py.

#ifndef JAXOFFLOAD_PLANNER_BUILD_MEMGRAPH_H_
#define JAXOFFLOAD_PLANNER_BUILD_MEMGRAPH_H_

#include "planner/simulated_memory.h"

namespace jaxoffload {

// Every vertex's working set fits the capacity of each device. Throws HostTierFull, and
// std::invalid_argument where `options` is not about this graph.
MemGraphColumns BuildMemGraph(const TaskTable& table, const BuildOptions& options);

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLANNER_BUILD_MEMGRAPH_H_

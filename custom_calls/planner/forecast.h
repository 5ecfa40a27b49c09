// The fetch horizon: reloads ahead of outputs, into memory that no output needs meanwhile.

#ifndef JAXOFFLOAD_PLANNER_FORECAST_H_
#define JAXOFFLOAD_PLANNER_FORECAST_H_

#include <cstdint>
#include <vector>

#include "planner/callers_memory.h"
#include "planner/simulated_memory.h"

namespace jaxoffload {

// Knows from the TaskGraph alone the bytes that each vertex will take and free. Reloads operands of
// vertices beyond the alloc horizon into what stays free until they run.
class Forecast {
 public:
  Forecast(SimulatedMemory& memory, const CallersMemory& callers);

  // Moves the fetch horizon on as far as it goes; returns where it is.
  int64_t Fetch(int64_t execute, int64_t alloc, int64_t fetch);

 private:
  SimulatedMemory& memory_;
  // Of each device and vertex, as if all that a vertex reads were there: bytes that its outputs and
  // those before have taken, and that the vertices before it have freed.
  std::vector<std::vector<int64_t>> taken_, freed_;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLANNER_FORECAST_H_

#include "planner/forecast.h"

#include <algorithm>

namespace jaxoffload {
namespace {

constexpr int64_t kAhead = 32;  // vertices from the exec horizon to the fetch horizon, at most

}  // namespace

Forecast::Forecast(SimulatedMemory& memory, const CallersMemory& callers) : memory_(memory) {
  const TaskTable& table = memory.table();
  const TaskColumns& columns = table.columns();
  const int32_t devices = table.num_devices();
  taken_.assign(devices, std::vector<int64_t>(table.num_vertices()));
  freed_.assign(devices, std::vector<int64_t>(table.num_vertices()));
  std::vector<int64_t> taken(devices, 0), freed(devices, 0);
  for (int64_t v = 0; v < table.num_vertices(); ++v) {
    for (int32_t d = 0; d < devices; ++d) freed_[d][v] = freed[d];
    for (int64_t e = columns.input_offsets[v]; e < columns.input_offsets[v + 1]; ++e) {
      const int32_t t = columns.inputs[e];
      if (table.last_device_reader(t) == v && !table.is_overwritten(e) &&
          !callers.read_in_place()[e] && !memory.stays(t)) {
        freed[memory.device(t)] += memory.size(t);
      }
    }
    for (int64_t e = columns.output_offsets[v]; e < columns.output_offsets[v + 1]; ++e) {
      const int32_t t = columns.outputs[e];
      if (table.last_device_reader(t) < 0 && !table.on_host(v) && !memory.stays(t)) {
        freed[memory.device(t)] += memory.size(t);
      }
      if (table.is_fresh(e) && !callers.written_in_place()[e]) {
        taken[memory.device(t)] += memory.size(t);
      }
    }
    for (int32_t d = 0; d < devices; ++d) taken_[d][v] = taken[d];
  }
}

int64_t Forecast::Fetch(int64_t execute, int64_t alloc, int64_t fetch) {
  const int64_t stop = std::min(memory_.table().num_vertices(), execute + kAhead);
  const auto room = [&](int32_t device) {
    const std::vector<int64_t>&taken = taken_[device], &freed = freed_[device];
    int64_t peak = taken[alloc] - freed[alloc];
    for (int64_t v = alloc + 1; v <= fetch; ++v) peak = std::max(peak, taken[v] - freed[v]);
    const int64_t before = taken[alloc - 1] - freed[execute];
    return memory_.arena(device).space.free() - std::max<int64_t>(0, peak - before);
  };
  while (fetch < stop && memory_.Fetch(fetch, room)) ++fetch;
  return fetch;
}

}  // namespace jaxoffload

#include "planner/build_memgraph.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "planner/callers_memory.h"
#include "planner/forecast.h"
#include "planner/victims.h"

namespace jaxoffload {
namespace {

// Devices on which a vertex needs places, in the order of its operands and outputs.
std::vector<int32_t> DevicesOf(const SimulatedMemory& memory, int64_t vertex) {
  const TaskTable& table = memory.table();
  std::vector<int32_t> found;
  const auto add = [&](int32_t tensor) {
    const int32_t device = memory.device(tensor);
    if (std::find(found.begin(), found.end(), device) == found.end()) found.push_back(device);
  };
  const TaskColumns& columns = table.columns();
  for (int64_t e = columns.input_offsets[vertex]; e < columns.input_offsets[vertex + 1]; ++e) {
    if (!table.Gathers(e)) add(columns.inputs[e]);
  }
  for (int64_t e = columns.output_offsets[vertex]; e < columns.output_offsets[vertex + 1]; ++e) {
    if (table.is_fresh(e)) add(columns.outputs[e]);
  }
  return found;
}

// Places a vertex at the exec horizon, whatever has to be evicted.
void Force(SimulatedMemory& memory, Victims& victims, int64_t vertex) {
  if (memory.PlaceVertex(vertex, &victims)) return;
  for (const int32_t device : DevicesOf(memory, vertex)) {
    if (memory.EvictUntilPlaced(vertex, device)) return;
  }
  throw std::logic_error("a working set that fits was not placed in empty memory");
}

void CheckResidents(const TaskTable& table, const std::vector<int32_t>& residents) {
  std::vector<bool> is_overwritten(table.num_tensors(), false), is_resident = is_overwritten;
  const TaskColumns& columns = table.columns();
  for (int64_t e = 0; e < columns.input_offsets[table.num_vertices()]; ++e) {
    if (table.is_overwritten(e)) is_overwritten[columns.inputs[e]] = true;
  }
  for (const int32_t t : residents) {
    if (t < 0 || t >= table.num_tensors() || is_resident[t] || is_overwritten[t] ||
        !table.is_argument(t) || columns.bytes[t] == 0) {
      throw std::invalid_argument("build_memgraph: residents names tensor " + std::to_string(t) +
                                  ", which cannot stay on its device, or twice");
    }
    is_resident[t] = true;
  }
}

void Check(const TaskTable& table, const BuildOptions& options) {
  const auto refuse = [](const char* what) {
    throw std::invalid_argument(std::string("build_memgraph: ") + what);
  };
  const auto is_negative = [](int64_t bytes) { return bytes < 0; };
  if (static_cast<int64_t>(options.capacity.size()) != table.num_devices() ||
      std::any_of(options.capacity.begin(), options.capacity.end(), is_negative)) {
    refuse("capacity has not one entry for each device, none of them negative");
  }
  if (options.host_capacity && *options.host_capacity < 0) refuse("host_capacity is negative");
  if (!options.places.empty() &&
      (static_cast<int64_t>(options.places.size()) != table.num_tensors() ||
       *std::max_element(options.places.begin(), options.places.end()) > kMostBytes)) {
    refuse("places has not one entry for each tensor, none of them beyond all memory");
  }
  CheckResidents(table, options.residents);
}

}  // namespace

MemGraphColumns BuildMemGraph(const TaskTable& table, const BuildOptions& options) {
  Check(table, options);
  const CallersMemory callers(table, options.in_place_io);
  SimulatedMemory memory(table, callers, options);
  Victims victims(memory, options.victims, table.num_vertices());
  std::optional<Forecast> forecast;
  if (options.lookahead) forecast.emplace(memory, callers);
  // The loop of figure 8.
  const int64_t count = table.num_vertices(), most = options.lookahead.value_or(count);
  int64_t alloc = 0, execute = 0, fetch = 0;
  while (execute < count) {
    Victims* evicting = alloc == execute ? &victims : nullptr;
    if (alloc < count && alloc - execute < most && memory.PlaceVertex(alloc, evicting)) {
      ++alloc;
    } else if (alloc == execute) {
      Force(memory, victims, alloc);
      ++alloc;
    } else {
      fetch = std::max(fetch, alloc);
      if (forecast) fetch = forecast->Fetch(execute, alloc, fetch);
      memory.Execute(execute);
      ++execute;
    }
  }
  memory.FinishArguments();
  return memory.Finish(options.unreduced);
}

}  // namespace jaxoffload

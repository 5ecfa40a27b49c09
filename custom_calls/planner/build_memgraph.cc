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

// Whether a part of an argument can stay on its device from one run to the next.
class CanStay {
 public:
  CanStay(const TaskTable& table, const CallersMemory& callers)
      : table_(table), callers_(callers), over_(table.num_tensors(), kNone) {
    for (int64_t v = 0; v < table.num_vertices(); ++v) {
      for (int64_t k = 0; k < table.num_overwrites(v); ++k) {
        const auto [read, write] = table.overwrite(v, k);
        over_[table.inputs(v)[read]] = table.outputs(v)[write];
      }
    }
  }

  bool operator()(int32_t tensor) const {
    const TaskColumns& columns = table_.columns();
    if (!table_.is_argument(tensor) || columns.bytes[tensor] == 0) return false;
    if (over_[tensor] == kNone) return true;
    // What is written over it stays in its place. Nobody may look for any of it in the caller's
    // memory, as another tensor of the same bytes would.
    if (table_.on_disk(columns.argument[tensor]) || HasResults(tensor)) return false;
    int32_t last = tensor;
    for (; over_[last] != kNone; last = over_[last]) {
      if (!IsReadOnDevice(last)) return false;
    }
    if (!IsReadOnDevice(last)) return false;
    for (int64_t p = columns.result_offsets[last]; p < columns.result_offsets[last + 1]; ++p) {
      if (!callers_.IsAlias(p, tensor)) continue;
      std::vector<int32_t> taken;
      callers_.Overwritten(p, last, &taken);
      return taken.size() == 1;
    }
    return false;
  }

 private:
  bool HasResults(int32_t tensor) const {
    const int64_t* const offsets = table_.columns().result_offsets;
    return offsets[tensor] < offsets[tensor + 1];
  }

  // Whether all that read a tensor do so on its device.
  bool IsReadOnDevice(int32_t tensor) const {
    const TaskColumns& columns = table_.columns();
    for (const int32_t v : table_.readers(tensor)) {
      for (int64_t e = columns.input_offsets[v]; e < columns.input_offsets[v + 1]; ++e) {
        if (columns.inputs[e] == tensor && callers_.read_in_place()[e]) return false;
      }
    }
    return true;
  }

  const TaskTable& table_;
  const CallersMemory& callers_;
  std::vector<int32_t> over_;  // of each tensor the output over it
};

void CheckResidents(const TaskTable& table, const CallersMemory& callers,
                    const std::vector<int32_t>& residents) {
  if (residents.empty()) return;
  const CanStay can_stay(table, callers);
  std::vector<bool> is_resident(table.num_tensors(), false);
  for (const int32_t t : residents) {
    if (t < 0 || t >= table.num_tensors() || is_resident[t] || !can_stay(t)) {
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
}

}  // namespace

MemGraphColumns BuildMemGraph(const TaskTable& table, const BuildOptions& options) {
  Check(table, options);
  const CallersMemory callers(table, options.in_place_io);
  CheckResidents(table, callers, options.residents);
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

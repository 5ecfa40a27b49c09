// The exec horizon of the simulated memory: what vertices read and write, and what dies with them.

#include <utility>
#include <vector>

#include "planner/simulated_memory.h"

namespace jaxoffload {
namespace {

Kind KindOf(uint8_t kind) {
  switch (static_cast<TaskKind>(kind)) {
    case TaskKind::kInput:
      return Kind::kInput;
    case TaskKind::kTransfer:
      return Kind::kTransfer;
    case TaskKind::kHostKernel:
      return Kind::kHostKernel;
    case TaskKind::kLoadRows:
      return Kind::kLoadRows;
    case TaskKind::kStoreRows:
      return Kind::kStoreRows;
    default:
      return Kind::kKernel;
  }
}

}  // namespace

void SimulatedMemory::Execute(int64_t vertex) {
  if (table_.on_host(vertex)) {
    ExecuteOnHost(vertex);
  } else {
    ExecuteOnDevice(vertex);
  }
  const Row read = table_.inputs(vertex), written = table_.outputs(vertex);
  for (const int32_t t : read) ++num_read_[t];
  ForgetVictimsOf(vertex);
  lower_.Release(vertex);
  for (const Row row : {read, written}) {
    for (const int32_t t : row) Touch(t, vertex);
  }
}

void SimulatedMemory::ExecuteOnDevice(int64_t vertex) {
  std::vector<int32_t> after = std::move(pending_.front());
  pending_.pop_front();
  const Row read = table_.inputs(vertex), written = table_.outputs(vertex);
  std::vector<int32_t> inputs, outputs;
  for (const int32_t t : read) inputs.push_back(placed_[t] ? version_[t] : lower_.InMemory(t));
  for (int64_t k = 0; k < table_.num_overwrites(vertex); ++k) {
    const auto [operand, output] = table_.overwrite(vertex, k);
    Inherit(written[output], inputs[operand], &after);
  }
  for (const int32_t t : written) {
    if (version_[t] < 0) {
      version_[t] = WriteResult(t, table_.columns().result_offsets[t], &after);
    }
    outputs.push_back(version_[t]);
  }
  emitter_.Vertex(KindOf(table_.columns().kind[vertex]), vertex,
                  table_.columns().vertex_device[vertex], inputs, outputs, after);
  for (const int32_t t : written) OffloadResults(t, version_[t], vertex);
}

void SimulatedMemory::ExecuteOnHost(int64_t vertex) {
  pending_.pop_front();
  const Row read = table_.inputs(vertex), written = table_.outputs(vertex);
  std::vector<int32_t> inputs, outputs(written.size(), -1), after;
  for (int64_t k = 0; k < read.size(); ++k) {
    const int32_t t = read[k], callers = lower_.callers(t);
    if (k == 0 && table_.moves_rows(vertex)) {
      inputs.push_back(lower_.argument(t));
      continue;
    }
    const bool reaches = callers >= 0 && ReadsCallers(vertex, k, callers);
    const int32_t source = callers < 0 && placed_[t] ? version_[t] : callers;
    inputs.push_back(reaches ? callers : lower_.Hold(t, source, vertex));
  }
  for (int64_t k = 0; k < table_.num_overwrites(vertex); ++k) {
    const auto [operand, output] = table_.overwrite(vertex, k);
    const int32_t t = written[output], old = inputs[operand];
    const int64_t part = callers_.GrowsInto(emitter_.tensor(old));
    if (emitter_.space(old) == Space::kHost) {
      if (size(t) > 0) emitter_.AppendReaders(&after, old);
      outputs[output] = lower_.Inherit(t, old);
    } else if (part >= 0) {
      if (size(t) > 0) emitter_.AppendReaders(&after, old);
      outputs[output] = WriteResult(t, part, &after);
    } else {
      outputs[output] = WriteResult(t, callers_.AliasOf(t, emitter_.tensor(old)), &after);
    }
    emitter_.Over(outputs[output], old);
  }
  const int64_t first = table_.columns().output_offsets[vertex];
  for (int64_t k = 0; k < written.size(); ++k) {
    if (outputs[k] < 0) outputs[k] = MakeOnHost(vertex, first + k, &after);
  }
  emitter_.Vertex(KindOf(table_.columns().kind[vertex]), vertex,
                  table_.columns().vertex_device[vertex], inputs, outputs, after);
  for (int64_t k = 0; k < written.size(); ++k) OffloadResults(written[k], outputs[k], vertex);
}

bool SimulatedMemory::ReadsCallers(int64_t vertex, int64_t k, int32_t version) const {
  if (emitter_.space(version) == Space::kArgument) {
    return callers_.ReachesArgument(vertex, table_.columns().input_offsets[vertex] + k);
  }
  return emitter_.offset(version) % kInPlaceAlignment == 0 &&
         table_.host_reaches_result(emitter_.index(version));
}

int32_t SimulatedMemory::MakeOnHost(int64_t vertex, int64_t entry, std::vector<int32_t>* after) {
  const int32_t tensor = table_.columns().outputs[entry];
  const int64_t part = callers_.GrowsInto(tensor);
  if (part >= 0) return WriteResult(tensor, part, after);
  if (!callers_.ReachesResult(vertex, entry)) return lower_.Make(tensor, vertex, after);
  return WriteResult(tensor, table_.columns().result_offsets[tensor], after);
}

void SimulatedMemory::Touch(int32_t tensor, int64_t vertex) {
  last_touch_[tensor] = vertex;
  if (UseAfter(tensor, 0) == kNever) {
    Retire(tensor);
  } else if (start(tensor) >= 0 && table_.last_device_reader(tensor) <= vertex) {
    Evict(tensor, vertex);  // only the host's cores read it from here on
  } else {
    UpdateVictim(tensor);
  }
}

void SimulatedMemory::Inherit(int32_t tensor, int32_t old, std::vector<int32_t>* after) {
  const int32_t operand = emitter_.tensor(old);
  if (size(tensor) > 0) emitter_.AppendReaders(after, old);
  if (stays(operand)) {
    version_[tensor] =
        emitter_.Version(tensor, Space::kDevice, device(tensor), resident_start_[tensor]);
    placed_[operand] = false;
    placed_[tensor] = true;
  } else if (emitter_.space(old) == Space::kDevice) {
    const int64_t place = start(operand);
    const int32_t version = emitter_.Version(tensor, Space::kDevice, device(tensor), place);
    Bequeath(operand);
    placed_[operand] = false;
    Hold(tensor, version, place);
  } else {
    version_[tensor] = WriteResult(tensor, callers_.AliasOf(tensor, operand), after);
  }
  emitter_.Over(version_[tensor], old);
}

int32_t SimulatedMemory::WriteResult(int32_t tensor, int64_t part, std::vector<int32_t>* after) {
  const int32_t version = ResultVersion(tensor, part);
  AppendReadersThere(after, part, tensor);
  lower_.AddResult(tensor, version);
  return version;
}

int32_t SimulatedMemory::ResultVersion(int32_t tensor, int64_t part) {
  const TaskColumns& columns = table_.columns();
  return emitter_.Version(tensor, Space::kResult, columns.result[part],
                          columns.result_offset[part]);
}

void SimulatedMemory::AppendReadersThere(std::vector<int32_t>* after, int64_t part,
                                         int32_t tensor) {
  std::vector<int32_t> taken;
  callers_.Overwritten(part, tensor, &taken);
  for (const int32_t other : taken) emitter_.AppendReaders(after, lower_.argument(other));
}

void SimulatedMemory::OffloadResults(int32_t tensor, int32_t source, int64_t vertex) {
  const TaskColumns& columns = table_.columns();
  for (int64_t p = columns.result_offsets[tensor]; p < columns.result_offsets[tensor + 1]; ++p) {
    if (emitter_.space(source) == Space::kResult && emitter_.index(source) == columns.result[p] &&
        emitter_.offset(source) == columns.result_offset[p]) {
      continue;
    }
    std::vector<int32_t> after;
    AppendReadersThere(&after, p, tensor);
    if (table_.result_on_disk(columns.result[p])) {
      lower_.StoreResult(tensor, source, p, after, vertex);
      continue;
    }
    const int32_t version = ResultVersion(tensor, p);
    emitter_.Vertex(Kind::kOffload, vertex, device(tensor), {source}, {version}, after);
    lower_.AddResult(tensor, version);
    const int32_t before = succeeded_[tensor];
    if (before >= 0 && callers_.IsAlias(p, before)) emitter_.Owes(version_[before], version);
  }
}

void SimulatedMemory::Retire(int32_t tensor) {
  if (start(tensor) >= 0) Leave(tensor);
  lower_.Retire(tensor, last_touch_[tensor]);
}

void SimulatedMemory::Leave(int32_t tensor) {
  const Dependencies after = emitter_.LastUsers(version_[tensor]);
  if (size(tensor) > 0) left_[tensor] = {start(tensor), after};
  Vacate(tensor, after, last_touch_[tensor]);
  placed_[tensor] = false;
}

void SimulatedMemory::FinishArguments() {
  const TaskColumns& columns = table_.columns();
  const int64_t last = std::max<int64_t>(table_.num_vertices() - 1, 0);
  for (int32_t t = 0; t < num_tensors(); ++t) {
    if (!table_.is_argument(t)) continue;
    std::vector<int64_t> parts;
    for (int64_t p = columns.result_offsets[t]; p < columns.result_offsets[t + 1]; ++p) {
      parts.push_back(p);
    }
    std::stable_partition(parts.begin(), parts.end(),
                          [&](int64_t p) { return !callers_.IsAlias(p, t); });
    for (const int64_t p : parts) {
      if (table_.Stays(t, p)) continue;
      std::vector<int32_t> after;
      AppendReadersThere(&after, p, t);
      if (table_.result_on_disk(columns.result[p])) {
        lower_.StoreResult(t, lower_.InMemory(t), p, after, last);
        continue;
      }
      const int32_t source = lower_.Fetch(t, last);
      const int32_t version = ResultVersion(t, p);
      if (callers_.IsAlias(p, t)) emitter_.Over(version, source);
      emitter_.Vertex(Kind::kOffload, last, device(t), {source}, {version}, after);
    }
  }
}

}  // namespace jaxoffload

#include "planner/callers_memory.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace jaxoffload {

CallersMemory::CallersMemory(const TaskTable& table, bool in_place_io)
    : table_(table), in_place_io_(in_place_io) {
  const TaskColumns& columns = table.columns();
  for (const auto& [argument, result] : columns.donated) {
    argument_of_[result] = argument;
    parts_[argument];
  }
  for (int32_t t = 0; t < columns.num_tensors; ++t) {
    const auto found = parts_.find(columns.argument[t]);
    if (columns.argument[t] < 0 || found == parts_.end()) continue;
    found->second.sorted.emplace_back(columns.argument_offset[t], t);
    found->second.longest = std::max(found->second.longest, columns.bytes[t]);
  }
  for (auto& [argument, parts] : parts_) std::sort(parts.sorted.begin(), parts.sorted.end());
  for (int64_t v = 0; v < columns.num_vertices; ++v) {
    for (int64_t k = 0; k < table.num_overwrites(v); ++k) {
      const auto [read, write] = table.overwrite(v, k);
      overwriter_[table.inputs(v)[read]] = table.outputs(v)[write];
    }
  }
  read_in_place_.resize(columns.input_offsets[columns.num_vertices]);
  written_in_place_.resize(columns.output_offsets[columns.num_vertices]);
  for (int64_t v = 0; v < columns.num_vertices; ++v) {
    for (int64_t e = columns.input_offsets[v]; e < columns.input_offsets[v + 1]; ++e) {
      const bool reads = in_place_io_ || IsNearArgument(e);
      read_in_place_[e] = table.on_host(v) || table.Gathers(e) || (reads && ReachesArgument(v, e));
    }
    for (int64_t e = columns.output_offsets[v]; e < columns.output_offsets[v + 1]; ++e) {
      const bool writes = in_place_io_ || IsNearResult(e);
      written_in_place_[e] = table.on_host(v) || (writes && ReachesResult(v, e));
    }
  }
  FindGrowing();
}

void CallersMemory::FindGrowing() {
  const TaskColumns& columns = table_.columns();
  grows_into_.resize(columns.num_tensors, -1);
  for (int64_t v = columns.num_vertices - 1; v >= 0; --v) {
    if (!table_.on_host(v) || table_.moves_rows(v)) continue;
    for (int64_t k = 0; k < table_.num_overwrites(v); ++k) {
      const auto [read, write] = table_.overwrite(v, k);
      const int32_t operand = table_.inputs(v)[read], output = table_.outputs(v)[write];
      if (table_.is_argument(operand)) continue;
      grows_into_[operand] = grows_into_[output];
      const int64_t part = columns.result_offsets[output];
      if (part == columns.result_offsets[output + 1]) continue;
      // What takes an argument's memory may do so once nobody reads that any more.
      const bool is_free = ArgumentOf(columns.result[part]) == kNone;
      const int64_t entry = columns.output_offsets[v] + write;
      if (is_free && ReachesResult(v, entry)) grows_into_[operand] = part;
    }
  }
}

int32_t CallersMemory::ArgumentOf(int32_t result) const {
  const auto found = argument_of_.find(result);
  return found == argument_of_.end() ? kNone : found->second;
}

bool CallersMemory::IsAlias(int64_t part, int32_t tensor) const {
  const TaskColumns& columns = table_.columns();
  return ArgumentOf(columns.result[part]) == columns.argument[tensor] &&
         columns.result_offset[part] == columns.argument_offset[tensor];
}

int64_t CallersMemory::AliasOf(int32_t output, int32_t operand) const {
  const int64_t* parts = table_.columns().result_offsets + output;
  for (int64_t part = parts[0]; part < parts[1]; ++part) {
    if (IsAlias(part, operand)) return part;
  }
  throw std::invalid_argument("task table: tensor " + std::to_string(output) +
                              " overwrites an argument of which rows are gathered");
}

void CallersMemory::Overwritten(int64_t part, int32_t tensor, std::vector<int32_t>* found) const {
  found->clear();
  const TaskColumns& columns = table_.columns();
  const auto parts = parts_.find(ArgumentOf(columns.result[part]));
  if (parts == parts_.end()) return;
  const int64_t begin = columns.result_offset[part], end = begin + columns.bytes[tensor];
  const auto& sorted = parts->second.sorted;
  auto at = std::lower_bound(
      sorted.begin(), sorted.end(),
      std::make_pair(begin - parts->second.longest, std::numeric_limits<int32_t>::min()));
  for (; at != sorted.end() && at->first < end; ++at) {
    if (at->first + columns.bytes[at->second] > begin) found->push_back(at->second);
  }
}

bool CallersMemory::IsNearArgument(int64_t entry) const {
  const int32_t argument = table_.columns().argument[table_.columns().inputs[entry]];
  return argument >= 0 && !table_.host_reaches_argument(argument);
}

bool CallersMemory::IsNearResult(int64_t entry) const {
  const TaskColumns& columns = table_.columns();
  const int64_t* const parts = columns.result_offsets + columns.outputs[entry];
  return parts[0] < parts[1] && !table_.host_reaches_result(columns.result[parts[0]]);
}

bool CallersMemory::ReachesArgument(int64_t vertex, int64_t entry) const {
  const TaskColumns& columns = table_.columns();
  const int32_t tensor = columns.inputs[entry];
  if (!table_.IsReadable(tensor)) return false;
  if (table_.on_host(vertex) && !table_.host_reaches_argument(columns.argument[tensor])) {
    return false;
  }
  if (!table_.is_overwritten(entry)) return true;
  const int32_t output = overwriter_.at(tensor);
  for (int64_t p = columns.result_offsets[output]; p < columns.result_offsets[output + 1]; ++p) {
    if (IsAlias(p, tensor) && MayWrite(p, output, vertex, tensor)) return true;
  }
  return false;
}

bool CallersMemory::ReachesResult(int64_t vertex, int64_t entry) const {
  const TaskColumns& columns = table_.columns();
  const int32_t tensor = columns.outputs[entry];
  const int64_t first = columns.result_offsets[tensor];
  if (first == columns.result_offsets[tensor + 1] ||
      columns.result_offset[first] % kInPlaceAlignment != 0 ||
      table_.result_on_disk(columns.result[first]) ||
      (table_.on_host(vertex) && !table_.host_reaches_result(columns.result[first]))) {
    return false;
  }
  return MayWrite(first, tensor, vertex, kNone);
}

bool CallersMemory::MayWrite(int64_t part, int32_t tensor, int64_t vertex,
                             int32_t except_for) const {
  std::vector<int32_t> taken;
  Overwritten(part, tensor, &taken);
  const Row inputs = table_.inputs(vertex);
  return std::none_of(taken.begin(), taken.end(), [&](int32_t t) {
    return t != except_for && std::find(inputs.begin(), inputs.end(), t) != inputs.end();
  });
}

}  // namespace jaxoffload

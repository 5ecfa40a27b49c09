#include "planner/task_table.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace jaxoffload {
namespace {

bool IsDevice(int32_t device) { return device >= 0 && device < kMostDevices; }

std::vector<bool> SetOf(const std::vector<int32_t>& indices) {
  std::vector<bool> found;
  for (const int32_t index : indices) {
    if (index < 0) throw std::invalid_argument("task table: a negative argument or result");
    if (index >= static_cast<int64_t>(found.size())) found.resize(int64_t{index} + 1);
    found[index] = true;
  }
  return found;
}

[[noreturn]] void RefuseVertex(int64_t vertex, const char* what) {
  throw std::invalid_argument("task table: vertex " + std::to_string(vertex) + " " + what);
}

[[noreturn]] void RefuseTensor(int64_t tensor, const char* what) {
  throw std::invalid_argument("task table: tensor " + std::to_string(tensor) + " " + what);
}

}  // namespace

TaskTable::TaskTable(TaskColumns columns) : columns_(std::move(columns)) {
  Check();
  for (int64_t t = 0; t < num_tensors(); ++t) {
    num_devices_ = std::max(num_devices_, columns_.tensor_device[t] + 1);
  }
  for (int64_t v = 0; v < num_vertices(); ++v) {
    num_devices_ = std::max(num_devices_, columns_.vertex_device[v] + 1);
  }
  reader_offsets_.assign(num_tensors() + 1, 0);
  const int64_t count = columns_.input_offsets[num_vertices()];
  for (int64_t e = 0; e < count; ++e) ++reader_offsets_[columns_.inputs[e] + 1];
  for (int64_t t = 0; t < num_tensors(); ++t) reader_offsets_[t + 1] += reader_offsets_[t];
  readers_.resize(count);
  std::vector<int64_t> next(reader_offsets_.begin(), reader_offsets_.end() - 1);
  last_device_reader_.assign(num_tensors(), -1);
  for (int64_t v = 0; v < num_vertices(); ++v) {
    for (const int32_t t : inputs(v)) {
      readers_[next[t]++] = static_cast<int32_t>(v);
      if (!on_host(v)) last_device_reader_[t] = v;
    }
  }
  is_overwritten_.assign(count, false);
  is_fresh_.assign(columns_.output_offsets[num_vertices()], true);
  for (int64_t v = 0; v < num_vertices(); ++v) {
    for (int64_t k = 0; k < num_overwrites(v); ++k) {
      const auto [read, write] = overwrite(v, k);
      is_overwritten_[columns_.input_offsets[v] + read] = true;
      is_fresh_[columns_.output_offsets[v] + write] = false;
    }
  }
  disk_argument_ = SetOf(columns_.disk_arguments);
  disk_result_ = SetOf(columns_.disk_results);
  device_argument_ = SetOf(columns_.device_arguments);
  device_result_ = SetOf(columns_.device_results);
  if (!columns_.replicas.empty()) FindPeers();
}

void TaskTable::FindPeers() {
  std::unordered_map<int32_t, int32_t> first;  // of arguments that have replicas
  for (const auto& [argument, of] : columns_.replicas) first[argument] = first[of] = of;
  std::map<std::tuple<int32_t, int64_t, int64_t>, std::vector<int32_t>> groups;
  for (int32_t t = 0; t < num_tensors(); ++t) {
    const auto found = first.find(columns_.argument[t]);
    if (!is_argument(t) || found == first.end()) continue;
    groups[{found->second, columns_.argument_offset[t], columns_.bytes[t]}].push_back(t);
  }
  std::vector<std::vector<int32_t>> peers(num_tensors());
  for (const auto& [part, members] : groups) {
    for (const int32_t t : members) {
      const int32_t own = columns_.tensor_device[t];
      std::vector<std::pair<int32_t, int32_t>> others;  // (how many devices before, tensor)
      for (const int32_t other : members) {
        const int32_t before = (own - columns_.tensor_device[other] + num_devices_) % num_devices_;
        if (before != 0) others.emplace_back(before, other);
      }
      std::sort(others.begin(), others.end());
      for (const auto& [before, other] : others) peers[t].push_back(other);
    }
  }
  peer_offsets_.push_back(0);
  for (const std::vector<int32_t>& row : peers) {
    peers_.insert(peers_.end(), row.begin(), row.end());
    peer_offsets_.push_back(static_cast<int64_t>(peers_.size()));
  }
}

bool TaskTable::Stays(int64_t tensor, int64_t part) const {
  const int32_t argument = columns_.argument[tensor];
  return argument >= 0 && on_disk(argument) &&
         columns_.argument_offset[tensor] == columns_.result_offset[part] &&
         std::find(columns_.donated.begin(), columns_.donated.end(),
                   std::make_pair(argument, columns_.result[part])) != columns_.donated.end();
}

void TaskTable::Check() const {
  const TaskColumns& c = columns_;
  int64_t total = 0;
  for (int64_t t = 0; t < c.num_tensors; ++t) {
    if (!IsDevice(c.tensor_device[t])) RefuseTensor(t, "is on no device");
    if (c.bytes[t] < 0 || c.bytes[t] > kMostBytes || (total += c.bytes[t]) > kMostBytes) {
      RefuseTensor(t, "has a negative size, or all have more bytes than can be added up");
    }
    if (c.argument_offset[t] < 0 || c.argument_offset[t] > kMostBytes) {
      RefuseTensor(t, "starts outside its argument");
    }
    for (int64_t p = c.result_offsets[t]; p < c.result_offsets[t + 1]; ++p) {
      if (c.result[p] < 0 || c.result_offset[p] < 0 || c.result_offset[p] > kMostBytes) {
        RefuseTensor(t, "starts outside its result");
      }
    }
  }
  CheckOrder();
}

void TaskTable::CheckOrder() const {
  std::vector<bool> is_there(num_tensors());
  for (int64_t t = 0; t < num_tensors(); ++t) is_there[t] = is_argument(t);
  std::vector<bool> was_written = is_there;
  std::vector<int64_t> read_by(num_tensors(), -1);
  for (int64_t v = 0; v < num_vertices(); ++v) {
    if (!IsDevice(columns_.vertex_device[v])) RefuseVertex(v, "is on no device");
    for (const Row row : {inputs(v), outputs(v)}) {
      for (const int32_t t : row) {
        if (t < 0 || t >= num_tensors()) RefuseVertex(v, "names a tensor that is none");
      }
    }
    for (const int32_t t : inputs(v)) {
      if (!is_there[t]) RefuseVertex(v, "reads what is not there");
      if (std::exchange(read_by[t], v) == v) RefuseVertex(v, "names an input twice");
    }
    if (moves_rows(v) && (inputs(v).size() < 2 || !is_argument(inputs(v)[0]))) {
      RefuseVertex(v, "moves rows of what is no argument");
    }
    std::vector<bool> is_over(outputs(v).size(), false);
    for (int64_t k = 0; k < num_overwrites(v); ++k) {
      const auto [read, write] = overwrite(v, k);
      if (read < 0 || read >= inputs(v).size() || write < 0 || write >= outputs(v).size() ||
          !is_there[inputs(v)[read]] || is_over[write] ||
          columns_.bytes[inputs(v)[read]] != columns_.bytes[outputs(v)[write]]) {
        RefuseVertex(v, "overwrites what it has not, or what has another size");
      }
      is_over[write] = true;
      is_there[inputs(v)[read]] = false;
    }
    for (const int32_t t : outputs(v)) {
      if (was_written[t]) RefuseVertex(v, "writes what has been written");
      is_there[t] = was_written[t] = true;
    }
  }
}

}  // namespace jaxoffload

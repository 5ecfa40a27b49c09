#include "plan/loaded_plan.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace jaxoffload {
namespace {

// Of any range: more than any memory has, and so little that such numbers can be rounded up and
// added.
constexpr int64_t kMostBytes = int64_t{1} << 60;

[[noreturn]] void Refuse(const std::string& what) { throw std::invalid_argument("Plan: " + what); }

std::string Entry(const char* name, int64_t position, int64_t value) {
  return std::string(name) + "[" + std::to_string(position) + "]=" + std::to_string(value);
}

template <typename T>
void CheckLength(const char* name, const std::vector<T>& array, int64_t expected) {
  if (static_cast<int64_t>(array.size()) != expected) {
    Refuse(std::string(name) + " has " + std::to_string(array.size()) + " entries, expected " +
           std::to_string(expected));
  }
}

template <typename T>
void CheckBounds(const char* name, const std::vector<T>& array, int64_t low, int64_t high) {
  for (size_t i = 0; i < array.size(); ++i) {
    if (array[i] < low || array[i] >= high) {
      Refuse(Entry(name, i, array[i]) + " is outside [" + std::to_string(low) + ", " +
             std::to_string(high) + ")");
    }
  }
}

void CheckOffsets(const char* name, const std::vector<int64_t>& offsets, int64_t count,
                  size_t total) {
  CheckLength(name, offsets, count + 1);
  if (offsets.front() != 0) Refuse(Entry(name, 0, offsets.front()) + " must be 0");
  for (int64_t i = 0; i < count; ++i) {
    if (offsets[i + 1] < offsets[i]) Refuse(Entry(name, i + 1, offsets[i + 1]) + " decreases");
  }
  if (offsets.back() != static_cast<int64_t>(total)) {
    Refuse(Entry(name, count, offsets.back()) + " must be the length of its array, " +
           std::to_string(total));
  }
}

// Bytes of the range in which a version lies.
int64_t RangeBytes(const PlanArrays& a, int64_t version_id) {
  const auto of = [&](const char* what, const std::vector<int64_t>& sizes) {
    const int32_t index = a.index[version_id];
    if (index < 0 || index >= static_cast<int64_t>(sizes.size())) {
      Refuse(Entry("index", version_id, index) + " is not " + what + " (there are " +
             std::to_string(sizes.size()) + ")");
    }
    return sizes[index];
  };
  switch (static_cast<Space>(a.space[version_id])) {
    case Space::kDevice:
      return of("a device", a.arena_bytes);
    case Space::kArgument:
      return of("an argument", a.argument_bytes);
    case Space::kResult:
      return of("a result", a.result_bytes);
    case Space::kHost:
      if (a.index[version_id] != 0) {
        Refuse(Entry("index", version_id, a.index[version_id]) + " must be 0 in the host arena");
      }
      return a.host_bytes;
    case Space::kDisk:
      if (a.index[version_id] != 0) {
        Refuse(Entry("index", version_id, a.index[version_id]) + " must be 0 on disk");
      }
      return a.disk_bytes;
  }
  Refuse(Entry("space", version_id, a.space[version_id]) + " is unknown");
}

void CheckVersions(const PlanArrays& a) {
  const int64_t num_versions = a.space.size();
  CheckLength("index", a.index, num_versions);
  CheckLength("offset", a.offset, num_versions);
  CheckLength("bytes", a.bytes, num_versions);
  CheckLength("dtype", a.dtype, num_versions);
  CheckOffsets("dims_offsets", a.dims_offsets, num_versions, a.dims.size());
  CheckBounds("space", a.space, 0, 5);
  CheckBounds("argument_bytes", a.argument_bytes, 0, kMostBytes);
  CheckBounds("result_bytes", a.result_bytes, 0, kMostBytes);
  CheckBounds("arena_bytes", a.arena_bytes, 0, kMostBytes);
  CheckBounds("dims", a.dims, 0, INT64_MAX);
  for (const auto& [name, bytes] : {std::pair<const char*, int64_t>{"host_bytes", a.host_bytes},
                                    std::pair<const char*, int64_t>{"disk_bytes", a.disk_bytes}}) {
    if (bytes >= 0 && bytes < kMostBytes) continue;
    Refuse(std::string(name) + "=" + std::to_string(bytes) + " is outside [0, " +
           std::to_string(kMostBytes) + ")");
  }
  if (!a.argument_on_disk.empty()) {
    CheckLength("argument_on_disk", a.argument_on_disk, a.argument_bytes.size());
  }
  if (!a.result_on_disk.empty()) {
    CheckLength("result_on_disk", a.result_on_disk, a.result_bytes.size());
  }
  for (int64_t v = 0; v < num_versions; ++v) {
    const int64_t room = RangeBytes(a, v);
    if (a.bytes[v] < 0) Refuse(Entry("bytes", v, a.bytes[v]) + " is negative");
    if (a.offset[v] < 0 || a.offset[v] > room || a.bytes[v] > room - a.offset[v]) {
      Refuse(Entry("offset", v, a.offset[v]) + " and " + Entry("bytes", v, a.bytes[v]) +
             " reach beyond the " + std::to_string(room) + " bytes of their range");
    }
  }
}

bool IsOnDisk(const PlanArrays& a, int32_t version_id) {
  const int32_t index = a.index[version_id];
  switch (static_cast<Space>(a.space[version_id])) {
    case Space::kDisk:
      return true;
    case Space::kArgument:
      return !a.argument_on_disk.empty() && a.argument_on_disk[index] != 0;
    case Space::kResult:
      return !a.result_on_disk.empty() && a.result_on_disk[index] != 0;
    default:
      return false;
  }
}

// Loads and stores read from disk and write to it; both have host memory at the other end. Rows of
// a table on disk are read, or overwritten, by numbers in memory. Nothing else touches the disk.
void CheckTiers(const PlanArrays& a, int64_t v, const Lanes& lanes) {
  const auto kind = static_cast<Kind>(a.kind[v]);
  const bool is_load = kind == Kind::kLoad, is_store = kind == Kind::kStore;
  if (lanes.IsDisk(a.lane[v]) != (is_load || is_store || MovesRows(kind)) ||
      lanes.IsHost(a.lane[v]) != (kind == Kind::kHostKernel)) {
    Refuse(Entry("lane", v, a.lane[v]) + " does not go with " + Entry("kind", v, a.kind[v]));
  }
  const auto check = [&](const char* name, int64_t entry, int32_t version_id, bool on_disk,
                         bool in_host) {
    const bool is_host = static_cast<Space>(a.space[version_id]) == Space::kHost;
    if (IsOnDisk(a, version_id) == on_disk && (!in_host || is_host)) return;
    Refuse(Entry(name, entry, version_id) + " is in a tier that vertex " + std::to_string(v) +
           " of " + Entry("kind", v, a.kind[v]) + " cannot reach");
  };
  for (int64_t i = a.input_offsets[v]; i < a.input_offsets[v + 1]; ++i) {
    const bool is_table = MovesRows(kind) && i == a.input_offsets[v];
    check("inputs", i, a.inputs[i], is_load || is_table, is_store);
  }
  for (int64_t o = a.output_offsets[v]; o < a.output_offsets[v + 1]; ++o) {
    check("outputs", o, a.outputs[o], is_store || kind == Kind::kStoreRows, is_load);
  }
}

void CheckVertex(const PlanArrays& a, int64_t v, const Lanes& lanes) {
  const int64_t num_inputs = a.input_offsets[v + 1] - a.input_offsets[v];
  const int64_t num_outputs = a.output_offsets[v + 1] - a.output_offsets[v];
  if (IsKernel(static_cast<Kind>(a.kind[v]))) {
    if (a.executable[v] < 0) Refuse(Entry("executable", v, a.executable[v]) + ", but a kernel");
    const bool on_host = static_cast<Kind>(a.kind[v]) == Kind::kHostKernel;
    if (!(on_host ? lanes.IsHost(a.lane[v]) : lanes.IsCompute(a.lane[v]))) {
      Refuse(Entry("lane", v, a.lane[v]) + " is not a compute lane, but the vertex is a kernel");
    }
    for (int64_t o = a.output_offsets[v]; o < a.output_offsets[v + 1]; ++o) {
      if (a.overwritten[o] < 0) continue;
      const int32_t* begin = a.inputs.data() + a.input_offsets[v];
      const int32_t* end = a.inputs.data() + a.input_offsets[v + 1];
      if (std::find(begin, end, a.overwritten[o]) == end) {
        Refuse(Entry("overwritten", o, a.overwritten[o]) + " is not read by vertex " +
               std::to_string(v));
      }
      if (a.bytes[a.overwritten[o]] != a.bytes[a.outputs[o]]) {
        Refuse(Entry("overwritten", o, a.overwritten[o]) + " has another size than the output");
      }
    }
    return;
  }
  if (a.executable[v] >= 0) Refuse(Entry("executable", v, a.executable[v]) + ", but a copy");
  const auto kind = static_cast<Kind>(a.kind[v]);
  const int64_t wanted = kind == Kind::kStoreRows ? 3 : kind == Kind::kLoadRows ? 2 : 1;
  if (num_inputs != wanted || num_outputs != 1) {
    Refuse("vertex " + std::to_string(v) + " is a copy with " + std::to_string(num_inputs) +
           " inputs and " + std::to_string(num_outputs) + " outputs");
  }
  if (!MovesRows(kind) &&
      a.bytes[a.inputs[a.input_offsets[v]]] != a.bytes[a.outputs[a.output_offsets[v]]]) {
    Refuse("vertex " + std::to_string(v) + " copies between versions of different sizes");
  }
  // An argument that is returned in its own donated memory is "copied" to where it is.
  const int32_t overwritten = a.overwritten[a.output_offsets[v]];
  const bool stays = (kind == Kind::kOffload || kind == Kind::kStoreRows) &&
                     overwritten == a.inputs[a.input_offsets[v]];
  if (overwritten >= 0 && !stays) {
    Refuse(Entry("overwritten", a.output_offsets[v], overwritten) + ", but the vertex is a copy");
  }
}

// What a part of a sum must do.
bool AddsInPlace(const PlanArrays& a, int64_t v) {
  const int64_t i = a.input_offsets[v], o = a.output_offsets[v];
  return i < a.input_offsets[v + 1] && o + 1 == a.output_offsets[v + 1] &&
         a.overwritten[o] == a.inputs[i];
}

void CheckVertices(const PlanArrays& a, const Lanes& lanes, int32_t num_executables) {
  const int64_t num_vertices = a.kind.size();
  const int64_t num_versions = a.space.size();
  CheckLength("lane", a.lane, num_vertices);
  CheckLength("priority", a.priority, num_vertices);
  CheckLength("executable", a.executable, num_vertices);
  CheckLength("overwritten", a.overwritten, a.outputs.size());
  if (!a.descriptions.empty()) CheckLength("descriptions", a.descriptions, num_vertices);
  if (!a.first_of_sum.empty()) CheckLength("first_of_sum", a.first_of_sum, num_vertices);
  CheckOffsets("input_offsets", a.input_offsets, num_vertices, a.inputs.size());
  CheckOffsets("output_offsets", a.output_offsets, num_vertices, a.outputs.size());
  CheckBounds("kind", a.kind, 0, kNumKinds);
  CheckBounds("lane", a.lane, 0, lanes.size());
  CheckBounds("executable", a.executable, -1, num_executables);
  CheckBounds("inputs", a.inputs, 0, num_versions);
  CheckBounds("outputs", a.outputs, 0, num_versions);
  CheckBounds("overwritten", a.overwritten, -1, num_versions);
  CheckOffsets("succ_offsets", a.succ_offsets, num_vertices, a.succ.size());
  CheckBounds("succ", a.succ, 0, num_vertices);
  CheckBounds("first_of_sum", a.first_of_sum, -1, num_vertices);
  for (int64_t v = 0; v < num_vertices; ++v) {
    if (static_cast<Kind>(a.kind[v]) == Kind::kInput) {
      Refuse(Entry("kind", v, a.kind[v]) + " exists in hand-made graphs only");
    }
    for (int64_t e = a.succ_offsets[v]; e < a.succ_offsets[v + 1]; ++e) {
      if (a.succ[e] <= v) {
        Refuse(Entry("succ", e, a.succ[e]) + " is not after its tail " + std::to_string(v) +
               ": vertices must be in a serial order");
      }
    }
  }
  for (int64_t v = 0; v < num_vertices; ++v) {
    CheckVertex(a, v, lanes);
    CheckTiers(a, v, lanes);
    if (!a.first_of_sum.empty() && a.first_of_sum[v] >= 0 && !AddsInPlace(a, v)) {
      Refuse(Entry("first_of_sum", v, a.first_of_sum[v]) + ", but the vertex adds nothing");
    }
  }
}

void CheckDonated(const PlanArrays& a) {
  if (a.donated.size() % 2 != 0) Refuse("donated is not a list of pairs");
  for (size_t i = 0; i < a.donated.size(); i += 2) {
    const int32_t argument = a.donated[i];
    const int32_t result = a.donated[i + 1];
    const bool known = argument >= 0 && argument < static_cast<int64_t>(a.argument_bytes.size()) &&
                       result >= 0 && result < static_cast<int64_t>(a.result_bytes.size());
    if (!known || a.argument_bytes[argument] != a.result_bytes[result]) {
      Refuse("donated names argument " + std::to_string(argument) + " and result " +
             std::to_string(result) + ", which are not an argument and a result of one size");
    }
  }
}

}  // namespace

LoadedPlan LoadedPlan::Load(PlanArrays arrays, int32_t num_devices, int32_t num_executables) {
  if (static_cast<int64_t>(arrays.arena_bytes.size()) > num_devices) {
    Refuse("arena_bytes has " + std::to_string(arrays.arena_bytes.size()) +
           " entries, but the client has " + std::to_string(num_devices) + " devices");
  }
  LoadedPlan plan{Lanes(num_devices)};
  CheckVersions(arrays);
  CheckVertices(arrays, plan.lanes_, num_executables);
  CheckDonated(arrays);
  plan.a_ = std::move(arrays);
  const PlanArrays& a = plan.a_;
  const int32_t n = plan.num_vertices();
  const int32_t m = plan.num_versions();

  plan.indegree_.assign(n, 0);
  for (int32_t head : a.succ) ++plan.indegree_[head];
  plan.lane_order_.resize(plan.lanes_.size());
  for (int32_t v = 0; v < n; ++v) {
    if (plan.indegree_[v] == 0) plan.sources_.push_back(v);
    plan.lane_order_[a.lane[v]].push_back(v);
  }

  std::vector<int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t x, int32_t y) { return a.priority[x] > a.priority[y]; });
  plan.rank_.resize(n);
  for (int32_t r = 0; r < n; ++r) plan.rank_[order[r]] = r;

  plan.writer_.assign(m, -1);
  plan.reader_offsets_.assign(m + 1, 0);
  for (int32_t v = 0; v < n; ++v) {
    for (int64_t o = a.output_offsets[v]; o < a.output_offsets[v + 1]; ++o) {
      int32_t& writer = plan.writer_[a.outputs[o]];
      if (writer >= 0) {
        Refuse(Entry("outputs", o, a.outputs[o]) + " is written by vertices " +
               std::to_string(writer) + " and " + std::to_string(v));
      }
      if (plan.space(a.outputs[o]) == Space::kArgument) {
        Refuse(Entry("outputs", o, a.outputs[o]) + " is an argument, which no vertex may write");
      }
      writer = v;
    }
  }
  for (int32_t version_id : a.inputs) {
    if (plan.writer_[version_id] < 0 && plan.space(version_id) != Space::kArgument) {
      Refuse("version " + std::to_string(version_id) + " is read and never written");
    }
    ++plan.reader_offsets_[version_id + 1];
  }
  std::partial_sum(plan.reader_offsets_.begin(), plan.reader_offsets_.end(),
                   plan.reader_offsets_.begin());
  plan.readers_.resize(a.inputs.size());
  std::vector<int64_t> next(plan.reader_offsets_.begin(), plan.reader_offsets_.end());
  for (int32_t v = 0; v < n; ++v) {
    for (int64_t i = a.input_offsets[v]; i < a.input_offsets[v + 1]; ++i) {
      plan.readers_[next[a.inputs[i]]++] = v;
    }
  }
  plan.CheckResidents();
  return plan;
}

void LoadedPlan::CheckResidents() const {
  if (a_.owed.size() != a_.residents.size()) Refuse("owed has not one entry for each resident");
  if (a_.returned.size() != a_.residents.size()) {
    Refuse("returned has not one entry for each resident");
  }
  for (size_t i = 0; i < a_.residents.size(); ++i) {
    const int32_t version = a_.residents[i], result = a_.owed[i];
    const auto refuse = [&](const char* why) {
      Refuse(Entry("residents", static_cast<int64_t>(i), version) + why);
    };
    if (version < 0 || version >= num_versions()) refuse(" is no version");
    if (space(version) != Space::kDevice || writer_[version] < 0 ||
        kind(writer_[version]) != Kind::kReload) {
      refuse(" is not reloaded to a device");
    }
    const int32_t source = SourceOf(version);
    if (source < 0) refuse(" is no part of an argument");
    int32_t last = version;
    while (SuccessorOf(last) >= 0) last = SuccessorOf(last);
    if ((last == version) != (result < 0)) refuse(" is overwritten and not owed, or owed and not");
    if (a_.returned[i] >= 0 && !IsBroughtBack(version, a_.returned[i])) {
      refuse(" is not brought back");
    }
    if (last == version) continue;
    if (result >= num_versions() || space(result) != Space::kResult || writer_[result] < 0 ||
        kind(writer_[result]) != Kind::kOffload || offset(result) != offset(source) ||
        bytes(result) != bytes(version)) {
      refuse(" is owed to no result");
    }
    if (BroughtFrom(result) != last) refuse(" is owed from elsewhere");
  }
}

std::string LoadedPlan::Describe(int32_t vertex_id) const {
  std::string text = "vertex " + std::to_string(vertex_id);
  if (!a_.descriptions.empty()) text += " (" + a_.descriptions[vertex_id] + ")";
  return text;
}

}  // namespace jaxoffload

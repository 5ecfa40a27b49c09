// TaskGraphs as columns in, MemGraphs as columns out.

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "planner/build_memgraph.h"
#include "planner/serial_orders.h"

namespace jaxoffload {
namespace {

[[noreturn]] void RefuseColumn(const char* name) {
  throw std::invalid_argument(std::string("TaskGraph columns: ") + name + " has the wrong length");
}

// The columns of a TaskGraph, and the arrays that they are.
class Columns {
 public:
  explicit Columns(nb::handle columns) : columns_(columns) {
    TaskColumns& c = found_;
    c.num_tensors = static_cast<int64_t>(Size("bytes"));
    c.num_vertices = static_cast<int64_t>(Size("kind"));
    c.bytes = Get<int64_t>("bytes", c.num_tensors);
    c.tensor_device = Get<int32_t>("tensor_device", c.num_tensors);
    c.argument = Get<int32_t>("argument", c.num_tensors);
    c.argument_offset = Get<int64_t>("argument_offset", c.num_tensors);
    c.result_offsets = Offsets("result_offsets", c.num_tensors);
    const int64_t parts = c.result_offsets[c.num_tensors];
    c.result = Get<int32_t>("result", parts);
    c.result_offset = Get<int64_t>("result_offset", parts);
    c.kind = Get<uint8_t>("kind", c.num_vertices);
    c.vertex_device = Get<int32_t>("vertex_device", c.num_vertices);
    c.adds = Get<uint8_t>("adds", c.num_vertices);
    c.input_offsets = Offsets("input_offsets", c.num_vertices);
    c.inputs = Get<int32_t>("inputs", c.input_offsets[c.num_vertices]);
    c.gathered = Get<uint8_t>("gathered", c.input_offsets[c.num_vertices]);
    c.output_offsets = Offsets("output_offsets", c.num_vertices);
    c.outputs = Get<int32_t>("outputs", c.output_offsets[c.num_vertices]);
    c.overwrite_offsets = Offsets("overwrite_offsets", c.num_vertices);
    c.overwrites = Get<int32_t>("overwrites", 2 * c.overwrite_offsets[c.num_vertices]);
    c.donated = Pairs("donated");
    c.replicas = Pairs("replicas");
    c.disk_arguments = ToVector(Column<int32_t>("disk_arguments"));
    c.disk_results = ToVector(Column<int32_t>("disk_results"));
    c.device_arguments = ToVector(Column<int32_t>("device_arguments"));
    c.device_results = ToVector(Column<int32_t>("device_results"));
  }

  const TaskColumns& found() const { return found_; }

 private:
  template <typename T>
  Array<T> Column(const char* name) {
    kept_.append(columns_.attr(name));
    return nb::cast<Array<T>>(kept_[kept_.size() - 1]);
  }

  size_t Size(const char* name) { return nb::len(nb::object(columns_.attr(name))); }

  template <typename T>
  const T* Get(const char* name, int64_t size) {
    const Array<T> column = Column<T>(name);
    if (static_cast<int64_t>(column.size()) != size) RefuseColumn(name);
    return column.data();
  }

  std::vector<std::pair<int32_t, int32_t>> Pairs(const char* name) {
    const std::vector<int32_t> flat = ToVector(Column<int32_t>(name));
    std::vector<std::pair<int32_t, int32_t>> found;
    for (size_t k = 0; k + 1 < flat.size(); k += 2) found.emplace_back(flat[k], flat[k + 1]);
    return found;
  }

  const int64_t* Offsets(const char* name, int64_t num_rows) {
    const int64_t* offsets = Get<int64_t>(name, num_rows + 1);
    if (offsets[0] != 0) RefuseColumn(name);
    for (int64_t row = 0; row < num_rows; ++row) {
      if (offsets[row] > offsets[row + 1]) RefuseColumn(name);
    }
    return offsets;
  }

  const nb::handle columns_;
  nb::list kept_;
  TaskColumns found_;
};

nb::dict ToDict(MemGraphColumns found) {
  nb::dict arrays;
  arrays["kind"] = Owned(std::move(found.kind));
  arrays["task_vertex"] = Owned(std::move(found.task_vertex));
  arrays["device"] = Owned(std::move(found.device));
  arrays["tensor"] = Owned(std::move(found.tensor));
  arrays["space"] = Owned(std::move(found.space));
  arrays["index"] = Owned(std::move(found.index));
  arrays["offset"] = Owned(std::move(found.offset));
  arrays["writer"] = Owned(std::move(found.writer));
  arrays["input_offsets"] = Owned(std::move(found.input_offsets));
  arrays["inputs"] = Owned(std::move(found.inputs));
  arrays["output_offsets"] = Owned(std::move(found.output_offsets));
  arrays["outputs"] = Owned(std::move(found.outputs));
  arrays["overwritten"] = Owned(std::move(found.overwritten));
  arrays["edge_tail"] = Owned(std::move(found.edge_tail));
  arrays["edge_head"] = Owned(std::move(found.edge_head));
  arrays["edge_kind"] = Owned(std::move(found.edge_kind));
  arrays["residents"] = Owned(std::move(found.residents));
  arrays["owed"] = Owned(std::move(found.owed));
  return arrays;
}

nb::object Build(nb::handle columns, std::vector<int64_t> capacity,
                 std::optional<int64_t> host_capacity, bool disk, bool in_place_io, size_t victims,
                 std::optional<int64_t> lookahead, std::vector<int64_t> places, bool unreduced,
                 std::vector<int32_t> residents) {
  const Columns arrays(columns);
  BuildOptions options;
  options.capacity = std::move(capacity);
  options.host_capacity = host_capacity;
  options.disk = disk;
  options.in_place_io = in_place_io;
  if (victims >= kVictimRules.size()) {
    throw std::invalid_argument("build_memgraph: there is no rule for victims " +
                                std::to_string(victims));
  }
  options.victims = static_cast<VictimRule>(victims);
  options.lookahead = lookahead;
  options.places = std::move(places);
  options.unreduced = unreduced;
  options.residents = std::move(residents);
  MemGraphColumns found;
  try {
    const WithoutGil without_gil;
    found = BuildMemGraph(TaskTable(arrays.found()), options);
  } catch (const HostTierFull& full) {
    return nb::int_(full.tensor);
  }
  return ToDict(std::move(found));
}

nb::tuple InPlace(nb::handle columns, bool in_place_io) {
  const Columns arrays(columns);
  const TaskTable table(arrays.found());
  const CallersMemory callers(table, in_place_io);
  return nb::make_tuple(Owned(callers.read_in_place()), Owned(callers.written_in_place()));
}

nb::list Orders(nb::handle columns, const Array<double>& seconds) {
  const Columns arrays(columns);
  if (static_cast<int64_t>(seconds.size()) != arrays.found().num_vertices) RefuseColumn("seconds");
  std::vector<SerialOrder> found;
  {
    const WithoutGil without_gil;
    found = SerialOrders(TaskTable(arrays.found()), seconds.data());
  }
  nb::list named;
  for (SerialOrder& order : found) {
    named.append(nb::make_tuple(order.name, Owned(std::move(order.vertices))));
  }
  return named;
}

}  // namespace

void BindMemGraph(nb::module_& m) {
  m.def("build_memgraph", &Build, "columns"_a, "capacity"_a, "host_capacity"_a.none(), "disk"_a,
        "in_place_io"_a, "victims"_a, "lookahead"_a.none(), "places"_a, "unreduced"_a,
        "residents"_a);
  nb::list rules;
  for (const char* const name : kVictimRules) rules.append(name);
  m.attr("VICTIM_RULES") = nb::tuple(rules);
  m.def("in_place", &InPlace, "columns"_a, "in_place_io"_a);
  m.def("serial_orders", &Orders, "columns"_a, "seconds"_a);
}

}  // namespace jaxoffload

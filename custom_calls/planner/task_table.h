// A TaskGraph as flat arrays (jaxoffload/graphs/columns.py), and what of it the planner asks often.

#ifndef JAXOFFLOAD_PLANNER_TASK_TABLE_H_
#define JAXOFFLOAD_PLANNER_TASK_TABLE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "base/pages.h"

namespace jaxoffload {

// Of graphs/taskgraph.py's VertexKind.
enum class TaskKind : uint8_t {
  kInput = 0,
  kKernel = 1,
  kTransfer = 2,
  kHostKernel = 3,
  kLoadRows = 4,
  kStoreRows = 5
};

// The arrays that Python made; they outlive whoever reads them. CSR offsets have one entry more
// than there are rows.
struct TaskColumns {
  int64_t num_tensors;
  int64_t num_vertices;
  const int64_t* bytes;  // of each tensor
  const int32_t* tensor_device;
  const int32_t* argument;  // the flat argument that a tensor is a part of, or -1
  const int64_t* argument_offset;
  const int64_t* result_offsets;  // CSR over tensors
  const int32_t* result;          // the flat result
  const int64_t* result_offset;   // of the part in it
  const uint8_t* kind;            // TaskKind of each vertex
  const int32_t* vertex_device;
  const uint8_t* adds;  // of each vertex, whether it adds its second operand to its first, in place
  const int64_t* input_offsets;  // CSR over vertices
  const int32_t* inputs;
  const uint8_t* gathered;  // of each input, whether only rows of it are taken
  const int64_t* output_offsets;
  const int32_t* outputs;
  const int64_t* overwrite_offsets;
  const int32_t* overwrites;  // pairs (input position, output position), flattened
  std::vector<std::pair<int32_t, int32_t>> donated;  // (argument, result)
  std::vector<int32_t> disk_arguments;
  std::vector<int32_t> disk_results;
  std::vector<int32_t> device_arguments;  // in a memory that the host's cores do not reach
  std::vector<int32_t> device_results;
  std::vector<std::pair<int32_t, int32_t>> replicas;  // (argument, the first of the same bytes)
};

// What XLA asks of the address of an array that a kernel reads where the caller has it.
constexpr int64_t kInPlaceAlignment = 64;
// Every place starts at a multiple of this many bytes (PLACE_ALIGNMENT).
constexpr int64_t kPlaceAlignment = 256;

// What all tensors may have together, and where parts may start: sums and costs fit into 64 bits.
constexpr int64_t kMostBytes = int64_t{1} << 57;
constexpr int32_t kMostDevices = 1 << 16;
// In place of a tensor, a vertex, a version or an argument where there is none.
constexpr int32_t kNone = -1;

// A row of a CSR array.
struct Row {
  const int32_t* first;
  const int32_t* last;
  const int32_t* begin() const { return first; }
  const int32_t* end() const { return last; }
  int64_t size() const { return last - first; }
  int32_t operator[](int64_t at) const { return first[at]; }
};

class TaskTable {
 public:
  // Throws std::invalid_argument where a column names what is not there, at that point of the
  // order.
  explicit TaskTable(TaskColumns columns);

  const TaskColumns& columns() const { return columns_; }
  int64_t num_tensors() const { return columns_.num_tensors; }
  int64_t num_vertices() const { return columns_.num_vertices; }
  int32_t num_devices() const { return num_devices_; }

  Row inputs(int64_t vertex) const {
    return Slice(columns_.input_offsets, columns_.inputs, vertex);
  }
  Row outputs(int64_t vertex) const {
    return Slice(columns_.output_offsets, columns_.outputs, vertex);
  }
  // Vertices that read a tensor, in serial order.
  Row readers(int64_t tensor) const {
    return Slice(reader_offsets_.data(), readers_.data(), tensor);
  }
  // Whether a vertex works on tensors in the host's memory.
  bool on_host(int64_t vertex) const {
    const auto kind = static_cast<TaskKind>(columns_.kind[vertex]);
    return kind == TaskKind::kHostKernel || moves_rows(vertex);
  }
  // Whether it reads or writes rows of its first operand, an argument, on disk.
  bool moves_rows(int64_t vertex) const {
    const auto kind = static_cast<TaskKind>(columns_.kind[vertex]);
    return kind == TaskKind::kLoadRows || kind == TaskKind::kStoreRows;
  }
  // Tensors of other devices that are the same part of the same argument, those of the devices
  // before this one first: where each copies from the one before, none is copied from by all.
  Row peers(int64_t tensor) const {
    if (peer_offsets_.empty()) return {nullptr, nullptr};
    return Slice(peer_offsets_.data(), peers_.data(), tensor);
  }
  // The last vertex that reads a tensor on its device, or -1.
  int64_t last_device_reader(int64_t tensor) const { return last_device_reader_[tensor]; }
  int64_t num_overwrites(int64_t vertex) const {
    return columns_.overwrite_offsets[vertex + 1] - columns_.overwrite_offsets[vertex];
  }
  // Positions of the operand and of the output over it.
  std::pair<int32_t, int32_t> overwrite(int64_t vertex, int64_t k) const {
    const int32_t* pair = columns_.overwrites + 2 * (columns_.overwrite_offsets[vertex] + k);
    return {pair[0], pair[1]};
  }
  // Whether an entry of `inputs` is overwritten, and whether one of `outputs` overwrites nothing.
  bool is_overwritten(int64_t entry) const { return is_overwritten_[entry]; }
  bool is_fresh(int64_t entry) const { return is_fresh_[entry]; }
  // Whether a vertex takes its few rows of an entry of `inputs` from the caller's memory.
  bool Gathers(int64_t entry) const {
    return columns_.gathered[entry] && IsReadable(columns_.inputs[entry]);
  }
  bool is_argument(int64_t tensor) const { return columns_.argument[tensor] >= 0; }
  bool on_disk(int64_t argument) const { return Has(disk_argument_, argument); }
  bool result_on_disk(int64_t result) const { return Has(disk_result_, result); }
  // Whether the host's cores reach an argument that is in memory, and where a result is to be.
  bool host_reaches_argument(int64_t argument) const { return !Has(device_argument_, argument); }
  bool host_reaches_result(int64_t result) const { return !Has(device_result_, result); }
  bool uses_disk() const {
    return !columns_.disk_arguments.empty() || !columns_.disk_results.empty();
  }
  // Whether an argument can be read where the caller has it.
  bool IsReadable(int64_t tensor) const {
    return is_argument(tensor) && columns_.argument_offset[tensor] % kInPlaceAlignment == 0 &&
           !on_disk(columns_.argument[tensor]);
  }
  // Whether a result part is an argument part that is on disk and is returned where it is.
  bool Stays(int64_t tensor, int64_t result_part) const;

 private:
  static bool Has(const std::vector<bool>& set, int64_t index) {
    return index < static_cast<int64_t>(set.size()) && set[index];
  }
  static Row Slice(const int64_t* offsets, const int32_t* values, int64_t row) {
    return {values + offsets[row], values + offsets[row + 1]};
  }
  // What TaskGraph.check asks, as far as the planner could otherwise reach outside its arrays.
  void Check() const;
  void CheckOrder() const;
  void FindPeers();

  TaskColumns columns_;
  int32_t num_devices_ = 1;
  std::vector<int64_t> reader_offsets_;
  std::vector<int32_t> readers_;
  std::vector<int64_t> last_device_reader_;
  std::vector<int64_t> peer_offsets_;
  std::vector<int32_t> peers_;
  std::vector<bool> is_overwritten_, is_fresh_;
  std::vector<bool> disk_argument_, disk_result_, device_argument_, device_result_;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLANNER_TASK_TABLE_H_

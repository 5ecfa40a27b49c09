#include "planner/sums.h"

#include <algorithm>

namespace jaxoffload {
namespace {

// What a vertex that adds adds to.
int32_t AddedTo(const MemGraphColumns& graph, int64_t vertex) {
  return graph.inputs[graph.input_offsets[vertex]];
}

int32_t Made(const MemGraphColumns& graph, int64_t vertex) {
  return graph.outputs[graph.output_offsets[vertex]];
}

// Whether a vertex writes or reads a version.
bool Uses(const MemGraphColumns& graph, int64_t vertex, int32_t version) {
  const auto reads = graph.inputs.begin();
  const auto end = reads + graph.input_offsets[vertex + 1];
  return graph.writer[version] == vertex ||
         std::find(reads + graph.input_offsets[vertex], end, version) != end;
}

}  // namespace

std::vector<int32_t> FirstOfSum(const MemGraphColumns& graph, const uint8_t* adds,
                                const std::vector<int32_t>& over) {
  const auto count = static_cast<int64_t>(graph.kind.size());
  const auto adds_on_device = [&](int64_t v) {
    if (static_cast<Kind>(graph.kind[v]) != Kind::kKernel || !adds[graph.task_vertex[v]]) {
      return false;
    }
    const int32_t made = Made(graph, v);
    return over[made] == AddedTo(graph, v) &&
           static_cast<Space>(graph.space[made]) == Space::kDevice;
  };
  std::vector<int64_t> adders;
  for (int64_t v = 0; v < count; ++v) {
    if (adds_on_device(v)) adders.push_back(v);
  }
  if (adders.empty()) return {};
  std::vector<int32_t> first(count, kNone), num_readers(graph.tensor.size(), 0);
  for (const int32_t version : graph.inputs) ++num_readers[version];
  for (const int64_t v : adders) {
    const int32_t before = graph.writer[AddedTo(graph, v)];
    if (before < 0 || !adds_on_device(before) || num_readers[AddedTo(graph, v)] > 1) continue;
    if (first[before] == kNone) first[before] = before;
    first[v] = first[before];
  }
  return first;
}

EdgeRows InAnyOrder(const EdgeRows& rows, const MemGraphColumns& graph,
                    const std::vector<int32_t>& first_of_sum) {
  // Of a sum, by its first vertex: what all of it waits for, and the vertices so far.
  std::vector<std::vector<int32_t>> waits(rows.num_rows()), parts(rows.num_rows());
  EdgeRows found;
  std::vector<Edge> row;
  for (int64_t v = 0; v < rows.num_rows(); ++v) {
    const int32_t first = first_of_sum[v];
    row.clear();
    for (const Edge& edge : rows[v]) {
      const int32_t of = first_of_sum[edge.tail];
      if (of == kNone) {
        row.push_back(edge);
      } else if (of != first) {
        row.push_back(edge);
        // The last of a sum stands for all: the others' sums are read by none but the next.
        if (edge.tail != parts[of].back()) continue;
        for (const int32_t part : parts[of]) row.push_back({part, false});
      }
    }
    if (first == v) {
      for (const Edge& edge : row) {
        if (!edge.is_data || Uses(graph, edge.tail, AddedTo(graph, v))) {
          waits[v].push_back(edge.tail);
        }
      }
    } else if (first != kNone) {
      for (const int32_t tail : waits[first]) row.push_back({tail, false});
    }
    if (first != kNone) parts[first].push_back(static_cast<int32_t>(v));
    found.Add(&row);
  }
  return found;
}

}  // namespace jaxoffload

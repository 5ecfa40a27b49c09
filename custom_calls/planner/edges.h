// The edges of a graph whose vertices are numbered along them, row by row: for each vertex its
// predecessors, in ascending order.

#ifndef JAXOFFLOAD_PLANNER_EDGES_H_
#define JAXOFFLOAD_PLANNER_EDGES_H_

#include <cstdint>
#include <vector>

namespace jaxoffload {

struct Edge {
  int32_t tail;
  bool is_data;  // the head reads what the tail writes; else only memory passes from one to another
};

class EdgeRows {
 public:
  struct Row {
    const Edge* first;
    const Edge* last;
    const Edge* begin() const { return first; }
    const Edge* end() const { return last; }
    int64_t size() const { return last - first; }
  };

  int64_t num_rows() const { return static_cast<int64_t>(offsets_.size()) - 1; }
  int64_t num_edges() const { return static_cast<int64_t>(edges_.size()); }
  Row operator[](int64_t vertex) const {
    return {edges_.data() + offsets_[vertex], edges_.data() + offsets_[vertex + 1]};
  }

  // Appends a row. Sorts `row`, and drops what it names twice; data counts.
  void Add(std::vector<Edge>* row);

 private:
  std::vector<int64_t> offsets_{0};
  std::vector<Edge> edges_;
};

// Removes vertices. In place of an edge from one that goes, there are edges from that one's
// predecessors; the others are numbered anew.
EdgeRows Without(const EdgeRows& rows, const std::vector<bool>& stays);

// Transitive reduction: drops memory edges that follow from other edges (TURNIP draws them dashed
// in figure 5 and calls them superfluous). Finding all takes quadratic time, so the search from
// each vertex back to its memory predecessors is bounded. Paths of two edges are always found, and
// for graphs of up to some thousand vertices nearly all others are.
EdgeRows ReduceTransitively(const EdgeRows& rows);

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLANNER_EDGES_H_

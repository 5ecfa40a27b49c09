// A run of a MemGraph on lanes, simulated: when each vertex starts and ends, and how far each is
// from the end. Knows numbers only; which lane does what is told by jaxoffload/plan/cost.

#ifndef JAXOFFLOAD_PLANNER_SIMULATE_H_
#define JAXOFFLOAD_PLANNER_SIMULATE_H_

#include <cstdint>
#include <vector>

namespace jaxoffload {

// Vertices and edges: vertex v must follow `tail[e]` of each edge with head[e] == v, and
// tail[e] < head[e].
struct Dag {
  int64_t num_vertices;
  int64_t num_edges;
  const int32_t* tail;
  const int32_t* head;
};

// The heads of each vertex's edges, in the order of the edges.
class Successors {
 public:
  // Throws std::invalid_argument where an edge points backwards or names no vertex.
  explicit Successors(const Dag& dag);

  int64_t num_vertices() const { return static_cast<int64_t>(waits_.size()); }
  const int32_t* begin(int64_t vertex) const { return heads_.data() + offsets_[vertex]; }
  const int32_t* end(int64_t vertex) const { return heads_.data() + offsets_[vertex + 1]; }
  // Edges to each vertex.
  const std::vector<int32_t>& waits() const { return waits_; }

 private:
  std::vector<int64_t> offsets_;
  std::vector<int32_t> heads_;
  std::vector<int32_t> waits_;
};

// The longest path from the start of each vertex to the end of the run.
std::vector<double> LongestPaths(const Successors& successors, const double* seconds);

struct LaneRules {
  const int32_t* lane;     // of each vertex
  const double* priority;  // of each vertex: the largest that is ready starts first, then the first
  int32_t num_lanes;
  bool fixed;  // a lane takes its vertices in their order, whatever else is ready
};

struct Times {
  std::vector<double> start;
  std::vector<double> end;
};

// A lane starts its best ready vertex as soon as it is free. Of what ends at one time the vertex of
// the smaller number counts as first. O(n log n). Throws std::invalid_argument where a lane is
// none.
Times Simulate(const Successors& successors, const double* seconds, const LaneRules& rules);

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLANNER_SIMULATE_H_

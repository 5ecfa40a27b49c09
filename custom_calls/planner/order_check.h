// The two searches of the verifier (jaxoffload/graphs/verify.py), which are too slow in Python: who
// follows whom at each address, and which vertices reach which. They know nothing of planning.

#ifndef JAXOFFLOAD_PLANNER_ORDER_CHECK_H_
#define JAXOFFLOAD_PLANNER_ORDER_CHECK_H_

#include <cstdint>
#include <vector>

namespace jaxoffload {

// Range i is the addresses [start[i], end[i]) of the memory `memory[i]`, written at time `time[i]`;
// a negative time says that it is there from the start. Of equal times, smaller i comes first.
struct WrittenRanges {
  const int64_t* memory;
  const int64_t* start;
  const int64_t* end;
  const int64_t* time;
  int64_t count;
};

// Pairs (old, new), flattened: at some address `new` is the next to be written after `old`. Of what
// is there from the start, all that has an address in common with its first writer is `old`.
// O(count log count), but for ranges from the start that overlap one another.
std::vector<int64_t> NextWriters(const WrittenRanges& ranges);

// For each pair (from, to), whether a path of one edge or more leads there. Vertices are numbered
// along the edges: tail[i] < head[i]. Throws std::invalid_argument where one is not, or names no
// vertex.
//
// A few steps backwards from each end find most; for the others it is the transitive closure by
// rows of bits, 512 columns at a time, each time for the vertices between the ends of those pairs
// only.
std::vector<uint8_t> Reaches(int64_t num_vertices, const int64_t* tail, const int64_t* head,
                             int64_t num_edges, const int64_t* from, const int64_t* to,
                             int64_t num_pairs);

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLANNER_ORDER_CHECK_H_

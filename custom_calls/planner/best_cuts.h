// Where a stretch of operations is cut into runs, each of which becomes one vertex
// (jaxoffload/capture/cluster.py, which says what is counted and why).

#ifndef JAXOFFLOAD_PLANNER_BEST_CUTS_H_
#define JAXOFFLOAD_PLANNER_BEST_CUTS_H_

#include <cstdint>
#include <vector>

namespace jaxoffload {

// The operations in order. Values are numbered; `offsets` have an entry more than operations.
struct Stretch {
  int64_t num_operations;
  int64_t num_values;
  const int64_t* bytes;    // of each value
  const int64_t* until;    // of each value: from a run's end beyond this on it needs no memory
  const int64_t* written;  // values
  const int64_t* written_offsets;
  const int64_t* read;  // values
  const int64_t* read_offsets;
  const int64_t* alone;           // bytes that the operation reads and writes
  const int64_t* is_elementwise;  // 0 or 1
  const int64_t* is_product;      // 0 or 1: of these a run has `max_products` at most
  const int64_t* ends;            // where a run that begins here ends at the latest; ascending
  const double* crossing;         // [num_operations + 1]: what the bytes that cross a cut cost
};

struct CutLimits {
  double price;           // of a cut, beside what crosses it
  double max_bytes;       // the working set of a run of more than one operation
  double where_all_fuse;  // how many times that a run may have that fuses into one loop
  int64_t max_products;
};

struct Cuts {
  std::vector<int64_t> begins;  // of each run, in order
  double least;                 // `max_bytes` from which on, up to the given one, the same is best
};

// The runs whose cuts cost least in sum. O(operations x the longest run).
Cuts BestCuts(const Stretch& stretch, const CutLimits& limits);

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLANNER_BEST_CUTS_H_

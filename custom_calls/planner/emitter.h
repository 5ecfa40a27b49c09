// Collects the vertices, versions and edges of a MemGraph (graphs/memgraph.py) while it is built,
// in the order of the simulated execution.

#ifndef JAXOFFLOAD_PLANNER_EMITTER_H_
#define JAXOFFLOAD_PLANNER_EMITTER_H_

#include <cstdint>
#include <vector>

#include "plan/loaded_plan.h"
#include "planner/address_space.h"
#include "planner/edges.h"
#include "planner/task_table.h"

namespace jaxoffload {

// The arrays of a MemGraph.
struct MemGraphColumns {
  std::vector<uint8_t> kind;
  std::vector<int32_t> task_vertex, device;
  std::vector<int32_t> tensor;
  std::vector<uint8_t> space;
  std::vector<int32_t> index;
  std::vector<int64_t> offset;
  std::vector<int32_t> writer;
  std::vector<int64_t> input_offsets{0};
  std::vector<int32_t> inputs;
  std::vector<int64_t> output_offsets{0};
  std::vector<int32_t> outputs;
  std::vector<int32_t> overwritten;
  std::vector<int32_t> edge_tail, edge_head;
  std::vector<uint8_t> edge_kind;
  std::vector<int32_t> residents, owed;
};

class Emitter {
 public:
  // A version without a writer so far.
  int32_t Version(int32_t tensor, Space space, int32_t index, int64_t offset);

  // A vertex that reads and writes versions, and must follow the vertices in `after`, in any order
  // and more than once.
  void Vertex(Kind kind, int64_t task_vertex, int32_t device, const std::vector<int32_t>& inputs,
              const std::vector<int32_t>& outputs, const std::vector<int32_t>& after);

  // `version` is written over `old`, in place.
  void Over(int32_t version, int32_t old) { over_[version] = old; }

  // `version` stays in its place when the run has ended.
  void Stays(int32_t version);
  // What was written over it stays there instead; `result` is where it is owed to.
  void Owes(int32_t resident, int32_t result);

  // The vertices that must be done before a version's place is used again.
  Dependencies LastUsers(int32_t version);
  void AppendTo(std::vector<int32_t>* vertices, Dependencies after) const;
  void AppendReaders(std::vector<int32_t>* vertices, int32_t version) const;

  int32_t tensor(int32_t version) const { return columns_.tensor[version]; }
  Space space(int32_t version) const { return static_cast<Space>(columns_.space[version]); }
  int32_t index(int32_t version) const { return columns_.index[version]; }
  int64_t offset(int32_t version) const { return columns_.offset[version]; }

  // The MemGraph, its dead copies dropped. Once. `adds`: of each vertex of the TaskGraph, whether
  // it adds to a sum. `unreduced`: leave out the transitive reduction.
  MemGraphColumns Finish(const uint8_t* adds, bool unreduced);

 private:
  struct Reader {
    int32_t vertex;
    int32_t next;
  };

  // Dead-copy elimination. A tensor is offloaded when it is evicted, and may still be in its place
  // when it is next read. One that is reloaded ahead of its reader may be evicted again before it
  // is read. Both copies are dead then, and so is what was copied for their sake alone.
  void DropDeadCopies();

  MemGraphColumns columns_;
  std::vector<int32_t> over_;                        // of each version
  std::vector<int32_t> first_reader_, last_reader_;  // of each version, in `readers_`
  std::vector<Reader> readers_;
  std::vector<int32_t> num_readers_;
  EdgeRows edges_;
  std::vector<Edge> row_;      // of the vertex that is being added
  std::vector<int32_t> pool_;  // of all Dependencies
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLANNER_EMITTER_H_

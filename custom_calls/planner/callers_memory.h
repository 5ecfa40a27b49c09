// The caller's memory: where arguments are, where results go, and which alias each other. A result
// part is an alias of an argument part where both are the same bytes of a donated pair: XLA's
// input-output aliasing.

#ifndef JAXOFFLOAD_PLANNER_CALLERS_MEMORY_H_
#define JAXOFFLOAD_PLANNER_CALLERS_MEMORY_H_

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "planner/task_table.h"

namespace jaxoffload {

// Parts of results are positions in TaskColumns::result.
class CallersMemory {
 public:
  // `in_place_io`: whether arguments are read and results written where the caller has them;
  // those in a device's own memory are in any case.
  CallersMemory(const TaskTable& table, bool in_place_io);

  // Whether a result part is the very memory of the argument part that a tensor is.
  bool IsAlias(int64_t part, int32_t tensor) const;
  // The result part of an output that is the memory of an operand's argument part.
  int64_t AliasOf(int32_t output, int32_t operand) const;
  // The result part in whose memory a tensor is made on the host's cores that they go on to
  // overwrite in place until it is that part; or -1.
  int64_t GrowsInto(int32_t tensor) const { return grows_into_[tensor]; }
  // Argument tensors whose memory a result part of a tensor takes.
  void Overwritten(int64_t part, int32_t tensor, std::vector<int32_t>* found) const;

  // Of each entry of TaskColumns::inputs, whether its vertex reads it outside of the arena: on the
  // host's cores, or on a device where the caller has it; if the vertex overwrites it there, only
  // where the output's result is that very memory.
  const std::vector<uint8_t>& read_in_place() const { return read_in_place_; }
  // Of each entry of TaskColumns::outputs, whether its vertex writes it outside of the arena: on
  // the host's cores, or from a device directly to its first result part.
  const std::vector<uint8_t>& written_in_place() const { return written_in_place_; }
  // Whether a kernel may read an entry of its inputs, a part of an argument, where the caller has
  // it, and overwrite it there if it does; and write one of its outputs directly to its first
  // result part.
  bool ReachesArgument(int64_t vertex, int64_t entry) const;
  bool ReachesResult(int64_t vertex, int64_t entry) const;

 private:
  struct Parts {                                      // of one donated argument
    std::vector<std::pair<int64_t, int32_t>> sorted;  // (offset, tensor)
    int64_t longest = 0;
  };

  // Whether an entry is of an argument, or of outputs goes to a result, in a device's own memory.
  bool IsNearArgument(int64_t entry) const;
  bool IsNearResult(int64_t entry) const;
  void FindGrowing();
  // Whether a kernel may write there while it reads its inputs.
  bool MayWrite(int64_t part, int32_t tensor, int64_t vertex, int32_t except_for) const;
  int32_t ArgumentOf(int32_t result) const;

  const TaskTable& table_;
  const bool in_place_io_;
  std::unordered_map<int32_t, int32_t> argument_of_;  // of a result, what it is donated
  std::unordered_map<int32_t, Parts> parts_;          // by argument
  std::unordered_map<int32_t, int32_t> overwriter_;   // of an operand, the output over it
  std::vector<uint8_t> read_in_place_, written_in_place_;
  std::vector<int64_t> grows_into_;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLANNER_CALLERS_MEMORY_H_

// A MemGraph as the launcher wants it: immutable flat arrays, checked once.
//
// Takes the arrays of jaxoffload/graphs/memgraph.py and what only the runtime needs beside them
// (lanes, priorities, dtypes, sizes of the caller's arrays). Gives in-degrees, the readers and the
// writer of each version, and for each lane its vertices in serial order. Any number of runs may
// share one LoadedPlan; nothing here changes after Load.
//
// Load refuses arrays that would be read or written out of bounds. It does not prove that the plan
// is free of races: graphs/verify.py does (Plan.proven), and launcher/live_ranges.h watches.

#ifndef JAXOFFLOAD_PLAN_LOADED_PLAN_H_
#define JAXOFFLOAD_PLAN_LOADED_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/lanes.h"

namespace jaxoffload {

// The values of memgraph.py's Space.
enum class Space : uint8_t { kDevice = 0, kArgument = 1, kResult = 2, kHost = 3, kDisk = 4 };

// A half-open range of positions in a flat array.
struct Range {
  int64_t begin;
  int64_t end;
  int64_t size() const { return end - begin; }
};

// What the caller gives; N vertices, M versions, E edges.
struct PlanArrays {
  std::vector<uint8_t> kind;            // [N] Kind
  std::vector<int32_t> lane;            // [N] Lanes
  std::vector<double> priority;         // [N] larger starts first
  std::vector<int32_t> executable;      // [N] position in the list of executables, -1 for copies
  std::vector<int64_t> succ_offsets;    // [N+1]
  std::vector<int32_t> succ;            // heads of each tail's edges; tail < head: a serial order
  std::vector<int64_t> input_offsets;   // [N+1]
  std::vector<int32_t> inputs;          // versions read, in parameter order
  std::vector<int64_t> output_offsets;  // [N+1]
  std::vector<int32_t> outputs;         // versions written, in result order
  std::vector<int32_t> overwritten;     // [size of outputs] input version written over, or -1
  std::vector<uint8_t> space;           // [M] Space
  std::vector<int32_t> index;           // [M] device, argument or result number; 0 for the host
  std::vector<int64_t> offset;          // [M] bytes from the start of that range
  std::vector<int64_t> bytes;           // [M]
  std::vector<int32_t> dtype;           // [M] PJRT_Buffer_Type; only the backend reads it
  std::vector<int64_t> dims_offsets;    // [M+1]
  std::vector<int64_t> dims;
  std::vector<int64_t> argument_bytes;    // [number of flat arguments]
  std::vector<int64_t> result_bytes;      // [number of flat results]
  std::vector<int64_t> arena_bytes;       // [devices of the plan]
  int64_t host_bytes = 0;                 // of the host arena
  std::vector<int32_t> donated;           // pairs: argument, the result whose memory it shares
  int64_t disk_bytes = 0;                 // of the plan's own extent on disk
  bool is_alone = false;                  // whether pages that others left are given back first
  std::vector<uint8_t> argument_on_disk;  // [number of flat arguments] or empty: none is
  std::vector<uint8_t> result_on_disk;    // [number of flat results] or empty
  std::vector<int32_t> residents;         // versions that stay in their places after a run
  std::vector<int32_t> owed;              // [size of residents] a result version, or -1
  std::vector<int32_t> returned;          // [size of residents] brought there again last, or -1
  std::vector<int32_t> first_of_sum;      // [N] or empty: of parts of sums the first, else -1
  std::vector<std::string> descriptions;  // [N] or empty: vertices in words, for errors
};

class LoadedPlan {
 public:
  // Throws std::invalid_argument that names the offending array and entry. `num_devices` and
  // `num_executables` are what the client has.
  static LoadedPlan Load(PlanArrays arrays, int32_t num_devices, int32_t num_executables);

  int32_t num_vertices() const { return static_cast<int32_t>(a_.kind.size()); }
  int32_t num_versions() const { return static_cast<int32_t>(a_.space.size()); }
  const Lanes& lanes() const { return lanes_; }

  Kind kind(int32_t vertex_id) const { return static_cast<Kind>(a_.kind[vertex_id]); }
  int32_t lane(int32_t vertex_id) const { return a_.lane[vertex_id]; }
  // Not of loads, stores and kernels of the host's.
  int32_t device(int32_t vertex_id) const { return DeviceOfLane(a_.lane[vertex_id]); }
  int32_t executable(int32_t vertex_id) const { return a_.executable[vertex_id]; }
  // Place in the order of falling priority, ties by serial position: smaller goes first.
  int32_t rank(int32_t vertex_id) const { return rank_[vertex_id]; }
  int32_t indegree(int32_t vertex_id) const { return indegree_[vertex_id]; }
  const int32_t* successors_begin(int32_t vertex_id) const {
    return a_.succ.data() + a_.succ_offsets[vertex_id];
  }
  const int32_t* successors_end(int32_t vertex_id) const {
    return a_.succ.data() + a_.succ_offsets[vertex_id + 1];
  }
  // Vertices that wait for nothing.
  const std::vector<int32_t>& sources() const { return sources_; }
  // Vertices of one lane, in serial order.
  const std::vector<int32_t>& lane_order(int32_t lane) const { return lane_order_[lane]; }

  Range inputs(int32_t vertex_id) const {
    return {a_.input_offsets[vertex_id], a_.input_offsets[vertex_id + 1]};
  }
  Range outputs(int32_t vertex_id) const {
    return {a_.output_offsets[vertex_id], a_.output_offsets[vertex_id + 1]};
  }
  int32_t input(int64_t entry) const { return a_.inputs[entry]; }
  int32_t output(int64_t entry) const { return a_.outputs[entry]; }
  int32_t overwritten(int64_t entry) const { return a_.overwritten[entry]; }

  Space space(int32_t version_id) const { return static_cast<Space>(a_.space[version_id]); }
  int32_t index(int32_t version_id) const { return a_.index[version_id]; }
  int64_t offset(int32_t version_id) const { return a_.offset[version_id]; }
  int64_t bytes(int32_t version_id) const { return a_.bytes[version_id]; }
  int32_t dtype(int32_t version_id) const { return a_.dtype[version_id]; }
  const int64_t* dims(int32_t version_id) const {
    return a_.dims.data() + a_.dims_offsets[version_id];
  }
  int64_t num_dims(int32_t version_id) const {
    return a_.dims_offsets[version_id + 1] - a_.dims_offsets[version_id];
  }
  // -1 for arguments.
  int32_t writer(int32_t version_id) const { return writer_[version_id]; }
  Range readers(int32_t version_id) const {
    return {reader_offsets_[version_id], reader_offsets_[version_id + 1]};
  }
  int32_t reader(int64_t entry) const { return readers_[entry]; }

  const std::vector<int64_t>& argument_bytes() const { return a_.argument_bytes; }
  const std::vector<int64_t>& result_bytes() const { return a_.result_bytes; }
  const std::vector<int64_t>& arena_bytes() const { return a_.arena_bytes; }
  int64_t host_bytes() const { return a_.host_bytes; }
  bool is_alone() const { return a_.is_alone; }
  int64_t disk_bytes() const { return a_.disk_bytes; }
  bool argument_on_disk(int32_t argument) const {
    return !a_.argument_on_disk.empty() && a_.argument_on_disk[argument] != 0;
  }
  bool result_on_disk(int32_t result) const {
    return !a_.result_on_disk.empty() && a_.result_on_disk[result] != 0;
  }
  // Whether some argument or result is on disk.
  bool is_disk_given() const {
    const auto is_any = [](const std::vector<uint8_t>& on_disk) {
      return std::find(on_disk.begin(), on_disk.end(), 1) != on_disk.end();
    };
    return is_any(a_.argument_on_disk) || is_any(a_.result_on_disk);
  }
  // Pairs, flat: an argument, then the result that is written over it.
  const std::vector<int32_t>& donated() const { return a_.donated; }

  // Versions that stay in their places after a run: parts of arguments, brought there by a reload
  // that has nothing to do where the run before has left them.
  const std::vector<int32_t>& residents() const { return a_.residents; }
  // Of each of them: if it is written over, the version of the caller's result that what is there
  // then is copied to, where it is not left in its place and owed; else -1.
  const std::vector<int32_t>& owed() const { return a_.owed; }
  // Of each of them: if others are in its place meanwhile, the version that is the last there: the
  // same part of the argument, or of the result that is in the donated argument's memory. Else -1.
  const std::vector<int32_t>& returned() const { return a_.returned; }
  // What a version that was copied is a copy of.
  int32_t BroughtFrom(int32_t version) const;
  // The part of an argument that a resident version is a copy of, by way of the host tier perhaps.
  int32_t SourceOf(int32_t resident) const;
  // The version that is written over one in its place, -1 if none is.
  int32_t SuccessorOf(int32_t version) const;

  // The first of those that add to one place in any order, one at a time, if it is one; else -1.
  int32_t first_of_sum(int32_t vertex_id) const {
    return a_.first_of_sum.empty() ? -1 : a_.first_of_sum[vertex_id];
  }

  // "vertex 12 (reload of f32[4,8] at model.py:3:1 (f))"
  std::string Describe(int32_t vertex_id) const;

 private:
  void CheckResidents() const;
  bool IsBroughtBack(int32_t first, int32_t last) const;

  explicit LoadedPlan(Lanes lanes) : lanes_(lanes) {}

  PlanArrays a_;
  Lanes lanes_;
  std::vector<int32_t> rank_;
  std::vector<int32_t> indegree_;
  std::vector<int32_t> sources_;
  std::vector<std::vector<int32_t>> lane_order_;
  std::vector<int32_t> writer_;
  std::vector<int64_t> reader_offsets_;
  std::vector<int32_t> readers_;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLAN_LOADED_PLAN_H_

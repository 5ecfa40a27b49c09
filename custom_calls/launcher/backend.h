// What the launcher drives: the border between the event loop and whatever executes vertices.
//
// The launcher knows graphs, lanes and addresses. A Backend knows what a kernel is. pjrt/ has the
// real one; tests/fake_backend.h has one that needs neither XLA nor Python, so that sanitizers can
// judge the launcher.

#ifndef JAXOFFLOAD_LAUNCHER_BACKEND_H_
#define JAXOFFLOAD_LAUNCHER_BACKEND_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tiers/disk_extent.h"

namespace jaxoffload {

// What is known of the caller's arrays beside their addresses: stamps (base/stamp.h), and owners of
// results that may be paid later what a run leaves on a device. What is beyond an end has none.
struct Contents {
  std::vector<uint64_t> argument_stamps, result_stamps;
  std::vector<std::shared_ptr<void>> result_owners;
};

// One run as a Backend sees it.
struct RunContext {
  // Of the caller's flat arguments and results. Begin may replace an argument's address.
  std::vector<char*> arguments;
  std::vector<char*> results;
  // Of arguments and results that are on disk; null for others, or empty if there are none. Their
  // addresses above are tags: numbers that no memory has (disk_source.h).
  std::vector<std::shared_ptr<DiskSource>> argument_sources;
  std::vector<std::shared_ptr<DiskExtent>> result_extents;
  // Of each version; the launcher fills it between Begin and the first vertex.
  std::vector<char*> address;
  Contents contents;
  // Of each vertex, whether it has nothing to do: the tensor that it would bring is there already,
  // or what it would copy away stays. Begin says so.
  std::vector<uint8_t> is_idle;
  // Of each vertex, whether it was begun, even if it failed. Written by its lane.
  std::vector<uint8_t> begun;
  // Of each result, whether its bytes are neither what they were nor what they should be, though no
  // vertex wrote to it. End says so.
  std::vector<uint8_t> lost_results;
  // Whether what is there already is to be compared with what it should be, where that is seen.
  bool check = false;
  // Whether the run was stopped before its end, by a failure or by the caller: decided once, before
  // End.
  bool is_stopped = false;
  // Set when the run is to stop: long copies look at it now and then. Relaxed: it only saves time,
  // the vertex's own completion publishes everything else.
  std::atomic<bool> abort{false};
  // Counters of Execute and Begin. Relaxed: read after the run, which orders them.
  std::atomic<int64_t> copied_outputs{0};
  std::atomic<int64_t> realigned_bytes{0};
  std::atomic<int64_t> rows_loaded{0}, row_bytes_loaded{0}, rows_stored{0}, row_bytes_stored{0};
};

class Backend {
 public:
  virtual ~Backend() = default;

  // Start of the arena of one device, and of the plan's part of the host tier. Constant from Begin
  // to End.
  virtual char* DeviceBase(int32_t device) = 0;
  virtual char* HostBase() = 0;
  // Tag of the plan's own extent on disk, if it has one.
  virtual char* DiskBase() { return nullptr; }

  // Called before the first vertex of a run, while no other run of the launcher is active, on a
  // thread of the launcher's or the caller's choice. An exception fails the run.
  virtual void Begin(RunContext& context) = 0;

  // Runs one vertex to its end on the calling lane's thread; on a launcher with a window, may only
  // put it on a stream of the device's. Called concurrently for vertices of different lanes. False
  // means failure, with the cause in *error. Must not throw.
  virtual bool Execute(int32_t vertex_id, RunContext& context, std::string* error) = 0;

  // Without a window: whether a vertex ends sooner than another thread would wake for it, so that
  // any thread may execute it, beside those of its lane. Constant from Begin to End.
  virtual bool IsQuick(int32_t /*vertex_id*/) const { return false; }

  // With a window: waits for the end of a vertex that Execute put on a stream. Called once for
  // each, lane by lane in the order of Execute, on another thread than Execute. Must not throw.
  virtual bool Await(int32_t /*vertex_id*/, RunContext& /*context*/, std::string* /*error*/) {
    return true;
  }
  // With a window: whether a lane's vertices run one after another in the order of Execute, so that
  // what depends on one may be put behind it before it has ended.
  virtual bool IsInOrder(int32_t /*lane*/) const { return true; }

  // Called after the last vertex, or after Begin threw. Must leave everything fit for the next
  // Begin, also when vertices failed or never ran.
  virtual void End(RunContext& context) = 0;
};

// memcpy in pieces, so that a stopped run does not wait for a long copy. The ranges are disjoint.
void CopyBytes(char* to, const char* from, int64_t bytes, const std::atomic<bool>& abort);

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_LAUNCHER_BACKEND_H_

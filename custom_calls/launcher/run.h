// One run: the execution of one plan on one set of arrays. It has everything mutable, made before
// it is queued, so that nothing is allocated between two vertices. Two runs share nothing mutable
// but the backend. launcher.h has a picture of who counts and queues what.

#ifndef JAXOFFLOAD_LAUNCHER_RUN_H_
#define JAXOFFLOAD_LAUNCHER_RUN_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "launcher/backend.h"
#include "launcher/callback_threads.h"
#include "launcher/inbox.h"
#include "launcher/live_ranges.h"
#include "launcher/policy.h"
#include "launcher/run_options.h"
#include "plan/loaded_plan.h"

namespace jaxoffload {

// What happened in a run. Times are nanoseconds since the run left the queue; -1 for a vertex that
// did not run.
struct RunReport {
  std::vector<int64_t> start_ns;
  std::vector<int64_t> end_ns;
  std::vector<int32_t> lane;
  std::vector<int64_t> lane_busy_ns;
  int64_t wall_ns = 0;
  // When it ended, on the steady clock: tells which of several runs was last.
  int64_t ended_ns = 0;
  // Highest address in use in any device's arena: the most that the run made resident there.
  int64_t peak_device_bytes = 0;
  // Most bytes that were live at once on one device; -1 unless the run was checked.
  int64_t peak_live_bytes = -1;
  int64_t bytes_offloaded = 0;
  int64_t bytes_reloaded = 0;
  int64_t bytes_transferred = 0;
  int64_t bytes_loaded = 0;  // rows among them
  int64_t rows_loaded = 0;   // by number, each once a vertex
  int64_t rows_stored = 0;   // likewise
  int64_t bytes_stored = 0;
  int64_t bytes_found = 0;  // that a run before had left on the devices
  int64_t bytes_left = 0;   // that are left there instead of being offloaded
  int64_t copied_outputs = 0;
  int64_t realigned_bytes = 0;
  bool cancelled = false;
  // By result, whether some vertex had begun to write it: of a run that failed it is then neither
  // what it was nor what it should be.
  std::vector<uint8_t> touched_results;
  // The first vertex that failed, -1 if none did (or the failure came before the first vertex).
  int32_t error_vertex = -1;
  // Empty when the run succeeded.
  std::string error_message;
};

class Run {
 public:
  // `arguments` and `results` are the caller's; they outlive the run. `done`, if any, is called
  // once when the run has ended, on a thread where it may block (callback_threads.h).
  Run(std::shared_ptr<const LoadedPlan> plan, std::shared_ptr<Backend> backend,
      std::vector<char*> arguments, std::vector<char*> results, const RunOptions& options,
      std::function<void(const std::shared_ptr<const RunReport>&)> done = nullptr);

  // Before the run is submitted: what those arguments and results are that are on disk.
  void SetDisk(std::vector<std::shared_ptr<DiskSource>> arguments,
               std::vector<std::shared_ptr<DiskExtent>> results) {
    context_.argument_sources = std::move(arguments);
    context_.result_extents = std::move(results);
  }

  // Before the run is submitted: what is known of the caller's arrays.
  void SetContents(Contents contents) { context_.contents = std::move(contents); }

  // Before the run is submitted: owners of arguments' and results' memory, let go at its end.
  void Hold(std::vector<std::shared_ptr<void>> owners) { owners_ = std::move(owners); }

  // Stops the run soon: vertices that have not started never will. Any thread, any time.
  void Cancel() {
    cancelled_.store(true, std::memory_order_relaxed);
    context_.abort.store(true, std::memory_order_relaxed);
  }

  // Waits until the run has ended or the time is up; true if it has ended.
  bool WaitFor(std::chrono::milliseconds limit) EXCLUDES(mutex_);
  void Wait() EXCLUDES(mutex_);
  // Waits for the end. Where no vertex ends for so long, it calls `tell`, once.
  void WaitTelling(std::chrono::milliseconds limit, const std::function<void()>& tell)
      EXCLUDES(mutex_);

  // After the end.
  std::shared_ptr<const RunReport> report() const EXCLUDES(mutex_);

 private:
  friend class Launcher;

  using Clock = std::chrono::steady_clock;

  int64_t Now() const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start_).count();
  }

  // What the end needs if there is a callback; throws as CallbackThreads::Prepare.
  void PrepareCallback();
  // Before the first vertex. False if the run ends here: it has failed, or has no vertices.
  bool Begin();
  // Resolves the address of every version.
  void Bind();
  // Puts what a lane has taken out of its inbox into its ready queue. On that lane's thread.
  void TakeIn(int32_t lane, int32_t taken) {
    while (taken != Inbox::kEmpty) {
      const int32_t next = next_[taken];  // before Push: the link is free from there on
      ready_[lane].Push(taken);
      taken = next;
    }
  }
  // Whether whoever makes a vertex ready executes it at once, whatever its lane does. Only where
  // the policy leaves it open what runs when. `room` is how many more may do something, not to keep
  // a lane with vertices of its own from them for long.
  bool IsQuick(int32_t vertex_id, int32_t* room) const {
    if (options_.policy != Policy::kWorkConserving || is_windowed_) return false;
    if (context_.is_idle[vertex_id]) return true;
    return *room > 0 && backend_->IsQuick(vertex_id) && (*room)-- > 0;
  }
  // Runs one vertex, or puts it on its stream, unless the run is being stopped.
  void Execute(int32_t vertex_id);
  // With a window: waits for the end of a vertex that was put on its stream.
  void Await(int32_t vertex_id);
  // Whether what depends on a vertex of this lane may be put behind it on the same stream. Not
  // while ranges are watched: there only ends count.
  bool ReleasesAtIssue(int32_t lane) const { return !options_.check && backend_->IsInOrder(lane); }
  void End(int32_t vertex_id);
  void Fail(int32_t vertex_id, std::string message);
  // With an exception's message. Does not throw, even without memory for that.
  void FailWith(int32_t vertex_id, const std::exception& cause);
  void Delay(int32_t vertex_id, uint64_t salt) const;
  // After the last vertex: gives the backend back and writes the report. Neither this nor
  // NotifyDone allocates: they are called on a lane, where nobody could be told of a failure.
  void End();
  void NotifyDone() EXCLUDES(mutex_);
  void NoteTouchedResults(int32_t vertex_id, RunReport* report) const;

  const std::shared_ptr<const LoadedPlan> plan_;
  // Let go before the end is made known, so that the last owner of a backend (and of the client and
  // launcher behind it) is never a lane, which could not join itself.
  std::shared_ptr<Backend> backend_;
  const RunOptions options_;
  // The caller's, and the report for it. What it owns ends on its own thread and never on a lane,
  // so this is let go of before the task is posted.
  struct Callback {
    std::function<void(const std::shared_ptr<const RunReport>&)> function;
    std::shared_ptr<const RunReport> report;
  };
  std::shared_ptr<Callback> callback_;  // null if there is none
  std::unique_ptr<CallbackThreads::Task> callback_task_;
  RunContext context_;
  std::vector<std::shared_ptr<void>> owners_;
  Clock::time_point start_;

  // Unmet dependencies of each vertex. Whoever takes one to zero queues the vertex. acq_rel: the
  // last decrement sees what every earlier one published, which is what the vertex will read.
  std::unique_ptr<std::atomic<int32_t>[]> unmet_;
  // Links of the lanes' inboxes. Written by the pusher, published by the push.
  std::vector<int32_t> next_;
  // Links of vertices that were put on streams, likewise.
  std::vector<int32_t> next_issued_;
  // One for each lane; only that lane's thread touches it.
  std::vector<ReadyQueue> ready_;
  // Vertices that have not completed, and one more until all sources have been queued. acq_rel: the
  // last one sees the whole run.
  std::atomic<int32_t> pending_;
  std::vector<int64_t> start_ns_;
  std::vector<int64_t> end_ns_;
  bool is_windowed_ = false;
  std::atomic<int32_t> num_ended_{0};  // vertices
  std::vector<int64_t> lane_end_ns_;   // with a window: the last end on each lane
  std::unique_ptr<LiveRanges> live_ranges_;

  std::atomic<bool> cancelled_{false};
  // Whoever changes it from false writes error_*; readers come after the last completion.
  std::atomic<bool> failed_{false};
  int32_t error_vertex_ = -1;
  std::string error_message_;

  // The lane whose vertices the submitter executes, -1 if none, and what it takes them from until
  // the run has ended.
  int32_t helped_lane_ = -1;
  Inbox helped_;
  bool is_left_ = false;  // the lane is to do so from here on; under the launcher's mutex

  std::shared_ptr<Run> next_ended_;  // the launcher's: runs that ended without a vertex

  mutable Mutex mutex_;
  CondVar ended_;
  bool done_ GUARDED_BY(mutex_) = false;
  // Null until the end, when it becomes what `draft_` was.
  std::shared_ptr<const RunReport> report_ GUARDED_BY(mutex_);
  std::shared_ptr<RunReport> draft_;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_LAUNCHER_RUN_H_

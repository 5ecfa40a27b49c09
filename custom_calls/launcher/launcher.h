// The event-driven launcher: lanes, and the queue of runs.
//
// A vertex becomes ready when its last dependency completes, is queued on its lane by the thread
// that completed it, and starts when that lane is free (TURNIP, section 7 and appendix A; DISCO's
// work-conserving rule). There is no master thread: completions drive the loop on the lanes' own
// threads. Counter protocol and draining after a failure follow XLA's thunk_executor.
//
// Runs are executed one at a time, in the order of submission, because the plans of one client
// share its arenas: that keeps the promise that a plan's budget is all the memory in use. Submit
// never blocks.

#ifndef JAXOFFLOAD_LAUNCHER_LAUNCHER_H_
#define JAXOFFLOAD_LAUNCHER_LAUNCHER_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "launcher/inbox.h"
#include "launcher/run.h"

namespace jaxoffload {

class Launcher {
 public:
  explicit Launcher(int32_t num_lanes);
  // As Shutdown.
  ~Launcher();

  // Queues a run; it starts at once when nothing else is running. Throws std::runtime_error after
  // Shutdown, and in a forked child, which has no lanes.
  void Submit(std::shared_ptr<Run> run) EXCLUDES(mutex_);

  // Waits for the queued runs to end and joins the lanes. Idempotent.
  void Shutdown() EXCLUDES(mutex_);

 private:
  struct Lane {
    Inbox inbox;
    std::thread thread;
  };

  void StartLanes() REQUIRES(mutex_);
  void LaneMain(int32_t lane);
  // Runs what is ready on a lane until nothing is. `taken` is a list out of the inbox.
  void Work(int32_t lane, Run& run, int32_t taken);
  // After a vertex: makes its successors ready. True if this lane has more of the run to do; if
  // not, the run may be gone.
  bool Complete(int32_t lane, Run& run, int32_t vertex_id);
  void Start(std::shared_ptr<Run> run);
  void Finish();
  std::shared_ptr<Run> EndActiveAndPop(const std::shared_ptr<Run>& ended);

  const pid_t pid_;
  std::vector<Lane> lanes_;
  // The run whose vertices are in the inboxes. Relaxed: a lane reads it only after it has taken a
  // vertex of that run, and the push published it.
  std::atomic<Run*> active_run_{nullptr};

  Mutex mutex_;
  CondVar idle_;
  std::shared_ptr<Run> active_ GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<Run>> queue_ GUARDED_BY(mutex_);
  bool started_ GUARDED_BY(mutex_) = false;
  bool stopped_ GUARDED_BY(mutex_) = false;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_LAUNCHER_LAUNCHER_H_

// The event-driven launcher: lanes, and the queue of runs.
//
// A vertex becomes ready when its last dependency completes, is queued on its lane by the thread
// that completed it, and starts when that lane is free (TURNIP, section 7 and appendix A; DISCO's
// work-conserving rule). There is no master thread: completions drive the loop on the lanes' own
// threads. Counter protocol and draining after a failure follow XLA's thunk_executor.
//
// **Window.** Where vertices run on streams of a device, Execute only puts them there, and a second
// thread a lane waits for their ends, in order. Up to `window` vertices of a lane may be under way,
// so that the device never waits for the host; which one is next is decided as late as that allows.
// A vertex of which nothing is missing but vertices that are ahead of it on the same stream is put
// behind them at once.
//
// Runs are executed one at a time, in the order of submission, because the plans of one client
// share its arenas: that keeps the promise that a plan's budget is all the memory in use. Submit
// never blocks.

#ifndef JAXOFFLOAD_LAUNCHER_LAUNCHER_H_
#define JAXOFFLOAD_LAUNCHER_LAUNCHER_H_

#include <semaphore.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "base/process.h"
#include "launcher/inbox.h"
#include "launcher/run.h"

namespace jaxoffload {

class Launcher {
 public:
  // `window` 0: Execute runs vertices to their ends, and nothing has to be waited for.
  explicit Launcher(int32_t num_lanes, int32_t window = 0);
  // As Shutdown.
  ~Launcher();

  // Queues a run; it starts at once when nothing else is running. Throws std::runtime_error after
  // Shutdown, in a forked child, which has no lanes, and where the system gives no thread for one;
  // the next call tries again.
  void Submit(std::shared_ptr<Run> run) EXCLUDES(mutex_);

  // Waits for the queued runs to end and joins the lanes. Idempotent.
  void Shutdown() EXCLUDES(mutex_);

 private:
  struct Lane {
    Lane() = default;
    ~Lane();
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;

    Inbox inbox;
    std::thread thread;
    // With a window: vertices that were put on the stream, and who waits for their ends.
    Inbox issued;
    std::thread awaiter;
    sem_t room;  // how many more may be put on the stream
    bool has_room = false;
  };

  void StartLanes() REQUIRES(mutex_);
  // Ends the lanes' threads, those of them that there are. Not under the mutex unless they have
  // nothing to do.
  void JoinLanes();
  void LaneMain(int32_t lane);
  // Runs what is ready on a lane until nothing is. `taken` is a list out of the inbox.
  void Work(int32_t lane, Run& run, int32_t taken);
  // The same with a window: puts them on the stream.
  void Issue(int32_t lane, Run& run, int32_t taken);
  void AwaiterMain(int32_t lane);
  // Counts down what a vertex held back on its own lane (is_own), or on the others.
  void Release(int32_t lane, Run& run, int32_t vertex_id, bool own, bool others);
  // After a vertex: makes its successors ready. True if this lane has more of the run to do; if
  // not, the run may be gone.
  bool Complete(int32_t lane, Run& run, int32_t vertex_id);
  void Start(std::shared_ptr<Run> run);
  void Finish();
  std::shared_ptr<Run> EndActiveAndPop(const std::shared_ptr<Run>& ended);

  const HomeProcess home_;
  const int32_t window_;
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

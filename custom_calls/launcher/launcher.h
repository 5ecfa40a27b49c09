// The event-driven launcher: lanes, and the queue of runs.
//
// Takes runs (run.h) and carries each out on its backend; when it returns from the last vertex, the
// run has its report. Nothing is thrown on a lane: a failure is recorded in the run, whose other
// vertices are then counted off without being executed.
//
// A vertex becomes ready when its last dependency completes, is queued on its lane by the thread
// that completed it, and starts when that lane is free (TURNIP, section 7 and appendix A; DISCO's
// work-conserving rule). There is no master thread. Counter protocol and draining after a failure
// follow XLA's thunk_executor.
//
// What a thread of lane A does after vertex v, for each successor s:
//
//   A: Execute(v)
//   A: unmet[s] -= 1      acq_rel: who takes it to 0 sees all that s will read
//        s on lane A      A's ready queue: plain memory, only A's thread touches it
//        s on lane B      B's inbox: push, release ----> B: take all, acquire; into B's ready queue
//   A: pending -= 1       acq_rel: who takes it to 0 sees the whole run, ends it, starts the next
//
// After `pending -= 1` the run may be gone, unless the lane still has a vertex of it ready.
//
// A vertex that ends sooner than a thread wakes (a copy of few bytes, or of what is there already)
// is not queued: who made it ready executes it, and goes on with its successors.
//
// **Window.** Where vertices run on streams of a device, a lane has two threads. Up to `window`
// vertices of a lane may be under way, so that the device never waits for the host; which one is
// next is decided as late as that allows.
//
//   lane:    room -= 1, or wait; Execute(v) puts v on its stream; `issued`: push, release ----+
//   awaiter: take all, acquire <--------------------------------------------------------------+
//            Await(v); room += 1; then as above, by inboxes alone
//
// If the lane's stream keeps order, the lane itself counts down the successors on its own lane, so
// that they go on the stream behind v before v has ended; the awaiter counts down the others.
//
// Runs are executed one at a time, in the order of submission, because the plans of one client
// share its arenas: so a plan's budget is all the memory in use. Submit never blocks.

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
  explicit Launcher(Lanes lanes, int32_t window = 0);
  // As Shutdown.
  ~Launcher();

  // Queues a run; it starts at once when nothing else is running. Throws std::runtime_error after
  // Shutdown, in a forked child, which has no lanes, and where the system gives no thread for one;
  // the next call tries again.
  void Submit(std::shared_ptr<Run> run) EXCLUDES(mutex_);

  // The same by a thread that waits for the end in any case: if nothing else is running, it
  // executes the vertices of the first compute lane itself, and no other thread has to be woken for
  // them. Returns when the run has ended; when it has helped for so long, and the lane goes on; or
  // at once, if something else is running.
  void SubmitAndHelp(std::shared_ptr<Run> run,
                     Patience::Duration limit = std::chrono::milliseconds(50)) EXCLUDES(mutex_);

  // Waits for the queued runs to end and joins the lanes. Idempotent.
  void Shutdown() EXCLUDES(mutex_);

 private:
  struct Lane {
    Lane() = default;
    ~Lane();
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;

    Inbox inbox;
    Patience patience;  // the thread's
    std::thread thread;
    // With a window: vertices that were put on the stream, and who waits for their ends.
    Inbox issued;
    Patience awaiters_patience;
    std::thread awaiter;
    sem_t room;  // how many more may be put on the stream
    bool has_room = false;
  };

  enum class Successors { kOwnLane, kOtherLanes, kAll };

  // A list through the run's links of what a thread is to execute at once.
  struct Quick {
    int32_t first = Inbox::kEmpty;
    int32_t room = 8;  // see Run::IsQuick
  };

  // Whether it is to be started now.
  bool Enqueue(const std::shared_ptr<Run>& run) EXCLUDES(mutex_);
  Inbox& InboxOf(Run& run, int32_t lane) {
    return lane == run.helped_lane_ ? run.helped_ : lanes_[lane].inbox;
  }
  void StartLanes() REQUIRES(mutex_);
  // Ends the lanes' threads, those of them that there are. Not under the mutex unless they have
  // nothing to do.
  void JoinLanes();
  void LaneMain(int32_t lane) EXCLUDES(mutex_);
  // Runs what is ready on a lane until nothing is. `taken` is a list out of the inbox. False: the
  // time is up, something is ready, and the run has not ended.
  bool Work(int32_t lane, Run& run, int32_t taken, Patience& patience,
            Patience::Clock::time_point until = Inbox::kNever);
  // Works for a run in place of the thread that submitted it and helps no more, until it has ended.
  void TakeOver(int32_t lane) EXCLUDES(mutex_);
  // The same with a window: puts them on the stream.
  void Issue(int32_t lane, Run& run, int32_t taken);
  void AwaiterMain(int32_t lane);
  // Counts down the successors of a vertex, and queues, or executes, those that wait for nothing
  // more. `ready` is the lane's queue on the lane's own thread, null on any other.
  void Release(int32_t lane, Run& run, int32_t vertex_id, Successors which, ReadyQueue* ready);
  // The same, but for what it executes: that it adds to `quick`.
  void Queue(int32_t lane, Run& run, int32_t vertex_id, Successors which, ReadyQueue* ready,
             Quick& quick);
  void QueueOne(int32_t lane, Run& run, int32_t vertex_id, ReadyQueue* ready, Quick& quick);
  // The caller holds a count of `pending`, so that the run does not end here.
  void ExecuteQuick(int32_t lane, Run& run, ReadyQueue* ready, Quick& quick);
  // A vertex is through with all that it does. After the last one this ends the run.
  void CountCompletion(Run& run);
  void Start(std::shared_ptr<Run> run);
  void Finish();
  std::shared_ptr<Run> EndActiveAndPop(const std::shared_ptr<Run>& ended);

  const HomeProcess home_;
  const Lanes layout_;
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

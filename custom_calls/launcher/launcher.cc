#include "launcher/launcher.h"

#include <pthread.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "base/thread.h"

namespace jaxoffload {
namespace {

constexpr int32_t kNoLane = -1;

}  // namespace

Launcher::Launcher(Lanes lanes, int32_t window)
    : layout_(lanes), window_(window), lanes_(lanes.size()) {
  for (Lane& lane : lanes_) {
    if (window_ > 0) lane.has_room = sem_init(&lane.room, 0, static_cast<unsigned>(window_)) == 0;
  }
}

Launcher::Lane::~Lane() {
  if (has_room) sem_destroy(&room);
}

Launcher::~Launcher() { Shutdown(); }

void Launcher::StartLanes() {
  if (started_) return;
  try {
    for (int32_t lane = 0; lane < static_cast<int32_t>(lanes_.size()); ++lane) {
      lanes_[lane].thread = StartThread([this, lane] { LaneMain(lane); });
      const std::string name = layout_.ThreadName(lane).substr(0, 15);
      pthread_setname_np(lanes_[lane].thread.native_handle(), name.c_str());
      if (window_ > 0) lanes_[lane].awaiter = StartThread([this, lane] { AwaiterMain(lane); });
    }
  } catch (...) {
    JoinLanes();
    for (Lane& lane : lanes_) {
      lane.inbox.Restart();
      lane.issued.Restart();
    }
    throw;
  }
  started_ = true;
}

void Launcher::JoinLanes() {
  for (Lane& lane : lanes_) lane.inbox.Stop();
  for (Lane& lane : lanes_) {
    if (lane.thread.joinable()) lane.thread.join();
  }
  for (Lane& lane : lanes_) lane.issued.Stop();
  for (Lane& lane : lanes_) {
    if (lane.awaiter.joinable()) lane.awaiter.join();
  }
}

bool Launcher::Enqueue(const std::shared_ptr<Run>& run) {
  home_.CheckNotForked();
  run->PrepareCallback();
  MutexLock lock(mutex_);
  if (stopped_) throw std::runtime_error("the launcher has been shut down");
  StartLanes();
  if (active_) {
    queue_.push_back(run);
    return false;
  }
  active_ = run;
  return true;
}

void Launcher::Submit(std::shared_ptr<Run> run) {
  if (Enqueue(run)) Start(std::move(run));
}

void Launcher::SubmitAndHelp(std::shared_ptr<Run> run, Patience::Duration limit) {
  if (!Enqueue(run)) return;
  if (window_ > 0) {  // vertices are put on streams, and not executed
    Start(std::move(run));
    return;
  }
  thread_local Patience patience;
  const Patience::Clock::time_point until = Patience::Clock::now() + limit;
  const int32_t lane = layout_.Of(Kind::kKernel, 0);
  run->helped_lane_ = lane;
  Start(run);
  for (;;) {
    const int32_t taken = run->helped_.Take(patience, until);
    if (taken == Inbox::kStop) return;
    if (taken == Inbox::kEmpty || !Work(lane, *run, taken, patience, until)) break;
  }
  MutexLock lock(mutex_);
  if (active_ != run) return;
  // While it is the active one nothing else is in the lane's own inbox.
  run->is_left_ = true;
  lanes_[lane].inbox.Call();
}

void Launcher::TakeOver(int32_t lane) {
  std::shared_ptr<Run> run;
  {
    MutexLock lock(mutex_);
    if (active_ == nullptr || active_->helped_lane_ != lane || !active_->is_left_) return;
    run = active_;
  }
  Patience& patience = lanes_[lane].patience;
  if (!run->ready_[lane].empty()) Work(lane, *run, Inbox::kEmpty, patience);
  for (;;) {
    const int32_t taken = run->helped_.Take(patience);
    if (taken == Inbox::kStop) return;
    Work(lane, *run, taken, patience);
  }
}

void Launcher::Shutdown() {
  if (home_.IsForked()) {
    // The threads are not there, and their handles fit for nothing, not even to be let go of. (Nor
    // is the mutex, which one of them may have held.)
    for (Lane& lane : lanes_) {
      for (std::thread* const handle : {&lane.thread, &lane.awaiter}) {
        if (handle->joinable()) new std::thread(std::move(*handle));
      }
    }
    return;
  }
  {
    MutexLock lock(mutex_);
    stopped_ = true;
    while (active_) idle_.Wait(mutex_);
    if (!started_) return;
    started_ = false;
  }
  JoinLanes();
}

// Runs that end at once (empty, failed in Begin, or of nothing but what is quick) end here, in a
// loop and not by recursion. `done` is told only when the next run is on its way.
void Launcher::Start(std::shared_ptr<Run> run) {
  // A list through the runs themselves, for this may be a lane, where no allocation may fail.
  std::shared_ptr<Run> ended;
  Run* last = nullptr;
  while (run) {
    run->is_windowed_ = window_ > 0;
    if (run->Begin()) {
      active_run_.store(run.get(), std::memory_order_relaxed);
      Quick quick;
      for (int32_t vertex_id : run->plan_->sources()) {
        QueueOne(kNoLane, *run, vertex_id, nullptr, quick);
      }
      ExecuteQuick(kNoLane, *run, nullptr, quick);
      if (run->pending_.fetch_sub(1, std::memory_order_acq_rel) != 1) break;
    }
    std::shared_ptr<Run> next = EndActiveAndPop(run);
    Run* const this_one = run.get();
    (last == nullptr ? ended : last->next_ended_) = std::move(run);
    last = this_one;
    run = std::move(next);
  }
  while (ended) {
    ended->NotifyDone();
    ended = std::move(ended->next_ended_);
  }
}

std::shared_ptr<Run> Launcher::EndActiveAndPop(const std::shared_ptr<Run>& ended) {
  ended->End();
  MutexLock lock(mutex_);
  active_ = nullptr;
  if (!queue_.empty()) {
    active_ = std::move(queue_.front());
    queue_.pop_front();
  } else {
    idle_.NotifyAll();
  }
  return active_;
}

void Launcher::Finish() {
  std::shared_ptr<Run> ended;
  {
    MutexLock lock(mutex_);
    ended = active_;
  }
  Start(EndActiveAndPop(ended));
  ended->NotifyDone();
}

void Launcher::LaneMain(int32_t lane) {
  for (;;) {
    const int32_t taken = lanes_[lane].inbox.Take(lanes_[lane].patience);
    if (taken == Inbox::kStop) return;
    if (taken == Inbox::kCalled) {
      TakeOver(lane);
      continue;
    }
    Run& run = *active_run_.load(std::memory_order_relaxed);
    if (window_ > 0) {
      Issue(lane, run, taken);
    } else {
      Work(lane, run, taken, lanes_[lane].patience);
    }
  }
}

bool Launcher::Work(int32_t lane, Run& run, int32_t taken, Patience& patience,
                    Patience::Clock::time_point until) {
  ReadyQueue& ready = run.ready_[lane];
  Inbox& inbox = InboxOf(run, lane);
  for (;;) {
    run.TakeIn(lane, taken);
    const int32_t vertex_id = ready.Pop();
    if (vertex_id < 0) {
      // With the fixed policy something is ready but not next. The run cannot end meanwhile.
      taken = inbox.Take(patience, until);
      if (taken == Inbox::kEmpty) return false;
      continue;
    }
    run.Execute(vertex_id);
    Release(lane, run, vertex_id, Successors::kAll, &ready);
    // Read before the vertex is counted: after that the run may end, and go away, on another
    // thread, unless this lane still holds a vertex of it.
    const bool more = !ready.empty();
    CountCompletion(run);
    if (!more) return true;
    if (until != Inbox::kNever && Patience::Clock::now() >= until) return false;
    taken = inbox.TryTake();
  }
}

void Launcher::Issue(int32_t lane_id, Run& run, int32_t taken) {
  Lane& lane = lanes_[lane_id];
  ReadyQueue& ready = run.ready_[lane_id];
  run.TakeIn(lane_id, taken);
  for (bool more = true; more;) {
    while (sem_wait(&lane.room) != 0) {  // a signal
    }
    // What became ready while there was no room may be more critical. The run cannot end meanwhile,
    // for something is ready.
    run.TakeIn(lane_id, lane.inbox.TryTake());
    const int32_t vertex_id = ready.Pop();
    if (vertex_id < 0) {
      // With the fixed policy something is ready but not next.
      sem_post(&lane.room);
      run.TakeIn(lane_id, lane.inbox.Take(lane.patience));
      continue;
    }
    run.Execute(vertex_id);
    if (run.ReleasesAtIssue(lane_id)) {
      Release(lane_id, run, vertex_id, Successors::kOwnLane, &ready);
    }
    more = !ready.empty();  // read before the push: after it, the run may end
    lane.issued.Push(vertex_id, run.next_issued_.data());
  }
}

void Launcher::AwaiterMain(int32_t lane_id) {
  Lane& lane = lanes_[lane_id];
  for (;;) {
    int32_t taken = lane.issued.Take(lane.awaiters_patience);
    if (taken == Inbox::kStop) return;
    Run& run = *active_run_.load(std::memory_order_relaxed);
    // The inbox is a stack: the last is the one that was issued first.
    int32_t issued = Inbox::kEmpty;
    while (taken != Inbox::kEmpty) {
      const int32_t next = run.next_issued_[taken];
      run.next_issued_[taken] = issued;
      issued = taken;
      taken = next;
    }
    while (issued != Inbox::kEmpty) {
      const int32_t vertex_id = issued;
      issued = run.next_issued_[vertex_id];  // before the end, after which the run may be gone
      run.Await(vertex_id);
      sem_post(&lane.room);
      const bool own_are_released = run.ReleasesAtIssue(lane_id);
      Release(lane_id, run, vertex_id,
              own_are_released ? Successors::kOtherLanes : Successors::kAll, nullptr);
      CountCompletion(run);
    }
  }
}

void Launcher::Release(int32_t lane, Run& run, int32_t vertex_id, Successors which,
                       ReadyQueue* ready) {
  Quick quick;
  Queue(lane, run, vertex_id, which, ready, quick);
  ExecuteQuick(lane, run, ready, quick);
}

void Launcher::ExecuteQuick(int32_t lane, Run& run, ReadyQueue* ready, Quick& quick) {
  while (quick.first != Inbox::kEmpty) {
    const int32_t vertex_id = quick.first;
    quick.first = run.next_[vertex_id];
    run.Execute(vertex_id);
    Queue(lane, run, vertex_id, Successors::kAll, ready, quick);
    run.pending_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

void Launcher::Queue(int32_t lane, Run& run, int32_t vertex_id, Successors which, ReadyQueue* ready,
                     Quick& quick) {
  const LoadedPlan& plan = *run.plan_;
  const int32_t* const end = plan.successors_end(vertex_id);
  for (const int32_t* s = plan.successors_begin(vertex_id); s != end; ++s) {
    const bool is_own = plan.lane(*s) == lane;
    if (which != Successors::kAll && is_own != (which == Successors::kOwnLane)) continue;
    if (run.unmet_[*s].fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
    QueueOne(lane, run, *s, ready, quick);
  }
}

void Launcher::QueueOne(int32_t lane, Run& run, int32_t vertex_id, ReadyQueue* ready,
                        Quick& quick) {
  const int32_t target = run.plan_->lane(vertex_id);
  if (run.IsQuick(vertex_id, &quick.room)) {
    run.next_[vertex_id] = std::exchange(quick.first, vertex_id);
  } else if (target == lane && ready != nullptr) {
    ready->Push(vertex_id);
  } else {
    InboxOf(run, target).Push(vertex_id, run.next_.data());
  }
}

void Launcher::CountCompletion(Run& run) {
  if (run.pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) Finish();
}

}  // namespace jaxoffload

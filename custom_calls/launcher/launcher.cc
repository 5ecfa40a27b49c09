#include "launcher/launcher.h"

#include <pthread.h>
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace jaxoffload {

Launcher::Launcher(int32_t num_lanes) : pid_(getpid()), lanes_(num_lanes) {}

Launcher::~Launcher() { Shutdown(); }

void Launcher::StartLanes() {
  if (started_) return;
  started_ = true;
  static const char* const kNames[kLanesPerDevice] = {"compute", "to-dev", "from-dev"};
  for (int32_t lane = 0; lane < static_cast<int32_t>(lanes_.size()); ++lane) {
    lanes_[lane].thread = std::thread([this, lane] { LaneMain(lane); });
    const int32_t disk_lane = lane - (static_cast<int32_t>(lanes_.size()) - kDiskLanes);
    std::string name = "jo-";
    if (disk_lane >= 0) {
      name += disk_lane == 0 ? "disk-load" : "disk-store";
    } else {
      name += kNames[lane % kLanesPerDevice];
      name += "-" + std::to_string(lane / kLanesPerDevice);
    }
    pthread_setname_np(lanes_[lane].thread.native_handle(), name.substr(0, 15).c_str());
  }
}

void Launcher::Submit(std::shared_ptr<Run> run) {
  if (getpid() != pid_) {
    throw std::runtime_error(
        "jaxoffload was used before this process was forked, and its threads do not survive a "
        "fork. Start processes with multiprocessing's 'spawn' or 'forkserver' method.");
  }
  {
    MutexLock lock(mutex_);
    if (stopped_) throw std::runtime_error("the launcher has been shut down");
    StartLanes();
    if (active_) {
      queue_.push_back(std::move(run));
      return;
    }
    active_ = run;
  }
  Start(std::move(run));
}

void Launcher::Shutdown() {
  {
    MutexLock lock(mutex_);
    if (getpid() != pid_) {
      // A forked child: the threads are not there. Let go of their handles.
      for (Lane& lane : lanes_) {
        if (lane.thread.joinable()) lane.thread.detach();
      }
      return;
    }
    stopped_ = true;
    while (active_) idle_.Wait(mutex_);
    if (!started_) return;
    started_ = false;
  }
  for (Lane& lane : lanes_) lane.inbox.Stop();
  for (Lane& lane : lanes_) lane.thread.join();
}

// Runs that end without a vertex (empty or failed in Begin) end here, in a loop and not by
// recursion. `done` is told only when the next run is on its way.
void Launcher::Start(std::shared_ptr<Run> run) {
  std::vector<std::shared_ptr<Run>> ended;
  while (run) {
    if (run->Begin()) {
      active_run_.store(run.get(), std::memory_order_relaxed);
      // The run cannot end before the last source is pushed, and `run` keeps it alive after that.
      for (int32_t vertex_id : run->plan_->sources()) {
        lanes_[run->plan_->lane(vertex_id)].inbox.Push(vertex_id, run->next_.data());
      }
      break;
    }
    ended.push_back(run);
    run = EndActiveAndPop(run);
  }
  for (const std::shared_ptr<Run>& each : ended) each->NotifyDone();
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
    const int32_t taken = lanes_[lane].inbox.Take();
    if (taken == Inbox::kStop) return;
    Work(lane, *active_run_.load(std::memory_order_relaxed), taken);
  }
}

void Launcher::Work(int32_t lane, Run& run, int32_t taken) {
  ReadyQueue& ready = run.ready_[lane];
  Inbox& inbox = lanes_[lane].inbox;
  for (;;) {
    for (int32_t v = taken; v != Inbox::kEmpty;) {
      const int32_t next = run.next_[v];  // before Push: the slot is free from there on
      ready.Push(v);
      v = next;
    }
    const int32_t vertex_id = ready.Pop();
    if (vertex_id < 0) {
      // With the fixed policy something is ready but not next. The run cannot end meanwhile.
      taken = inbox.Take();
      continue;
    }
    run.Execute(vertex_id);
    if (!Complete(lane, run, vertex_id)) return;
    taken = inbox.TryTake();
  }
}

bool Launcher::Complete(int32_t lane, Run& run, int32_t vertex_id) {
  const LoadedPlan& plan = *run.plan_;
  ReadyQueue& ready = run.ready_[lane];
  const int32_t* const end = plan.successors_end(vertex_id);
  for (const int32_t* s = plan.successors_begin(vertex_id); s != end; ++s) {
    if (run.unmet_[*s].fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
    if (plan.lane(*s) == lane) {
      ready.Push(*s);
    } else {
      lanes_[plan.lane(*s)].inbox.Push(*s, run.next_.data());
    }
  }
  // Read before the decrement: after it, the run may end and go away on another thread, unless
  // this lane still holds a vertex of it.
  const bool more = !ready.empty();
  if (run.pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    Finish();
    return false;
  }
  return more;
}

}  // namespace jaxoffload

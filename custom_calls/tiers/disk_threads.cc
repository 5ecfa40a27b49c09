#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "tiers/disk_engine.h"

namespace jaxoffload {

bool Advance(const DiskRequest& request, int64_t answer, DiskProgress& progress,
             std::string* error) {
  constexpr int kMostTries = 1000;
  const int64_t least = request.least_bytes > 0 ? request.least_bytes : request.bytes;
  if (answer > 0) {
    progress.done += answer;
    return progress.done >= least;
  }
  if ((answer == -EINTR || answer == -EAGAIN) && ++progress.tries < kMostTries) return false;
  const std::string what = std::string(request.is_write ? "writing " : "reading ") +
                           std::to_string(request.bytes) + " bytes at offset " +
                           std::to_string(request.offset) + ": ";
  if (answer == 0) {
    *error = what + (request.is_write ? "the disk took nothing" : "the file ends before that");
  } else {
    *error = what + std::strerror(static_cast<int>(-answer));
  }
  return false;
}

ssize_t DiskCalls::Read(int fd, char* address, int64_t bytes, int64_t offset) {
  return pread(fd, address, bytes, offset);
}

ssize_t DiskCalls::Write(int fd, const char* address, int64_t bytes, int64_t offset) {
  return pwrite(fd, address, bytes, offset);
}

namespace {

// The requests of one Transfer that threads have finished. On the caller's stack: it outlives its
// jobs because Transfer waits for them.
struct Batch {
  Mutex mutex;
  CondVar changed;
  std::deque<std::pair<size_t, std::string>> finished GUARDED_BY(mutex);
};

struct Job {
  const DiskRequest* request;
  size_t position;
  Batch* batch;
};

class ThreadEngine : public DiskEngine {
 public:
  ThreadEngine(int num_threads, std::shared_ptr<DiskCalls> calls)
      : calls_(calls ? std::move(calls) : std::make_shared<DiskCalls>()) {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Work(); });
  }

  ~ThreadEngine() override {
    {
      MutexLock lock(mutex_);
      stopped_ = true;
      changed_.NotifyAll();
    }
    for (std::thread& thread : threads_) thread.join();
  }

  const char* name() const override { return "threads"; }

  bool Transfer(const std::vector<DiskRequest>& requests, const std::atomic<bool>& abort,
                const Step& before, const Step& after, std::string* error) override {
    Batch batch;
    size_t started = 0;
    size_t in_flight = 0;
    bool ok = true;
    const size_t most = 2 * threads_.size();
    while (in_flight > 0 || (ok && started < requests.size())) {
      if (abort.load(std::memory_order_relaxed) && ok) {
        ok = false;
        *error = "the run was stopped";
      }
      if (ok && started < requests.size() && in_flight < most) {
        ok = before(started, error);
        if (ok) {
          Push({&requests[started], started, &batch});
          ++started;
          ++in_flight;
        }
        continue;
      }
      std::pair<size_t, std::string> finished;
      {
        MutexLock lock(batch.mutex);
        while (batch.finished.empty()) batch.changed.Wait(batch.mutex);
        finished = std::move(batch.finished.front());
        batch.finished.pop_front();
      }
      --in_flight;
      if (!ok) continue;
      if (!finished.second.empty()) {
        ok = false;
        *error = finished.second;
      } else {
        ok = after(finished.first, error);
      }
    }
    return ok;
  }

 private:
  void Push(const Job& job) {
    MutexLock lock(mutex_);
    jobs_.push_back(job);
    changed_.NotifyOne();
  }

  void Work() {
    for (;;) {
      Job job;
      {
        MutexLock lock(mutex_);
        while (jobs_.empty() && !stopped_) changed_.Wait(mutex_);
        if (jobs_.empty()) return;
        job = jobs_.front();
        jobs_.pop_front();
      }
      std::string error;
      DiskProgress progress;
      for (bool complete = false; !complete && error.empty();) {
        const DiskRequest& r = *job.request;
        char* const address = r.address + progress.done;
        const int64_t bytes = r.bytes - progress.done;
        const int64_t offset = r.offset + progress.done;
        const ssize_t answer = r.is_write ? calls_->Write(r.fd, address, bytes, offset)
                                          : calls_->Read(r.fd, address, bytes, offset);
        complete = Advance(r, answer < 0 ? -errno : answer, progress, &error);
      }
      // Under the lock: the batch may be gone as soon as its owner has seen this.
      MutexLock lock(job.batch->mutex);
      job.batch->finished.emplace_back(job.position, std::move(error));
      job.batch->changed.NotifyOne();
    }
  }

  const std::shared_ptr<DiskCalls> calls_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<Job> jobs_ GUARDED_BY(mutex_);
  bool stopped_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<DiskEngine> NewThreadEngine(int num_threads, std::shared_ptr<DiskCalls> calls) {
  return std::make_unique<ThreadEngine>(num_threads, std::move(calls));
}

}  // namespace jaxoffload

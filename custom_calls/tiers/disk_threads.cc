#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "base/process.h"
#include "base/thread.h"
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

struct Batch;

struct Job {
  const DiskRequest* request = nullptr;
  Batch* batch = nullptr;
  std::string error;
  Job* next = nullptr;
};

// First in, first out; the jobs are their owner's, so that nothing is allocated on the way.
class JobList {
 public:
  bool empty() const { return first_ == nullptr; }
  void Push(Job* job) {
    job->next = nullptr;
    (first_ == nullptr ? first_ : last_->next) = job;
    last_ = job;
  }
  Job* Pop() {
    Job* const job = first_;
    first_ = job->next;
    return job;
  }

 private:
  Job* first_ = nullptr;
  Job* last_ = nullptr;
};

// The requests of one Transfer. On the caller's stack: it outlives its jobs because Transfer waits
// for them.
struct Batch {
  explicit Batch(size_t count) : jobs(count) {}
  std::vector<Job> jobs;
  Mutex mutex;
  CondVar changed;
  JobList finished GUARDED_BY(mutex);
};

// Carries out one request; its error, or nothing.
std::string Carry(DiskCalls& calls, const DiskRequest& r) {
  std::string error;
  DiskProgress progress;
  for (bool complete = false; !complete && error.empty();) {
    char* const address = r.address + progress.done;
    const int64_t bytes = r.bytes - progress.done;
    const int64_t offset = r.offset + progress.done;
    const ssize_t answer = r.is_write ? calls.Write(r.fd, address, bytes, offset)
                                      : calls.Read(r.fd, address, bytes, offset);
    complete = Advance(r, answer < 0 ? -errno : answer, progress, &error);
  }
  return error;
}

class Pool {
 public:
  explicit Pool(std::shared_ptr<DiskCalls> calls) : calls_(std::move(calls)) {}

  ~Pool() {
    {
      MutexLock lock(mutex_);
      stopped_ = true;
      changed_.NotifyAll();
    }
    for (std::thread& thread : threads_) thread.join();
  }

  // Goes on with fewer where the system gives no more. Throws std::runtime_error: none at all.
  void Start(int num_threads) {
    threads_.reserve(num_threads);
    try {
      while (static_cast<int>(threads_.size()) < num_threads) {
        threads_.push_back(StartThread([this] { Work(); }));
      }
    } catch (const std::runtime_error&) {
      if (threads_.empty()) throw;
    }
  }

  size_t num_threads() const { return threads_.size(); }

  void Push(Job* job) {
    MutexLock lock(mutex_);
    jobs_.Push(job);
    changed_.NotifyOne();
  }

 private:
  void Work() {
    for (;;) {
      Job* job;
      {
        MutexLock lock(mutex_);
        while (jobs_.empty() && !stopped_) changed_.Wait(mutex_);
        if (jobs_.empty()) return;
        job = jobs_.Pop();
      }
      job->error = Carry(*calls_, *job->request);
      // Under the lock: the batch may be gone as soon as its owner has seen this.
      MutexLock lock(job->batch->mutex);
      job->batch->finished.Push(job);
      job->batch->changed.NotifyOne();
    }
  }

  const std::shared_ptr<DiskCalls> calls_;
  Mutex mutex_;
  CondVar changed_;
  JobList jobs_ GUARDED_BY(mutex_);
  bool stopped_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

class ThreadEngine : public DiskEngine {
 public:
  ThreadEngine(int num_threads, std::shared_ptr<DiskCalls> calls)
      : calls_(calls ? std::move(calls) : std::make_shared<DiskCalls>()),
        pool_(std::make_unique<Pool>(calls_)) {
    pool_->Start(num_threads);
  }

  ~ThreadEngine() override {
    // A forked child has no threads to join, and condition variables on which they wait for ever.
    if (home_.IsForked()) static_cast<void>(pool_.release());
  }

  const char* name() const override { return "threads"; }

  bool Transfer(const std::vector<DiskRequest>& requests, const std::atomic<bool>& abort,
                const Step& before, const Step& after, std::string* error) override {
    if (home_.IsForked()) return TransferAlone(requests, abort, before, after, error);
    Batch batch(requests.size());
    size_t started = 0;
    size_t in_flight = 0;
    bool ok = true;
    const size_t most = 2 * pool_->num_threads();
    while (in_flight > 0 || (ok && started < requests.size())) {
      if (ok && abort.load(std::memory_order_relaxed)) {
        ok = false;
        *error = kStopped;
      }
      if (ok && started < requests.size() && in_flight < most) {
        ok = before(started, error);
        if (ok) {
          Job& job = batch.jobs[started];
          job.request = &requests[started];
          job.batch = &batch;
          pool_->Push(&job);
          ++started;
          ++in_flight;
        }
        continue;
      }
      if (in_flight == 0) break;  // stopped, and there is nothing to wait for
      Job* finished;
      {
        MutexLock lock(batch.mutex);
        while (batch.finished.empty()) batch.changed.Wait(batch.mutex);
        finished = batch.finished.Pop();
      }
      --in_flight;
      if (!ok) continue;
      if (!finished->error.empty()) {
        ok = false;
        *error = std::move(finished->error);
      } else {
        ok = after(finished - batch.jobs.data(), error);
      }
    }
    return ok;
  }

 private:
  // On the calling thread, for a forked child, which has no others.
  bool TransferAlone(const std::vector<DiskRequest>& requests, const std::atomic<bool>& abort,
                     const Step& before, const Step& after, std::string* error) {
    for (size_t position = 0; position < requests.size(); ++position) {
      if (abort.load(std::memory_order_relaxed)) {
        *error = kStopped;
        return false;
      }
      if (!before(position, error)) return false;
      *error = Carry(*calls_, requests[position]);
      if (!error->empty() || !after(position, error)) return false;
    }
    return true;
  }

  const HomeProcess home_;
  const std::shared_ptr<DiskCalls> calls_;
  std::unique_ptr<Pool> pool_;
};

}  // namespace

std::unique_ptr<DiskEngine> NewThreadEngine(int num_threads, std::shared_ptr<DiskCalls> calls) {
  return std::make_unique<ThreadEngine>(num_threads, std::move(calls));
}

}  // namespace jaxoffload

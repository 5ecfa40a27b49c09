// Threads for what callers do when a run has ended.
//
// A finished run may wake an XLA program, and XLA may run the rest of that program on the thread
// that woke it. A lane must not be that thread: while it is away no vertex of its lane runs, and if
// the rest of the program waits for another run, none ever would. A fixed number of threads could
// be used up in the same way, so a task that finds no idle thread gets a new one; where the system
// refuses, it waits for one of those that there are.

#ifndef JAXOFFLOAD_LAUNCHER_CALLBACK_THREADS_H_
#define JAXOFFLOAD_LAUNCHER_CALLBACK_THREADS_H_

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

#include "base/mutex.h"
#include "base/patience.h"

namespace jaxoffload {

class CallbackThreads {
 public:
  class Task {
   private:
    friend class CallbackThreads;
    explicit Task(std::function<void()> body) : body_(std::move(body)) {}
    std::function<void()> body_;
    std::unique_ptr<Task> next_;
  };

  // All that can fail of a Post to come. The body must not throw. Throws std::runtime_error: there
  // is no thread, and the system gives none.
  std::unique_ptr<Task> Prepare(std::function<void()> body) EXCLUDES(mutex_);
  // Runs a task soon, on a thread where it may block and where it is destroyed. Does not throw.
  void Post(std::unique_ptr<Task> task) EXCLUDES(mutex_);

  // Whether the calling thread is one of them.
  static bool IsOneOfThem();

  // The one of this process; never destroyed, for its threads are never joined.
  static CallbackThreads& Global();

 private:
  void Start() REQUIRES(mutex_);
  void Main() EXCLUDES(mutex_);
  // Waits for a task. `patience` is the thread's own.
  std::unique_ptr<Task> Take(Patience& patience) EXCLUDES(mutex_);

  Mutex mutex_;
  CondVar posted_;
  std::unique_ptr<Task> first_ GUARDED_BY(mutex_);  // posted and not begun
  Task* last_ GUARDED_BY(mutex_) = nullptr;
  // Written under the mutex, and looked at without it.
  std::atomic<size_t> num_posted_{0};
  bool is_looking_ GUARDED_BY(mutex_) = false;  // an idle thread, at the above; one at a time
  size_t num_idle_ GUARDED_BY(mutex_) = 0;
  size_t num_threads_ GUARDED_BY(mutex_) = 0;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_LAUNCHER_CALLBACK_THREADS_H_

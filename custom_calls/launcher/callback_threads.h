// Threads for what callers do when a run has ended.
//
// A finished run may wake an XLA program, and XLA may run the rest of that program on the thread
// that woke it. A lane must not be that thread: while it is away no vertex of its lane runs, and if
// the rest of the program waits for another run, none ever would. A fixed number of threads could
// be used up in the same way, so a task that finds no idle thread gets a new one.

#ifndef JAXOFFLOAD_LAUNCHER_CALLBACK_THREADS_H_
#define JAXOFFLOAD_LAUNCHER_CALLBACK_THREADS_H_

#include <cstddef>
#include <deque>
#include <functional>

#include "base/mutex.h"

namespace jaxoffload {

class CallbackThreads {
 public:
  // Runs a task soon, on a thread where it may block. The task must not throw. It is destroyed on
  // that thread.
  void Post(std::function<void()> task) EXCLUDES(mutex_);

  // The one of this process; never destroyed, for its threads are never joined.
  static CallbackThreads& Global();

 private:
  void Main() EXCLUDES(mutex_);

  Mutex mutex_;
  CondVar posted_;
  std::deque<std::function<void()>> tasks_ GUARDED_BY(mutex_);
  size_t num_idle_ GUARDED_BY(mutex_) = 0;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_LAUNCHER_CALLBACK_THREADS_H_

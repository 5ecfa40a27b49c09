#include "launcher/callback_threads.h"

#include <exception>

#include "base/thread.h"

namespace jaxoffload {

std::unique_ptr<CallbackThreads::Task> CallbackThreads::Prepare(std::function<void()> body) {
  std::unique_ptr<Task> task(new Task(std::move(body)));
  MutexLock lock(mutex_);
  if (num_threads_ == 0) Start();
  return task;
}

void CallbackThreads::Post(std::unique_ptr<Task> task) {
  MutexLock lock(mutex_);
  Task* const added = task.get();
  (first_ == nullptr ? first_ : last_->next_) = std::move(task);
  last_ = added;
  if (++num_posted_ <= num_idle_) {
    // Who is looking looks again under the mutex before it sleeps.
    if (!is_looking_ || num_posted_ > 1) posted_.NotifyOne();
    return;
  }
  try {
    Start();
  } catch (const std::exception&) {
    // One of the others will come to it.
  }
}

void CallbackThreads::Start() {
  StartThread([this] { Main(); }).detach();
  ++num_threads_;
}

void CallbackThreads::Main() {
  Patience patience;
  for (;;) Take(patience)->body_();
}

std::unique_ptr<CallbackThreads::Task> CallbackThreads::Take(Patience& patience) {
  const Patience::Clock::time_point start = Patience::Clock::now();
  bool is_mine;
  {
    MutexLock lock(mutex_);
    ++num_idle_;
    is_mine = !std::exchange(is_looking_, true);
  }
  if (is_mine) patience.Look([this] { return num_posted_.load(std::memory_order_relaxed) > 0; });
  MutexLock lock(mutex_);
  if (is_mine) is_looking_ = false;
  while (first_ == nullptr) posted_.Wait(mutex_);
  patience.Waited(Patience::Clock::now() - start);
  --num_idle_;
  --num_posted_;
  std::unique_ptr<Task> task = std::move(first_);
  first_ = std::move(task->next_);
  return task;
}

CallbackThreads& CallbackThreads::Global() {
  static CallbackThreads* const threads = new CallbackThreads;
  return *threads;
}

}  // namespace jaxoffload

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
    posted_.NotifyOne();
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
  for (;;) {
    std::unique_ptr<Task> task;
    {
      MutexLock lock(mutex_);
      ++num_idle_;
      while (first_ == nullptr) posted_.Wait(mutex_);
      --num_idle_;
      --num_posted_;
      task = std::move(first_);
      first_ = std::move(task->next_);
    }
    task->body_();
  }
}

CallbackThreads& CallbackThreads::Global() {
  static CallbackThreads* const threads = new CallbackThreads;
  return *threads;
}

}  // namespace jaxoffload

#include "launcher/callback_threads.h"

#include <thread>
#include <utility>

namespace jaxoffload {

void CallbackThreads::Post(std::function<void()> task) {
  MutexLock lock(mutex_);
  tasks_.push_back(std::move(task));
  if (tasks_.size() > num_idle_) {
    std::thread([this] { Main(); }).detach();
  } else {
    posted_.NotifyOne();
  }
}

void CallbackThreads::Main() {
  for (;;) {
    std::function<void()> task;
    {
      MutexLock lock(mutex_);
      ++num_idle_;
      while (tasks_.empty()) posted_.Wait(mutex_);
      --num_idle_;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

CallbackThreads& CallbackThreads::Global() {
  static CallbackThreads* const threads = new CallbackThreads;
  return *threads;
}

}  // namespace jaxoffload

#include "launcher/callback_threads.h"

#include <cstdint>
#include <exception>
#include <utility>

#include "base/thread.h"

namespace jaxoffload {
namespace {

thread_local bool is_one_of_them = false;

// As XLA's own threads do: what it goes on with here computes as it does there.
void FlushDenormals() {
#if defined(__x86_64__)
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | kFlushToZero | kDenormalsAreZero);
#elif defined(__aarch64__)
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  asm volatile("msr fpcr, %0" : : "r"(control | (uint64_t{1} << 24)));
#endif
}

}  // namespace

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

bool CallbackThreads::IsOneOfThem() { return is_one_of_them; }

void CallbackThreads::Main() {
  is_one_of_them = true;
  FlushDenormals();
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

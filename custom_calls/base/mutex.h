// A mutex whose discipline Clang's thread-safety analysis can check (clang-tidy runs it on this
// tree; see tests/test_native.py). With other compilers the annotations vanish.

#ifndef JAXOFFLOAD_BASE_MUTEX_H_
#define JAXOFFLOAD_BASE_MUTEX_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define JO_ATTRIBUTE(x) __attribute__((x))
#else
#define JO_ATTRIBUTE(x)
#endif

#define CAPABILITY(x) JO_ATTRIBUTE(capability(x))
#define SCOPED_CAPABILITY JO_ATTRIBUTE(scoped_lockable)
#define GUARDED_BY(x) JO_ATTRIBUTE(guarded_by(x))
#define REQUIRES(...) JO_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define ACQUIRE(...) JO_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define RELEASE(...) JO_ATTRIBUTE(release_capability(__VA_ARGS__))
#define EXCLUDES(...) JO_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define NO_THREAD_SAFETY_ANALYSIS JO_ATTRIBUTE(no_thread_safety_analysis)

namespace jaxoffload {

class CAPABILITY("mutex") Mutex {
 public:
  void Lock() ACQUIRE() { mutex_.lock(); }
  void Unlock() RELEASE() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.Lock(); }
  ~MutexLock() RELEASE() { mutex_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

class CondVar {
 public:
  void Wait(Mutex& mutex) REQUIRES(mutex) NO_THREAD_SAFETY_ANALYSIS {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }
  void WaitFor(Mutex& mutex, std::chrono::milliseconds limit)
      REQUIRES(mutex) NO_THREAD_SAFETY_ANALYSIS {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    // Against the system clock: TSan of GCC 12 does not intercept pthread_cond_clockwait, which a
    // steady deadline would use. A clock that jumps only makes one wait longer or shorter.
    condition_.wait_until(lock, std::chrono::system_clock::now() + limit);
    lock.release();
  }
  void NotifyAll() { condition_.notify_all(); }
  void NotifyOne() { condition_.notify_one(); }

 private:
  std::condition_variable condition_;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_BASE_MUTEX_H_

// Threads that may be refused: the one place where they are made.

#ifndef JAXOFFLOAD_BASE_THREAD_H_
#define JAXOFFLOAD_BASE_THREAD_H_

#include <atomic>
#include <functional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace jaxoffload {

// For tests: so many more threads are made, then the system has none left; -1: no such limit.
inline std::atomic<int> threads_left{-1};

// Starts a thread. Throws std::runtime_error, with the remedy, where the system refuses.
inline std::thread StartThread(std::function<void()> body) {
  try {
    if (threads_left >= 0 && threads_left.fetch_sub(1) <= 0) {
      threads_left = 0;
      throw std::system_error(EAGAIN, std::generic_category());
    }
    return std::thread(std::move(body));
  } catch (const std::system_error& e) {
    throw std::runtime_error("no thread can be started (" + e.code().message() +
                             "). Raise the limit on threads (ulimit -u, or pids of the container) "
                             "or on memory (ulimit -v, -d); the next call tries again.");
  }
}

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_BASE_THREAD_H_

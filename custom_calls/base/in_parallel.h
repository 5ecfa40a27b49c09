// A range of numbers, divided among threads that end before the call does.

#ifndef JAXOFFLOAD_BASE_IN_PARALLEL_H_
#define JAXOFFLOAD_BASE_IN_PARALLEL_H_

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/thread.h"

namespace jaxoffload {

// Calls part(begin, end) for up to `num_threads` parts of [0, count), of at least `least` each; the
// first on the calling thread, and those for which the system gives no thread. `part` must not
// throw.
template <typename Part>
void InParallel(int64_t count, int num_threads, int64_t least, const Part& part) {
  const int64_t most = std::max<int64_t>(1, count / std::max<int64_t>(least, 1));
  const int64_t parts = std::min<int64_t>(std::max(num_threads, 1), most);
  std::vector<std::thread> threads;
  threads.reserve(parts);
  std::vector<int64_t> left = {0};
  left.reserve(parts);
  const auto begin = [&](int64_t p) { return count / parts * p + std::min(p, count % parts); };
  for (int64_t p = 1; p < parts; ++p) {
    try {
      threads.push_back(StartThread([&, p] { part(begin(p), begin(p + 1)); }));
    } catch (const std::runtime_error&) {
      left.push_back(p);
    }
  }
  for (const int64_t p : left) part(begin(p), begin(p + 1));
  for (std::thread& thread : threads) thread.join();
}

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_BASE_IN_PARALLEL_H_

// A disk that fails when it is told to, under the real store: between it and the system's calls.

#ifndef JAXOFFLOAD_TESTS_FAULTY_DISK_H_
#define JAXOFFLOAD_TESTS_FAULTY_DISK_H_

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>

#include "tiers/disk_engine.h"

namespace jaxoffload::testing {

class FaultyDisk : public DiskCalls {
 public:
  // Every call moves at most so many bytes, a multiple of 4096; 0: all.
  std::atomic<int64_t> most_bytes{0};
  // So many calls are interrupted before the next one works.
  std::atomic<int> interruptions{0};
  // After so many further calls the disk answers with this error for good.
  std::atomic<int> calls_until_error{-1};
  std::atomic<int> error{EIO};
  // One bit of the next read comes back flipped.
  std::atomic<bool> flip_next_read{false};
  // Every call waits so long.
  std::atomic<int> delay_us{0};
  // Called before each call, if set before the first.
  std::function<void()> before_call;
  // What was seen: calls, those that O_DIRECT forbids on some drives, and the end of what was
  // written.
  std::atomic<int> num_calls{0};
  std::atomic<int> num_misaligned{0};
  std::atomic<int64_t> written_end{0};

  ssize_t Read(int fd, char* address, int64_t bytes, int64_t offset) override {
    if (!Works(address, bytes, offset)) return -1;
    const ssize_t answer = DiskCalls::Read(fd, address, Most(bytes), offset);
    if (answer > 0 && flip_next_read.exchange(false)) address[answer / 2] ^= 4;
    return answer;
  }

  ssize_t Write(int fd, const char* address, int64_t bytes, int64_t offset) override {
    if (!Works(address, bytes, offset)) return -1;
    int64_t end = written_end;
    while (end < offset + bytes && !written_end.compare_exchange_weak(end, offset + bytes)) {
    }
    return DiskCalls::Write(fd, address, Most(bytes), offset);
  }

 private:
  int64_t Most(int64_t bytes) const {
    return most_bytes > 0 ? std::min<int64_t>(bytes, most_bytes) : bytes;
  }

  bool Works(const char* address, int64_t bytes, int64_t offset) {
    ++num_calls;
    const auto bits = reinterpret_cast<uintptr_t>(address) | static_cast<uintptr_t>(bytes) |
                      static_cast<uintptr_t>(offset);
    if (bits % 4096 != 0) ++num_misaligned;
    if (before_call) before_call();
    if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    if (interruptions > 0 && interruptions.fetch_sub(1) > 0) {
      errno = EINTR;
      return false;
    }
    if (calls_until_error < 0) return true;
    if (calls_until_error > 0) {
      --calls_until_error;
      return true;
    }
    errno = error;
    return false;
  }
};

}  // namespace jaxoffload::testing

#endif  // JAXOFFLOAD_TESTS_FAULTY_DISK_H_

// How bytes get from memory to files and back: many requests in flight, each finished whole.
//
// Two engines: io_uring, and a pool of threads that call pread and pwrite, for systems that refuse
// io_uring. Both retry short transfers and interruptions, and both end only when nothing is in
// flight any more, so that memory may be reused whatever happened. Both work in a forked child:
// io_uring with rings of the child's own, the pool's threads being missing on the calling thread.

#ifndef JAXOFFLOAD_TIERS_DISK_ENGINE_H_
#define JAXOFFLOAD_TIERS_DISK_ENGINE_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace jaxoffload {

struct DiskRequest {
  int fd = -1;
  bool is_write = false;
  int64_t offset = 0;
  char* address = nullptr;
  int64_t bytes = 0;
  // A read that ends at the end of a file may be this short; 0 means all.
  int64_t least_bytes = 0;
};

class DiskEngine {
 public:
  // Called on the thread that called Transfer, with the position of a request. False ends the
  // transfer, with *error set by the callee.
  using Step = std::function<bool(size_t position, std::string* error)>;

  virtual ~DiskEngine() = default;

  // "io_uring" or "threads".
  virtual const char* name() const = 0;

  // Carries out all requests, in any order; `before` just before one is started, `after` once it is
  // done, both while others are in flight; neither may throw. False, with *error set, when one
  // fails or `abort` was set; then nothing is in flight any more. Any number of threads at once.
  virtual bool Transfer(const std::vector<DiskRequest>& requests, const std::atomic<bool>& abort,
                        const Step& before, const Step& after, std::string* error) = 0;
};

// What a transfer has left of one request; both engines keep one for each.
struct DiskProgress {
  int64_t done = 0;
  int tries = 0;
};

// The error of a transfer that `abort` has ended.
inline constexpr char kStopped[] = "the run was stopped";

// Takes account of a system call's answer (bytes, or -errno). True if the request is complete; else
// *error is set on failure, and left alone when the rest is to be asked for again.
bool Advance(const DiskRequest& request, int64_t answer, DiskProgress& progress,
             std::string* error);

// Null, with *reason set, where the system refuses io_uring.
std::unique_ptr<DiskEngine> NewUringEngine(int queue_depth, std::string* reason);

// For as long as this lives, io_uring has the pages of a range pinned ("registered buffers"), which
// spares each request from looking its pages up: two thirds of what the system does for it.
// Whatever is transferred elsewhere goes as before. One at a time in a process; the range must stay
// mapped, its pages not be discarded, and transfers of it end before this does.
class FixedMemory {
 public:
  FixedMemory(char* base, int64_t bytes);
  ~FixedMemory();
  FixedMemory(const FixedMemory&) = delete;
  FixedMemory& operator=(const FixedMemory&) = delete;

  // Ever, in this process.
  static int64_t num_requests();
};

// The calls behind the thread engine: the seam at which tests let a disk fail.
class DiskCalls {
 public:
  virtual ~DiskCalls() = default;
  virtual ssize_t Read(int fd, char* address, int64_t bytes, int64_t offset);
  virtual ssize_t Write(int fd, const char* address, int64_t bytes, int64_t offset);
};

// Throws std::runtime_error where the system gives no thread.
std::unique_ptr<DiskEngine> NewThreadEngine(int num_threads,
                                            std::shared_ptr<DiskCalls> calls = nullptr);

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_TIERS_DISK_ENGINE_H_

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/process.h"
#include "tiers/disk_engine.h"

namespace jaxoffload {
namespace {

constexpr int64_t kFixedPiece = int64_t{1} << 30;  // the most that one registered buffer may have

std::atomic<int64_t> num_fixed_requests{0};

// Memory that rings may register; see FixedMemory.
struct FixedRange {
  char* base = nullptr;
  int64_t bytes = 0;
  uint64_t generation = 0;  // of each range another one

  bool Has(const char* address) const { return address >= base && address < base + bytes; }
};

// One submission and one completion queue; used by one thread at a time.
class Ring {
 public:
  // Null, with *reason set, if the system refuses.
  static std::unique_ptr<Ring> Create(unsigned depth, std::string* reason) {
    io_uring_params params;
    std::memset(&params, 0, sizeof(params));
    const int fd = static_cast<int>(syscall(__NR_io_uring_setup, depth, &params));
    if (fd < 0) {
      *reason = std::string("io_uring_setup: ") + std::strerror(errno);
      return nullptr;
    }
    std::unique_ptr<Ring> ring(new Ring(fd));
    if (!(params.features & IORING_FEAT_SINGLE_MMAP)) {
      *reason = "io_uring: the kernel is older than 5.4";
      return nullptr;
    }
    ring->Map(params, reason);
    return ring->entries_ == nullptr ? nullptr : std::move(ring);
  }

  ~Ring() {
    if (entries_ != nullptr) munmap(entries_, entries_bytes_);
    if (queues_ != nullptr) munmap(queues_, queues_bytes_);
    close(fd_);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Registers this range and no other. Where the system refuses (RLIMIT_MEMLOCK), requests look
  // their pages up one by one, as without.
  void Fix(const FixedRange& range) {
    if (fixed_.generation == range.generation) return;
    if (is_fixed_) syscall(__NR_io_uring_register, fd_, IORING_UNREGISTER_BUFFERS, nullptr, 0);
    fixed_ = range;
    is_fixed_ = false;
    if (range.bytes == 0) return;
    std::vector<iovec> pieces;
    for (int64_t at = 0; at < range.bytes; at += kFixedPiece) {
      const auto length = static_cast<size_t>(std::min(kFixedPiece, range.bytes - at));
      pieces.push_back({range.base + at, length});
    }
    is_fixed_ = syscall(__NR_io_uring_register, fd_, IORING_REGISTER_BUFFERS, pieces.data(),
                        static_cast<unsigned>(pieces.size())) == 0;
  }

  void Push(const DiskRequest& request, const DiskProgress& progress, uint64_t tag) {
    const unsigned tail = *sq_tail_;
    io_uring_sqe& entry = entries_[tail & sq_mask_];
    std::memset(&entry, 0, sizeof(entry));
    entry.opcode = request.is_write ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = request.fd;
    entry.addr = reinterpret_cast<uint64_t>(request.address + progress.done);
    entry.len = static_cast<uint32_t>(request.bytes - progress.done);
    entry.off = static_cast<uint64_t>(request.offset + progress.done);
    entry.user_data = tag;
    if (is_fixed_ && fixed_.Has(request.address)) {
      const int64_t first = request.address - fixed_.base;
      const int64_t last = first + request.bytes - 1;
      if (last < fixed_.bytes && first / kFixedPiece == last / kFixedPiece) {
        entry.opcode = request.is_write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
        entry.buf_index = static_cast<uint16_t>(first / kFixedPiece);
        num_fixed_requests.fetch_add(1, std::memory_order_relaxed);
      }
    }
    sq_array_[tail & sq_mask_] = tail & sq_mask_;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    ++unsubmitted_;
  }

  // Hands over what was pushed and waits for so many completions. False on an error of the ring
  // itself.
  bool Submit(unsigned wait_for, std::string* error) {
    const unsigned flags = wait_for > 0 ? IORING_ENTER_GETEVENTS : 0;
    for (;;) {
      const long taken =
          syscall(__NR_io_uring_enter, fd_, unsubmitted_, wait_for, flags, nullptr, 0UL);
      if (taken >= 0) {
        unsubmitted_ -= static_cast<unsigned>(taken);
        return true;
      }
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EBUSY) {
        if (wait_for == 0 || HasCompletion()) return true;
        continue;
      }
      *error = std::string("io_uring_enter: ") + std::strerror(errno);
      return false;
    }
  }

  bool HasCompletion() const { return *cq_head_ != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE); }

  // There must be one.
  std::pair<uint64_t, int32_t> Pop() {
    const io_uring_cqe& entry = completions_[*cq_head_ & cq_mask_];
    const std::pair<uint64_t, int32_t> found(entry.user_data, entry.res);
    __atomic_store_n(cq_head_, *cq_head_ + 1, __ATOMIC_RELEASE);
    return found;
  }

 private:
  explicit Ring(int fd) : fd_(fd) {}

  void Map(const io_uring_params& params, std::string* reason) {
    queues_bytes_ = std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                     params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    void* const queues = mmap(nullptr, queues_bytes_, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_POPULATE, fd_, IORING_OFF_SQ_RING);
    if (queues == MAP_FAILED) {
      *reason = std::string("mapping io_uring's queues: ") + std::strerror(errno);
      return;
    }
    queues_ = static_cast<char*>(queues);
    sq_tail_ = reinterpret_cast<unsigned*>(queues_ + params.sq_off.tail);
    sq_mask_ = *reinterpret_cast<unsigned*>(queues_ + params.sq_off.ring_mask);
    sq_array_ = reinterpret_cast<unsigned*>(queues_ + params.sq_off.array);
    cq_head_ = reinterpret_cast<unsigned*>(queues_ + params.cq_off.head);
    cq_tail_ = reinterpret_cast<unsigned*>(queues_ + params.cq_off.tail);
    cq_mask_ = *reinterpret_cast<unsigned*>(queues_ + params.cq_off.ring_mask);
    completions_ = reinterpret_cast<io_uring_cqe*>(queues_ + params.cq_off.cqes);
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    void* const entries = mmap(nullptr, entries_bytes_, PROT_READ | PROT_WRITE,
                               MAP_SHARED | MAP_POPULATE, fd_, IORING_OFF_SQES);
    if (entries == MAP_FAILED) {
      *reason = std::string("mapping io_uring's entries: ") + std::strerror(errno);
      return;
    }
    entries_ = static_cast<io_uring_sqe*>(entries);
  }

  const int fd_;
  char* queues_ = nullptr;
  size_t queues_bytes_ = 0;
  unsigned* sq_tail_ = nullptr;
  unsigned sq_mask_ = 0;
  unsigned* sq_array_ = nullptr;
  unsigned* cq_head_ = nullptr;
  unsigned* cq_tail_ = nullptr;
  unsigned cq_mask_ = 0;
  io_uring_cqe* completions_ = nullptr;
  io_uring_sqe* entries_ = nullptr;
  size_t entries_bytes_ = 0;
  unsigned unsubmitted_ = 0;
  FixedRange fixed_;
  bool is_fixed_ = false;
};

// The rings of the process that nobody uses at the moment, by depth. Never destroyed, as stores may
// outlive everything.
class RingPool {
 public:
  // Of this process: in a forked child another one, empty. The queues of the parent's rings are
  // memory that both would share, so that each would take the other's completions, and the kernel
  // would carry out requests of the one in the memory of the other.
  static RingPool& Global() {
    // Release and acquire: who finds a pool finds it whole. No lock, for a fork may come while
    // another thread holds it.
    static std::atomic<RingPool*> global{nullptr};
    RingPool* found = global.load(std::memory_order_acquire);
    while (found == nullptr || found->home_.IsForked()) {
      auto made = std::make_unique<RingPool>();
      if (global.compare_exchange_strong(found, made.get(), std::memory_order_acq_rel)) {
        return *made.release();
      }
    }
    return *found;
  }

  // Null, with *error set, if the system refuses.
  std::unique_ptr<Ring> Take(int depth, std::string* error) {
    MutexLock lock(mutex_);
    std::vector<std::unique_ptr<Ring>>& idle = idle_[depth];
    if (idle.empty()) return Ring::Create(static_cast<unsigned>(depth), error);
    std::unique_ptr<Ring> ring = std::move(idle.back());
    idle.pop_back();
    return ring;
  }

  void Give(int depth, std::unique_ptr<Ring> ring) {
    MutexLock lock(mutex_);
    if (range_.bytes == 0) ring->Fix(range_);
    idle_[depth].push_back(std::move(ring));
  }

  FixedRange range() {
    MutexLock lock(mutex_);
    return range_;
  }

  void SetRange(char* base, int64_t bytes) {
    MutexLock lock(mutex_);
    range_ = {base, bytes, range_.generation + 1};
    if (bytes > 0) return;  // each ring registers it when it first meets it
    for (auto& [depth, idle] : idle_) {
      for (const std::unique_ptr<Ring>& ring : idle) ring->Fix(range_);
    }
  }

 private:
  const HomeProcess home_;
  Mutex mutex_;
  std::map<int, std::vector<std::unique_ptr<Ring>>> idle_ GUARDED_BY(mutex_);
  FixedRange range_ GUARDED_BY(mutex_);
};

class UringEngine : public DiskEngine {
 public:
  explicit UringEngine(int queue_depth) : depth_(queue_depth) {}

  const char* name() const override { return "io_uring"; }

  bool Transfer(const std::vector<DiskRequest>& requests, const std::atomic<bool>& abort,
                const Step& before, const Step& after, std::string* error) override {
    if (requests.empty()) return true;
    std::unique_ptr<Ring> ring = RingPool::Global().Take(depth_, error);
    if (ring == nullptr) return false;
    const FixedRange range = RingPool::Global().range();
    if (range.Has(requests.front().address)) ring->Fix(range);
    std::vector<DiskProgress> progress(requests.size());
    std::vector<size_t> completed;
    completed.reserve(requests.size());  // no allocation may fail while something is in flight
    size_t started = 0;
    int in_flight = 0;
    bool ok = true;
    std::string broken;
    while (in_flight > 0 || !completed.empty() || (ok && started < requests.size())) {
      if (ok && abort.load(std::memory_order_relaxed)) {
        ok = false;
        *error = kStopped;
      }
      while (ok && broken.empty() && started < requests.size() && in_flight < depth_) {
        ok = before(started, error);
        if (!ok) break;
        ring->Push(requests[started], progress[started], started);
        ++started;
        ++in_flight;
        // Each goes off at once, so that the disk does not wait for what `before` does to the next.
        ring->Submit(0, &broken);
      }
      // Only now that the disk has new work.
      for (const size_t position : completed) {
        if (ok) ok = after(position, error);
      }
      completed.clear();
      if (in_flight == 0) continue;
      if (!broken.empty() || !ring->Submit(ring->HasCompletion() ? 0 : 1, &broken)) {
        // The kernel may still be at work on our memory, and there is no telling when it ends.
        std::fprintf(stderr, "jaxoffload: %s\n", broken.c_str());
        std::abort();
      }
      while (ring->HasCompletion()) {
        const auto [position, answer] = ring->Pop();
        std::string failure;
        if (Advance(requests[position], answer, progress[position], &failure)) {
          --in_flight;
          completed.push_back(position);
        } else if (!failure.empty() || !ok) {
          --in_flight;
          if (ok) *error = failure;
          ok = false;
        } else {
          ring->Push(requests[position], progress[position], position);
        }
      }
    }
    RingPool::Global().Give(depth_, std::move(ring));
    return ok;
  }

 private:
  const int depth_;
};

}  // namespace

FixedMemory::FixedMemory(char* base, int64_t bytes) { RingPool::Global().SetRange(base, bytes); }

FixedMemory::~FixedMemory() { RingPool::Global().SetRange(nullptr, 0); }

int64_t FixedMemory::num_requests() { return num_fixed_requests.load(std::memory_order_relaxed); }

std::unique_ptr<DiskEngine> NewUringEngine(int queue_depth, std::string* reason) {
  std::unique_ptr<Ring> ring = RingPool::Global().Take(queue_depth, reason);
  if (ring == nullptr) return nullptr;
  RingPool::Global().Give(queue_depth, std::move(ring));
  return std::make_unique<UringEngine>(queue_depth);
}

}  // namespace jaxoffload

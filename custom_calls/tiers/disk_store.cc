#include "tiers/disk_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <utility>

#include "base/pages.h"

namespace jaxoffload {
namespace {

constexpr int64_t kStripe = int64_t{1} << 20;     // bytes that follow one another in one folder
constexpr int64_t kMostBytes = int64_t{1} << 60;  // of a store: sums of two such do not overflow

// See KeepBytes. Relaxed: at the end of a process nobody waits for what it saves.
std::atomic<bool> keep_bytes{false};

}  // namespace

std::shared_ptr<DiskStore> DiskStore::Open(const std::vector<std::string>& paths,
                                           const DiskOptions& options) {
  if (paths.empty()) throw std::invalid_argument("DiskStore: paths is empty. Name a folder.");
  if (options.queue_depth < 1 || options.queue_depth > 4096) {
    throw std::invalid_argument("DiskStore: queue_depth=" + std::to_string(options.queue_depth) +
                                " is not between 1 and 4096.");
  }
  if (options.request_bytes < kDiskBlock || options.request_bytes % kDiskBlock != 0) {
    throw std::invalid_argument(
        "DiskStore: request_bytes=" + std::to_string(options.request_bytes) +
        " is not a multiple of " + std::to_string(kDiskBlock) + ".");
  }
  std::shared_ptr<DiskStore> store(new DiskStore);
  store->paths_ = paths;
  store->request_bytes_ = options.request_bytes;
  for (const std::string& path : paths) store->OpenFile(path);
  if (options.engine == "auto" || options.engine == "io_uring") {
    if (options.calls == nullptr) {
      store->engine_ = NewUringEngine(options.queue_depth, &store->reason_);
    }
    if (store->engine_ == nullptr && options.engine == "io_uring") {
      throw DiskError(ENOSYS, "DiskStore: engine='io_uring' is refused by the system (" +
                                  store->reason_ + "). Use 'auto' or 'threads'.");
    }
  } else if (options.engine != "threads") {
    throw std::invalid_argument("DiskStore: engine='" + options.engine +
                                "' is unknown. Use 'auto', 'io_uring' or 'threads'.");
  }
  if (store->engine_ == nullptr) {
    store->reason_ =
        store->reason_.empty() ? "asked for" : "io_uring is refused: " + store->reason_;
    store->engine_ = NewThreadEngine(options.num_threads, options.calls);
  } else {
    store->reason_ = "the system has io_uring";
  }
  if (!store->direct_) store->reason_ += "; O_DIRECT is refused, so the page cache is used";
  return store;
}

void DiskStore::OpenFile(const std::string& path) {
  struct stat about;
  if (stat(path.c_str(), &about) != 0) {
    ThrowDiskError(errno, "the folder " + path + " cannot be used. Make it, or name another");
  }
  if (!S_ISDIR(about.st_mode)) ThrowDiskError(ENOTDIR, path + " is no folder. Name one");
  int fd = -1;
  for (const int direct : {O_DIRECT, 0}) {
    fd = open(path.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | direct, 0600);
    if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR)) {
      std::string name = path + "/.jaxoffload-XXXXXX";
      fd = mkostemp(name.data(), O_CLOEXEC | direct);  // mode 0600
      if (fd >= 0) unlink(name.c_str());
    }
    if (fd >= 0) {
      direct_ = direct_ && direct != 0;
      break;
    }
    if (errno != EINVAL) break;
  }
  if (fd < 0)
    ThrowDiskError(errno, "no file can be made in " + path + ". Name a folder that is writable");
  files_.push_back(fd);
}

std::string DiskStore::JoinedPaths() const {
  std::string text;
  for (const std::string& path : paths_) text += (text.empty() ? "" : ", ") + path;
  return text;
}

DiskStore::~DiskStore() {
  for (const int fd : files_) close(fd);
}

int64_t DiskStore::FileEnd(size_t file, int64_t at) const {
  const auto n = static_cast<int64_t>(files_.size());
  const int64_t turn = kStripe * n;
  const int64_t rest = at % turn - static_cast<int64_t>(file) * kStripe;
  return at / turn * kStripe + std::min(std::max<int64_t>(rest, 0), kStripe);
}

template <typename F>
void DiskStore::ForEachFile(int64_t start, int64_t bytes, F&& call) const {
  // The stripes of a contiguous range are a contiguous range of each file.
  for (size_t file = 0; file < files_.size(); ++file) {
    const int64_t begin = FileEnd(file, start);
    const int64_t end = FileEnd(file, start + bytes);
    if (begin < end) call(file, begin, end - begin);
  }
}

int64_t DiskStore::TakeRange(int64_t size, bool* is_new) {
  MutexLock lock(mutex_);
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const int64_t length = it->second - it->first;
    if (length >= size && (best == free_.end() || length < best->second - best->first)) best = it;
  }
  *is_new = best == free_.end();
  int64_t start = end_;
  if (*is_new) {
    if (size > kMostBytes - end_) {
      throw DiskError(ENOSPC, JoinedPaths() + " has no room for " + std::to_string(size) +
                                  " bytes. No file system has; is the shape right?");
    }
    end_ += size;
  } else {
    start = best->first;
    const int64_t stop = best->second;
    free_.erase(best);
    if (start + size < stop) free_.emplace(start + size, stop);
  }
  reserved_ += size;
  return start;
}

void DiskStore::TakeSpace(int64_t start, int64_t size, bool is_new) const {
  const auto refuse = [&](size_t file, int code, int64_t length, uint64_t left) {
    const std::string bytes = std::to_string(length) + " bytes";
    if (code != ENOSPC && code != EDQUOT) ThrowDiskError(code, paths_[file] + ": taking " + bytes);
    ThrowDiskError(code, paths_[file] + " has no room for " + bytes + " (" + std::to_string(left) +
                             " are free). Free some, or name another folder");
  };
  const auto left = [&](size_t file) {
    struct statvfs about;
    if (fstatvfs(files_[file], &about) != 0) return std::numeric_limits<uint64_t>::max();
    return static_cast<uint64_t>(about.f_bavail) * about.f_frsize;
  };
  // First of all, for a file system may fill the disk up before it says no.
  if (is_new || !keeps_freed_space_.load(std::memory_order_relaxed)) {
    ForEachFile(start, size, [&](size_t file, int64_t, int64_t length) {
      const uint64_t found = left(file);
      if (found < static_cast<uint64_t>(length)) refuse(file, ENOSPC, length, found);
    });
  }
  ForEachFile(start, size, [&](size_t file, int64_t offset, int64_t length) {
    int answer = 0;
    do {
      answer = fallocate(files_[file], 0, offset, length);
    } while (answer != 0 && errno == EINTR);
    if (answer == 0 || errno == EOPNOTSUPP) return;  // no such call there: no more can be done
    const int code = errno;
    refuse(file, code, length, left(file));
  });
}

std::shared_ptr<DiskExtent> DiskStore::Reserve(int64_t bytes) {
  if (bytes < 0) {
    throw std::invalid_argument("DiskStore: " + std::to_string(bytes) + " bytes are negative.");
  }
  if (home_.IsForked()) {
    throw DiskError(EPERM, JoinedPaths() + ": this process was forked off process " +
                               std::to_string(home_.pid()) +
                               ", whose file this is. Put the array on disk anew here, or start "
                               "processes with multiprocessing's 'spawn' method");
  }
  // The limit also keeps what is rounded up and added below from overflowing.
  const int64_t size = RoundUp(std::min(bytes, kMostBytes), kDiskBlock);
  bool is_new;
  const int64_t start = TakeRange(size, &is_new);
  std::unique_ptr<DiskExtent> extent;
  try {
    TakeSpace(start, size, is_new);
    extent.reset(new DiskExtent(shared_from_this(), start, bytes));
  } catch (...) {
    Free(start, size);
    throw;
  }
  return extent;
}

void DiskStore::Punch(int64_t start, int64_t bytes) {
  ForEachFile(start, bytes, [&](size_t file, int64_t offset, int64_t length) {
    // Where the file system cannot, the space stays the store's and is reused.
    if (fallocate(files_[file], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length) != 0) {
      keeps_freed_space_.store(true, std::memory_order_relaxed);
    }
  });
}

void DiskStore::Free(int64_t start, int64_t bytes) {
  // In a forked child the range is its parent's as before.
  if (bytes == 0 || home_.IsForked()) return;
  if (!keep_bytes.load(std::memory_order_relaxed)) Punch(start, bytes);
  MutexLock lock(mutex_);
  reserved_ -= bytes;
  int64_t stop = start + bytes;
  auto next = free_.lower_bound(start);
  if (next != free_.end() && next->first == stop) {
    stop = next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin() && std::prev(next)->second == start) {
    --next;
    start = next->first;
    free_.erase(next);
  }
  if (stop == end_) {
    end_ = start;
  } else {
    free_.emplace(start, stop);
  }
}

void DiskStore::KeepBytes() { keep_bytes.store(true, std::memory_order_relaxed); }

DiskStore::Stats DiskStore::stats() const {
  Stats found;
  found.bytes_read = bytes_read_;
  found.bytes_written = bytes_written_;
  MutexLock lock(mutex_);
  found.reserved_bytes = reserved_;
  return found;
}

std::vector<DiskRequest> DiskStore::Requests(int64_t start, char* address, int64_t bytes,
                                             bool is_write) const {
  std::vector<DiskRequest> requests;
  const auto n = static_cast<int64_t>(files_.size());
  for (int64_t done = 0; done < bytes;) {
    const int64_t at = start + done;
    const int64_t unit = at / kStripe;
    int64_t length = std::min(bytes - done, request_bytes_);
    // With one file stripes follow one another anyway.
    if (n > 1) length = std::min(length, (unit + 1) * kStripe - at);
    DiskRequest request;
    request.fd = files_[unit % n];
    request.is_write = is_write;
    request.offset = n > 1 ? unit / n * kStripe + at % kStripe : at;
    request.address = address + done;
    request.bytes = length;
    requests.push_back(request);
    done += length;
  }
  return requests;
}

}  // namespace jaxoffload

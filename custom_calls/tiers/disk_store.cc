#include "tiers/disk_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "tiers/crc32c.h"

namespace jaxoffload {
namespace {

constexpr int64_t kPage = 4096;                   // what O_DIRECT asks of addresses and offsets
constexpr int64_t kStripe = int64_t{1} << 20;     // bytes that follow one another in one folder
constexpr int64_t kWindow = int64_t{8} << 20;     // of a transfer that goes through a buffer
constexpr int64_t kMostBytes = int64_t{1} << 60;  // of a store: sums of two such do not overflow
constexpr int64_t kBlock = DiskExtent::kBlock;

// See KeepBytes. Relaxed: at the end of a process nobody waits for what it saves.
std::atomic<bool> keep_bytes{false};

int64_t Up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
int64_t Down(int64_t value, int64_t unit) { return value / unit * unit; }

bool IsPageAligned(const char* address) {
  return reinterpret_cast<uintptr_t>(address) % kPage == 0;
}

// Page-aligned memory for what cannot go directly.
class Buffer {
 public:
  explicit Buffer(int64_t bytes)
      : data_(
            static_cast<char*>(std::aligned_alloc(kPage, Up(std::max<int64_t>(bytes, 1), kPage)))) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  char* get() const { return data_; }

 private:
  char* const data_;
};

[[noreturn]] void Throw(int code, const std::string& what) {
  throw DiskError(code, what + ": " + std::strerror(code));
}

std::string Join(const std::vector<std::string>& paths) {
  std::string text;
  for (const std::string& path : paths) text += (text.empty() ? "" : ", ") + path;
  return text;
}

char* NextTag(int64_t bytes) {
  // Addresses of the kernel's half, which no memory of a process has.
  static std::atomic<uint64_t> next{uint64_t{1} << 63};
  return reinterpret_cast<char*>(next.fetch_add(Up(std::max<int64_t>(bytes, 1), kPage)));
}

}  // namespace

DiskSource::DiskSource(int64_t bytes) : tag_(NextTag(bytes)) {}

// The store ---------------------------------------------------------------------------------------

std::shared_ptr<DiskStore> DiskStore::Open(const std::vector<std::string>& paths,
                                           const DiskOptions& options) {
  if (paths.empty()) throw std::invalid_argument("DiskStore: paths is empty. Name a folder.");
  if (options.queue_depth < 1 || options.queue_depth > 4096) {
    throw std::invalid_argument("DiskStore: queue_depth=" + std::to_string(options.queue_depth) +
                                " is not between 1 and 4096.");
  }
  if (options.request_bytes < kBlock || options.request_bytes % kBlock != 0) {
    throw std::invalid_argument(
        "DiskStore: request_bytes=" + std::to_string(options.request_bytes) +
        " is not a multiple of 16384.");
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
    Throw(errno, "the folder " + path + " cannot be used. Make it, or name another");
  }
  if (!S_ISDIR(about.st_mode)) Throw(ENOTDIR, path + " is no folder. Name one");
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
  if (fd < 0) Throw(errno, "no file can be made in " + path + ". Name a folder that is writable");
  files_.push_back(fd);
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
      throw DiskError(ENOSPC, Join(paths_) + " has no room for " + std::to_string(size) +
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
    if (code != ENOSPC && code != EDQUOT) Throw(code, paths_[file] + ": taking " + bytes);
    Throw(code, paths_[file] + " has no room for " + bytes + " (" + std::to_string(left) +
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
    throw DiskError(EPERM, Join(paths_) + ": this process was forked off process " +
                               std::to_string(home_.pid()) +
                               ", whose file this is. Put the array on disk anew here, or start "
                               "processes with multiprocessing's 'spawn' method");
  }
  // The limit also keeps what is rounded up and added below from overflowing.
  const int64_t size = Up(std::min(bytes, kMostBytes), kBlock);
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

// Extents -----------------------------------------------------------------------------------------

DiskExtent::DiskExtent(std::shared_ptr<DiskStore> store, int64_t start, int64_t bytes)
    : DiskSource(bytes),
      store_(std::move(store)),
      start_(start),
      bytes_(bytes),
      sums_(Up(bytes, kBlock) / kBlock),
      written_(Up(bytes, kBlock) / kBlock) {}

DiskExtent::~DiskExtent() { store_->Free(start_, Up(bytes_, kBlock)); }

bool DiskExtent::CheckBlocks(int64_t offset, const char* data, int64_t bytes,
                             std::string* error) const {
  for (int64_t at = 0; at < bytes; at += kBlock) {
    const int64_t block = (offset + at) / kBlock;
    if (!written_[block]) {
      *error = "bytes at " + std::to_string(offset + at) + " of an extent of " +
               Join(store_->paths_) + " were never written";
      return false;
    }
    const uint32_t found = QuarteredCrc32c(data + at, kBlock);
    if (found == sums_[block]) continue;
    *error = "the " + std::to_string(kBlock) + " bytes at " + std::to_string(offset + at) +
             " of an extent of " + Join(store_->paths_) + " came back changed: their CRC32C is " +
             std::to_string(found) + " and was " + std::to_string(sums_[block]) +
             (store_->home_.IsForked()
                  ? ". Process " + std::to_string(store_->home_.pid()) +
                        ", off which this one was forked, has overwritten or deleted it since"
                  : ". Check that drive; nothing of it was used");
    return false;
  }
  return true;
}

bool DiskExtent::ReadBlocks(int64_t offset, char* to, int64_t bytes, const std::atomic<bool>& abort,
                            std::string* error) const {
  const std::vector<DiskRequest> requests =
      store_->Requests(start_ + offset, to, bytes, /*is_write=*/false);
  const auto nothing = [](size_t, std::string*) { return true; };
  const auto check = [&](size_t position, std::string* failure) {
    const DiskRequest& request = requests[position];
    store_->bytes_read_ += request.bytes;
    return CheckBlocks(offset + (request.address - to), request.address, request.bytes, failure);
  };
  if (store_->engine_->Transfer(requests, abort, nothing, check, error)) return true;
  *error = Join(store_->paths_) + ": " + *error;
  return false;
}

bool DiskExtent::WriteBlocks(int64_t offset, const char* from, int64_t bytes,
                             const std::atomic<bool>& abort, std::string* error) {
  const std::vector<DiskRequest> requests =
      store_->Requests(start_ + offset, const_cast<char*>(from), bytes, /*is_write=*/true);
  const auto sum = [&](size_t position, std::string*) {
    const DiskRequest& request = requests[position];
    for (int64_t at = 0; at < request.bytes; at += kBlock) {
      const int64_t block = (offset + (request.address - from) + at) / kBlock;
      sums_[block] = QuarteredCrc32c(request.address + at, kBlock);
      written_[block] = 1;
    }
    return true;
  };
  const auto count = [&](size_t position, std::string*) {
    store_->bytes_written_ += requests[position].bytes;
    return true;
  };
  if (store_->engine_->Transfer(requests, abort, sum, count, error)) return true;
  *error = Join(store_->paths_) + ": " + *error;
  return false;
}

bool DiskExtent::Read(int64_t offset, char* to, int64_t bytes, const std::atomic<bool>& abort,
                      std::string* error) const {
  const auto part = [&](int64_t length) {
    if (!ReadPart(offset, to, length, abort, error)) return false;
    offset += length;
    to += length;
    bytes -= length;
    return true;
  };
  if (offset % kBlock != 0 && bytes > 0 && !part(std::min(bytes, Up(offset, kBlock) - offset))) {
    return false;
  }
  int64_t whole = Down(bytes, kBlock);
  if (whole > 0 && IsPageAligned(to)) {
    if (!ReadBlocks(offset, to, whole, abort, error)) return false;
    offset += whole;
    to += whole;
    bytes -= whole;
    whole = 0;
  }
  if (whole > 0) {
    const Buffer buffer(std::min(whole, kWindow));
    while (whole > 0) {
      const int64_t length = std::min(whole, kWindow);
      if (!ReadBlocks(offset, buffer.get(), length, abort, error)) return false;
      std::memcpy(to, buffer.get(), length);
      offset += length;
      to += length;
      bytes -= length;
      whole -= length;
    }
  }
  return bytes == 0 || part(bytes);
}

bool DiskExtent::ReadPart(int64_t offset, char* to, int64_t bytes, const std::atomic<bool>& abort,
                          std::string* error) const {
  const int64_t first = Down(offset, kBlock);
  const Buffer buffer(kBlock);
  if (store_->home_.IsForked()) {
    // Nobody writes here, and the lock may be held by a thread of the parent's.
    if (!ReadBlocks(first, buffer.get(), kBlock, abort, error)) return false;
  } else {
    const MutexLock lock(partial_);
    if (!ReadBlocks(first, buffer.get(), kBlock, abort, error)) return false;
  }
  std::memcpy(to, buffer.get() + (offset - first), bytes);
  return true;
}

bool DiskExtent::Write(int64_t offset, const char* from, int64_t bytes,
                       const std::atomic<bool>& abort, std::string* error) {
  if (store_->home_.IsForked()) {
    *error = Join(store_->paths_) + ": this process was forked off process " +
             std::to_string(store_->home_.pid()) +
             ", whose bytes these are. Put the array on disk anew here";
    return false;
  }
  const auto part = [&](int64_t length) {
    if (!WritePart(offset, from, length, abort, error)) return false;
    offset += length;
    from += length;
    bytes -= length;
    return true;
  };
  if (offset % kBlock != 0 && bytes > 0 && !part(std::min(bytes, Up(offset, kBlock) - offset))) {
    return false;
  }
  int64_t whole = Down(bytes, kBlock);
  if (whole > 0 && IsPageAligned(from)) {
    if (!WriteBlocks(offset, from, whole, abort, error)) return false;
    offset += whole;
    from += whole;
    bytes -= whole;
    whole = 0;
  }
  if (whole > 0) {
    const Buffer buffer(std::min(whole, kWindow));
    while (whole > 0) {
      const int64_t length = std::min(whole, kWindow);
      std::memcpy(buffer.get(), from, length);
      if (!WriteBlocks(offset, buffer.get(), length, abort, error)) return false;
      offset += length;
      from += length;
      bytes -= length;
      whole -= length;
    }
  }
  return bytes == 0 || part(bytes);
}

bool DiskExtent::WritePart(int64_t offset, const char* from, int64_t bytes,
                           const std::atomic<bool>& abort, std::string* error) {
  const int64_t block = offset / kBlock;
  const int64_t first = block * kBlock;
  const Buffer buffer(kBlock);
  MutexLock lock(partial_);
  const bool is_rest = offset == first && offset + bytes == bytes_;
  if (written_[block] && !is_rest) {
    if (!ReadBlocks(first, buffer.get(), kBlock, abort, error)) return false;
  } else {
    std::memset(buffer.get(), 0, kBlock);
  }
  std::memcpy(buffer.get() + (offset - first), from, bytes);
  return WriteBlocks(first, buffer.get(), kBlock, abort, error);
}

// Files of the user's ----------------------------------------------------------------------------

std::shared_ptr<DiskFile> DiskFile::Open(const std::string& path,
                                         std::shared_ptr<DiskEngine> engine) {
  std::shared_ptr<DiskFile> file(new DiskFile(path, std::move(engine)));
  // Opening a pipe would wait for its writer.
  constexpr int kFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
  file->fd_ = open(path.c_str(), kFlags | O_DIRECT);
  if (file->fd_ < 0 && errno == EINVAL) file->fd_ = open(path.c_str(), kFlags);
  if (file->fd_ < 0) Throw(errno, "the file " + path + " cannot be opened");
  struct stat about;
  if (fstat(file->fd_, &about) != 0) Throw(errno, "the file " + path + " cannot be looked at");
  if (!S_ISREG(about.st_mode)) {
    throw DiskError(S_ISDIR(about.st_mode) ? EISDIR : EINVAL,
                    path + " is no regular file, so no part of it can be read when it is needed");
  }
  // io_uring would take it for a wish not to wait for the disk.
  fcntl(file->fd_, F_SETFL, fcntl(file->fd_, F_GETFL) & ~O_NONBLOCK);
  file->bytes_ = about.st_size;
  file->modified_ns_ = about.st_mtim.tv_sec * int64_t{1000000000} + about.st_mtim.tv_nsec;
  return file;
}

DiskFile::~DiskFile() {
  if (fd_ >= 0) close(fd_);
}

std::shared_ptr<FileRange> DiskFile::Range(int64_t offset, int64_t bytes) {
  if (offset < 0 || bytes < 0) {
    throw std::invalid_argument("DiskFile: offset=" + std::to_string(offset) +
                                ", bytes=" + std::to_string(bytes) + " must not be negative.");
  }
  if (offset > bytes_ || bytes > bytes_ - offset) {
    throw DiskError(EINVAL, "the file " + path_ + " has " + std::to_string(bytes_) + " bytes; " +
                                std::to_string(bytes) + " at " + std::to_string(offset) +
                                " were asked for");
  }
  return std::shared_ptr<FileRange>(new FileRange(shared_from_this(), offset, bytes));
}

bool DiskFile::IsUnchanged(std::string* error) const {
  struct stat about;
  if (fstat(fd_, &about) != 0) {
    *error = "the file " + path_ + " cannot be looked at: " + std::strerror(errno);
    return false;
  }
  const int64_t modified = about.st_mtim.tv_sec * int64_t{1000000000} + about.st_mtim.tv_nsec;
  if (about.st_size == bytes_ && modified == modified_ns_) return true;
  *error = "the file " + path_ + " was changed since it was opened. Open it again";
  return false;
}

DiskEngine& DiskFile::engine() const {
  if (engine_ != nullptr) return *engine_;
  // One for all files; never destroyed, for ranges may outlive everything.
  static DiskEngine* const shared = [] {
    std::string reason;
    std::unique_ptr<DiskEngine> found = NewUringEngine(DiskOptions().queue_depth, &reason);
    if (found == nullptr) found = NewThreadEngine(DiskOptions().num_threads);
    return found.release();
  }();
  return *shared;
}

FileRange::FileRange(std::shared_ptr<const DiskFile> file, int64_t offset, int64_t bytes)
    : DiskSource(bytes), file_(std::move(file)), offset_(offset), bytes_(bytes) {}

bool FileRange::Read(int64_t offset, char* to, int64_t bytes, const std::atomic<bool>& abort,
                     std::string* error) const {
  if (!file_->IsUnchanged(error)) return false;
  if (bytes == 0) return true;
  const Buffer buffer(std::min(Up(bytes, kPage) + kPage, kWindow));
  const auto nothing = [](size_t, std::string*) { return true; };
  int64_t at = offset_ + offset;
  while (bytes > 0) {
    const int64_t first = Down(at, kPage);
    const int64_t last = std::min(Up(at + bytes, kPage), first + kWindow);
    const int64_t part = std::min(bytes, last - at);
    std::vector<DiskRequest> requests;
    for (int64_t start = first; start < last; start += kStripe) {
      DiskRequest request;
      request.fd = file_->fd_;
      request.offset = start;
      request.address = buffer.get() + (start - first);
      request.bytes = std::min(kStripe, last - start);
      // The last page of a file may be short.
      request.least_bytes = std::min(request.bytes, at + part - start);
      requests.push_back(request);
    }
    // Each piece goes to where it belongs while others are on their way.
    const auto place = [&](size_t position, std::string*) {
      const DiskRequest& request = requests[position];
      const int64_t from = std::max(request.offset, at);
      const int64_t stop = std::min(request.offset + request.bytes, at + part);
      std::memcpy(to + (from - at), request.address + (from - request.offset), stop - from);
      return true;
    };
    if (!file_->engine().Transfer(requests, abort, nothing, place, error)) {
      *error = file_->path_ + ": " + *error;
      return false;
    }
    at += part;
    to += part;
    bytes -= part;
  }
  return file_->IsUnchanged(error);
}

}  // namespace jaxoffload

#include "tiers/disk_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "base/pages.h"
#include "tiers/disk_rows.h"
#include "tiers/disk_store.h"

namespace jaxoffload {
namespace {

constexpr int64_t kPiece = int64_t{1} << 20;  // bytes of one request

int64_t ModifiedNs(const struct stat& about) {
  return about.st_mtim.tv_sec * int64_t{1000000000} + about.st_mtim.tv_nsec;
}

}  // namespace

std::shared_ptr<DiskFile> DiskFile::Open(const std::string& path,
                                         std::shared_ptr<DiskEngine> engine) {
  std::shared_ptr<DiskFile> file(new DiskFile(path, std::move(engine)));
  // Opening a pipe would wait for its writer.
  constexpr int kFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
  file->fd_ = open(path.c_str(), kFlags | O_DIRECT);
  if (file->fd_ < 0 && errno == EINVAL) file->fd_ = open(path.c_str(), kFlags);
  if (file->fd_ < 0) ThrowDiskError(errno, "the file " + path + " cannot be opened");
  struct stat about;
  if (fstat(file->fd_, &about) != 0)
    ThrowDiskError(errno, "the file " + path + " cannot be looked at");
  if (!S_ISREG(about.st_mode)) {
    throw DiskError(S_ISDIR(about.st_mode) ? EISDIR : EINVAL,
                    path + " is no regular file, so no part of it can be read when it is needed");
  }
  // io_uring would take it for a wish not to wait for the disk.
  fcntl(file->fd_, F_SETFL, fcntl(file->fd_, F_GETFL) & ~O_NONBLOCK);
  file->bytes_ = about.st_size;
  file->modified_ns_ = ModifiedNs(about);
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
  const int64_t modified = ModifiedNs(about);
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

uint64_t FileRange::stamp() const {
  std::string error;
  return file_->IsUnchanged(&error) ? DiskSource::stamp() : kNoStamp;
}

bool FileRange::Read(int64_t offset, char* to, int64_t bytes, const std::atomic<bool>& abort,
                     std::string* error) const {
  if (!file_->IsUnchanged(error)) return false;
  if (bytes == 0) return true;
  const DiskBuffer buffer(std::min(RoundUp(bytes, kPage) + kPage, kDiskWindow));
  const auto nothing = [](size_t, std::string*) { return true; };
  int64_t at = offset_ + offset;
  while (bytes > 0) {
    const int64_t first = RoundDown(at, kPage);
    const int64_t last = std::min(RoundUp(at + bytes, kPage), first + kDiskWindow);
    const int64_t part = std::min(bytes, last - at);
    std::vector<DiskRequest> requests;
    for (int64_t start = first; start < last; start += kPiece) {
      DiskRequest request;
      request.fd = file_->fd_;
      request.offset = start;
      request.address = buffer.get() + (start - first);
      request.bytes = std::min(kPiece, last - start);
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

bool FileRange::ReadRowsFromDisk(const Rows& rows, char* to, const std::atomic<bool>& abort,
                                 std::string* error) const {
  if (!file_->IsUnchanged(error)) return false;
  const auto nothing = [](size_t, std::string*) { return true; };
  const auto read = [&](const std::vector<DiskSpan>& spans, const std::vector<DiskSpan>&,
                        const std::vector<RowPiece>& pieces) {
    std::vector<DiskRequest> requests;
    for (const DiskSpan& span : spans) {
      for (int64_t at = 0; at < span.bytes; at += kPiece) {
        DiskRequest request;
        request.fd = file_->fd_;
        request.offset = span.offset + at;
        request.address = span.address + at;
        request.bytes = std::min(kPiece, span.bytes - at);
        // The last page of a file may be short.
        request.least_bytes = std::min(request.bytes, file_->bytes_ - request.offset);
        requests.push_back(request);
      }
    }
    if (!file_->engine().Transfer(requests, abort, nothing, nothing, error)) {
      *error = file_->path_ + ": " + *error;
      return false;
    }
    for (const RowPiece& piece : pieces) std::memcpy(to + piece.outside, piece.inside, piece.bytes);
    return true;
  };
  return ForEachWindow(rows, offset_, kPage, read) && file_->IsUnchanged(error);
}

}  // namespace jaxoffload

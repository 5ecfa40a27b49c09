// The disk tier: a store in one or several folders, and extents that are reserved in it.
//
// A store has one file without a name in each folder, private to the process's owner, which
// vanishes with the process. An extent is reserved before it is used, so that a run never meets a
// full disk. Its bytes are striped over the folders, with checksums (disk_extent.h).
//
// A forked child has the same files open, but what it does to a store's book-keeping its parent
// never learns. So a child reads extents, and neither reserves, writes nor gives anything back.

#ifndef JAXOFFLOAD_TIERS_DISK_STORE_H_
#define JAXOFFLOAD_TIERS_DISK_STORE_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/process.h"
#include "tiers/disk_engine.h"
#include "tiers/disk_extent.h"

namespace jaxoffload {

struct DiskOptions {
  std::string engine = "auto";  // "auto", "io_uring", "threads"
  int queue_depth = 32;
  int64_t request_bytes = int64_t{1} << 20;
  int num_threads = 8;
  std::shared_ptr<DiskCalls> calls;  // for tests; null: the system's
};

class DiskStore : public std::enable_shared_from_this<DiskStore> {
 public:
  struct Stats {
    int64_t reserved_bytes = 0;
    int64_t bytes_read = 0;
    int64_t bytes_written = 0;  // ever: what wears a drive
  };

  // Throws DiskError: a folder is missing or cannot be written to; std::invalid_argument: an
  // option.
  static std::shared_ptr<DiskStore> Open(const std::vector<std::string>& paths,
                                         const DiskOptions& options);
  ~DiskStore();
  DiskStore(const DiskStore&) = delete;
  DiskStore& operator=(const DiskStore&) = delete;

  // Takes space now. Throws DiskError: the disk is full, or this is a forked child.
  std::shared_ptr<DiskExtent> Reserve(int64_t bytes) EXCLUDES(mutex_);

  const char* engine() const { return engine_->name(); }
  // Why this engine, and whether the page cache is bypassed.
  const std::string& reason() const { return reason_; }
  bool direct() const { return direct_; }
  Stats stats() const EXCLUDES(mutex_);

  // For the end of the process: from here on no store of the process erases what it is given back.
  // Its files go anyway, unless a forked child has them open and goes on reading them.
  static void KeepBytes();

 private:
  friend class DiskExtent;
  DiskStore() = default;

  // Requests for a range of the store, cut at request size and stripes.
  std::vector<DiskRequest> Requests(int64_t start, char* address, int64_t bytes,
                                    bool is_write) const;
  // The folders, for messages.
  std::string JoinedPaths() const;
  void OpenFile(const std::string& path);
  // Reserves a range of the store's address space; false in *is_new where it had been in use.
  int64_t TakeRange(int64_t size, bool* is_new) EXCLUDES(mutex_);
  // Takes the space of a range from the file systems. Throws DiskError.
  void TakeSpace(int64_t start, int64_t size, bool is_new) const;
  void Free(int64_t start, int64_t bytes) EXCLUDES(mutex_);
  void Punch(int64_t start, int64_t bytes);
  // Where the part of [0, at) ends that is in one of the files.
  int64_t FileEnd(size_t file, int64_t at) const;
  // Calls with (file, offset, bytes) for each file's part of a range.
  template <typename F>
  void ForEachFile(int64_t start, int64_t bytes, F&& call) const;

  const HomeProcess home_;
  std::vector<std::string> paths_;
  std::vector<int> files_;
  std::unique_ptr<DiskEngine> engine_;
  std::string reason_;
  bool direct_ = true;
  int64_t request_bytes_ = 0;
  // Whether a file system kept the space of what was given back. Relaxed: it only saves a refusal.
  std::atomic<bool> keeps_freed_space_{false};
  std::atomic<int64_t> bytes_read_{0};
  std::atomic<int64_t> bytes_written_{0};

  mutable Mutex mutex_;
  std::map<int64_t, int64_t> free_ GUARDED_BY(mutex_);  // start, end; never adjacent
  int64_t end_ GUARDED_BY(mutex_) = 0;
  int64_t reserved_ GUARDED_BY(mutex_) = 0;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_TIERS_DISK_STORE_H_

// The disk tier: a store in one or several folders, extents reserved in it, and ranges of files.
//
// A store has one file without a name in each folder, private to the process's owner, which
// vanishes with the process. An extent is reserved before it is used, so that a run never meets a
// full disk. Its bytes are striped over the folders. Every block carries a CRC32C, kept in memory,
// that is compared whenever the block is read.
//
// A forked child has the same files open, but what it does to a store's book-keeping its parent
// never learns. So a child reads extents, and neither reserves, writes nor gives anything back.

#ifndef JAXOFFLOAD_TIERS_DISK_STORE_H_
#define JAXOFFLOAD_TIERS_DISK_STORE_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/process.h"
#include "tiers/disk_engine.h"

namespace jaxoffload {

// What could not be done with a folder or a file, and errno.
class DiskError : public std::runtime_error {
 public:
  DiskError(int code, const std::string& what) : std::runtime_error(what), code_(code) {}
  int code() const { return code_; }

 private:
  const int code_;
};

struct DiskOptions {
  std::string engine = "auto";  // "auto", "io_uring", "threads"
  int queue_depth = 32;
  int64_t request_bytes = int64_t{1} << 20;
  int num_threads = 8;
  std::shared_ptr<DiskCalls> calls;  // for tests; null: the system's
};

// Bytes that are somewhere on disk.
class DiskSource {
 public:
  virtual ~DiskSource() = default;
  virtual int64_t bytes() const = 0;
  // Reads [offset, offset + bytes), which must be inside. Fastest where `to` is aligned to 4096 and
  // `offset` to a block. False, with *error set, on failure. Any number of threads at once.
  virtual bool Read(int64_t offset, char* to, int64_t bytes, const std::atomic<bool>& abort,
                    std::string* error) const = 0;
  // Start of a range of numbers, as long as the source, that no other source has: what the live
  // range checker takes for an address.
  char* tag() const { return tag_; }

 protected:
  explicit DiskSource(int64_t bytes);

 private:
  char* const tag_;
};

class DiskStore;
class FileRange;

class DiskExtent : public DiskSource {
 public:
  static constexpr int64_t kBlock = 16384;  // under one checksum

  ~DiskExtent() override;
  int64_t bytes() const override { return bytes_; }
  bool Read(int64_t offset, char* to, int64_t bytes, const std::atomic<bool>& abort,
            std::string* error) const override;
  // Likewise; refused in a forked child. A block of which only a part is written is read and
  // checked first.
  bool Write(int64_t offset, const char* from, int64_t bytes, const std::atomic<bool>& abort,
             std::string* error);

 private:
  friend class DiskStore;
  DiskExtent(std::shared_ptr<DiskStore> store, int64_t start, int64_t bytes);

  bool ReadBlocks(int64_t offset, char* to, int64_t bytes, const std::atomic<bool>& abort,
                  std::string* error) const;
  bool ReadPart(int64_t offset, char* to, int64_t bytes, const std::atomic<bool>& abort,
                std::string* error) const;
  bool WriteBlocks(int64_t offset, const char* from, int64_t bytes, const std::atomic<bool>& abort,
                   std::string* error);
  bool WritePart(int64_t offset, const char* from, int64_t bytes, const std::atomic<bool>& abort,
                 std::string* error);
  bool CheckBlocks(int64_t offset, const char* data, int64_t bytes, std::string* error) const;

  const std::shared_ptr<DiskStore> store_;
  const int64_t start_;  // in the store's own address space
  const int64_t bytes_;
  // By block. A block of which one reader or writer has the whole is nobody else's at that time, as
  // plans are free of races byte by byte. A block that is shared is touched under the lock only.
  std::vector<uint32_t> sums_;
  std::vector<uint8_t> written_;
  mutable Mutex partial_;
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

// A regular file of the user's, open for reading: one descriptor, however many ranges of it there
// are, and what it was when it was opened.
class DiskFile : public std::enable_shared_from_this<DiskFile> {
 public:
  // Throws DiskError: it cannot be opened, or is no regular file. `engine` is for tests; null: the
  // one that all files share.
  static std::shared_ptr<DiskFile> Open(const std::string& path,
                                        std::shared_ptr<DiskEngine> engine = nullptr);
  ~DiskFile();
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;

  int64_t bytes() const { return bytes_; }
  const std::string& path() const { return path_; }
  // Throws DiskError: the file is shorter; std::invalid_argument: negative numbers.
  std::shared_ptr<FileRange> Range(int64_t offset, int64_t bytes);

 private:
  friend class FileRange;
  DiskFile(std::string path, std::shared_ptr<DiskEngine> engine)
      : path_(std::move(path)), engine_(std::move(engine)) {}
  bool IsUnchanged(std::string* error) const;
  DiskEngine& engine() const;

  const std::string path_;
  const std::shared_ptr<DiskEngine> engine_;
  int fd_ = -1;
  int64_t bytes_ = 0;
  int64_t modified_ns_ = 0;
};

// A range of such a file: read only, without checksums.
class FileRange : public DiskSource {
 public:
  int64_t bytes() const override { return bytes_; }
  bool Read(int64_t offset, char* to, int64_t bytes, const std::atomic<bool>& abort,
            std::string* error) const override;

 private:
  friend class DiskFile;
  FileRange(std::shared_ptr<const DiskFile> file, int64_t offset, int64_t bytes);

  const std::shared_ptr<const DiskFile> file_;
  const int64_t offset_;
  const int64_t bytes_;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_TIERS_DISK_STORE_H_

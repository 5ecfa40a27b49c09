// Files of the user's, such as checkpoints, of which runs read ranges where they are.

#ifndef JAXOFFLOAD_TIERS_DISK_FILE_H_
#define JAXOFFLOAD_TIERS_DISK_FILE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "tiers/disk_engine.h"
#include "tiers/disk_source.h"

namespace jaxoffload {

class FileRange;

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
  bool ReadRowsFromDisk(const Rows& rows, char* to, const std::atomic<bool>& abort,
                        std::string* error) const override;
  uint64_t stamp() const override;

 private:
  friend class DiskFile;
  FileRange(std::shared_ptr<const DiskFile> file, int64_t offset, int64_t bytes);

  const std::shared_ptr<const DiskFile> file_;
  const int64_t offset_;
  const int64_t bytes_;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_TIERS_DISK_FILE_H_

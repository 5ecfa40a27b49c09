// A range of a store in which blocks of bytes lie, each with a CRC32C in memory that is compared
// whenever the block is read.
//
// Whole blocks go directly between a caller's page-aligned memory and the disk; parts of blocks and
// other memory go through a buffer.

#ifndef JAXOFFLOAD_TIERS_DISK_EXTENT_H_
#define JAXOFFLOAD_TIERS_DISK_EXTENT_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "tiers/disk_rows.h"
#include "tiers/disk_source.h"

namespace jaxoffload {

class DiskStore;

class DiskExtent : public DiskSource {
 public:
  ~DiskExtent() override;
  int64_t bytes() const override { return bytes_; }
  bool Read(int64_t offset, char* to, int64_t bytes, const std::atomic<bool>& abort,
            std::string* error) const override;
  // Likewise; refused in a forked child. A block of which only a part is written is read and
  // checked first.
  bool Write(int64_t offset, const char* from, int64_t bytes, const std::atomic<bool>& abort,
             std::string* error);
  bool ReadRowsFromDisk(const Rows& rows, char* to, const std::atomic<bool>& abort,
                        std::string* error) const override;
  // Likewise. Blocks of which rows are a part are read and checked first.
  bool WriteRows(const Rows& rows, const char* from, const std::atomic<bool>& abort,
                 std::string* error);

 private:
  friend class DiskStore;
  DiskExtent(std::shared_ptr<DiskStore> store, int64_t start, int64_t bytes);

  // Both take whole blocks in page-aligned memory.
  bool ReadBlocks(int64_t offset, char* to, int64_t bytes, const std::atomic<bool>& abort,
                  std::string* error) const;
  bool WriteBlocks(int64_t offset, const char* from, int64_t bytes, const std::atomic<bool>& abort,
                   std::string* error);
  // Both take whole blocks in page-aligned memory, all in one transfer.
  bool ReadSpans(const std::vector<DiskSpan>& spans, const std::atomic<bool>& abort,
                 std::string* error) const;
  bool WriteSpans(const std::vector<DiskSpan>& spans, const std::atomic<bool>& abort,
                  std::string* error);
  bool IsRefusedInChild(std::string* error) const;
  // Of one block.
  bool ReadPart(int64_t offset, char* to, int64_t bytes, const std::atomic<bool>& abort,
                std::string* error) const;
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

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_TIERS_DISK_EXTENT_H_

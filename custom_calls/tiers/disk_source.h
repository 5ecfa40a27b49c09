// What a run reads from disk, whatever it is: an extent of a store or a range of a user's file.

#ifndef JAXOFFLOAD_TIERS_DISK_SOURCE_H_
#define JAXOFFLOAD_TIERS_DISK_SOURCE_H_

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

#include "base/mutex.h"
#include "base/process.h"
#include "base/stamp.h"

namespace jaxoffload {

struct Rows;     // tiers/disk_rows.h
class RowCache;  // tiers/row_cache.h

// What could not be done with a folder or a file, and errno.
class DiskError : public std::runtime_error {
 public:
  DiskError(int code, const std::string& what) : std::runtime_error(what), code_(code) {}
  int code() const { return code_; }

 private:
  const int code_;
};

// Throws DiskError with errno's words behind `what`.
[[noreturn]] void ThrowDiskError(int code, const std::string& what);

// Bytes that are somewhere on disk.
class DiskSource {
 public:
  virtual ~DiskSource() = default;
  virtual int64_t bytes() const = 0;
  // Reads [offset, offset + bytes), which must be inside. Fastest where `to` is aligned to 4096 and
  // `offset` to a block. False, with *error set, on failure. Any number of threads at once.
  virtual bool Read(int64_t offset, char* to, int64_t bytes, const std::atomic<bool>& abort,
                    std::string* error) const = 0;
  // Reads rows to memory, to their places; they must be inside. Those that a cache keeps come from
  // there; of the others neighbours share requests, and many are in flight. False, with *error set,
  // on failure; else `*read` is how many came from disk. Any number of threads at once.
  bool ReadRows(const Rows& rows, char* to, const std::atomic<bool>& abort, std::string* error,
                int64_t* read = nullptr) const;
  // Likewise, all of them from disk.
  virtual bool ReadRowsFromDisk(const Rows& rows, char* to, const std::atomic<bool>& abort,
                                std::string* error) const = 0;
  // Has a cache keep rows of this source for as long as there is the cache. False where there is
  // another one. Waits for writes that are under way, of which the cache knows nothing. Throws
  // std::runtime_error in a forked child.
  bool KeepRowsIn(const std::shared_ptr<RowCache>& cache);
  // Start of a range of numbers, as long as the source, that no other source has: what the live
  // range checker takes for an address.
  char* tag() const { return tag_; }
  // Of what is in it, as far as this process knows; kNoStamp where that has changed unseen.
  virtual uint64_t stamp() const { return stamp_.value(); }

  // Whoever may change what is in it says so before.
  void MayChange() { stamp_.Renew(); }

 protected:
  explicit DiskSource(int64_t bytes);
  // Around every write: which cache is to know of it, if any.
  class Writing {
   public:
    explicit Writing(DiskSource& source);
    ~Writing();
    Writing(const Writing&) = delete;
    Writing& operator=(const Writing&) = delete;
    const std::shared_ptr<RowCache>& cache() const { return cache_; }

   private:
    DiskSource& source_;
    std::shared_ptr<RowCache> cache_;
  };

 private:
  // Null in a forked child, too: its parent may have been at it.
  std::shared_ptr<RowCache> row_cache() const;

  const HomeProcess home_;
  std::atomic<bool> has_cache_{false};  // or had one
  mutable Mutex cache_mutex_;
  std::weak_ptr<RowCache> cache_ GUARDED_BY(cache_mutex_);
  int num_unseen_ GUARDED_BY(cache_mutex_) = 0;  // writes under way without a cache
  CondVar unseen_ended_;
  Stamp stamp_;
  char* const tag_;
};

// Most bytes of a transfer that go through a buffer at once.
constexpr int64_t kDiskWindow = int64_t{8} << 20;

// Page-aligned memory for what cannot go directly to or from a caller's.
class DiskBuffer {
 public:
  // Throws std::bad_alloc.
  explicit DiskBuffer(int64_t bytes);
  ~DiskBuffer() { std::free(data_); }
  DiskBuffer(const DiskBuffer&) = delete;
  DiskBuffer& operator=(const DiskBuffer&) = delete;
  char* get() const { return data_; }

 private:
  char* const data_;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_TIERS_DISK_SOURCE_H_

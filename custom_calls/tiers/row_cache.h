// Rows of a table on disk that are kept in memory, and how often each row was taken.

#ifndef JAXOFFLOAD_TIERS_ROW_CACHE_H_
#define JAXOFFLOAD_TIERS_ROW_CACHE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "tiers/disk_rows.h"

namespace jaxoffload {

// Any number of threads at once. What is in it is always what is on disk: a row that is being
// written is not taken from here, and one that two write at once is let go.
class RowCache : public std::enable_shared_from_this<RowCache> {
 public:
  struct Counts {
    int64_t hits = 0;    // rows that were taken from here, each once a call
    int64_t misses = 0;  // and from disk
  };

  // Of a source of `bytes` in rows of `row_bytes`, with room for `room` of them. Throws
  // std::invalid_argument, std::bad_alloc.
  RowCache(int64_t bytes, int64_t row_bytes, int64_t room);

  // Of the table.
  int64_t num_rows() const { return num_rows_; }

  // Copies those of `rows` that are kept to their places, and notes that all were taken. In `ids`
  // and `places` are those that are left to read. Rows of another length are all left.
  void Take(const Rows& rows, char* to, std::vector<int64_t>* ids, std::vector<int64_t>* places);

  // There is one around every write to the table, of rows or of a range of bytes. Where rows have
  // been written, what is kept of them is that; nothing is kept any more of others.
  class Write {
   public:
    Write(std::shared_ptr<RowCache> cache, const Rows& rows);
    Write(std::shared_ptr<RowCache> cache, int64_t offset, int64_t bytes);
    ~Write();
    Write(const Write&) = delete;
    Write& operator=(const Write&) = delete;
    void Succeeded(const char* from) { from_ = from; }

   private:
    friend class RowCache;
    const std::shared_ptr<RowCache> cache_;  // or null
    const Rows rows_{};
    const int64_t offset_ = 0, bytes_ = 0;
    const char* from_ = nullptr;
  };

  // Keeps these rows of `source`, ascending and no more than there is room for, and no others;
  // reads those that are neither here nor written meanwhile. False, with *error set, where the disk
  // fails: then fewer are kept. Throws std::invalid_argument, std::bad_alloc.
  bool Keep(const DiskSource& source, const std::vector<int64_t>& ids,
            const std::atomic<bool>& abort, std::string* error);

  // How often each row was taken, older times counting less (`Age`).
  std::vector<float> taken() const;
  void Age(float by);
  // Numbers of the rows that are kept, ascending.
  std::vector<int64_t> kept() const;
  Counts counts() const;

 private:
  struct Slot {
    int64_t row = -1;         // none
    bool is_valid = false;    // the bytes are those on disk
    bool is_read = false;     // from disk, for here, and not written since
    bool is_torn = false;     // two wrote it at once
    int32_t num_writing = 0;  // that write it now
  };

  char* At(int32_t slot) REQUIRES(mutex_) { return data_.data() + slot * row_bytes_; }
  // The slot of a row; -1: it has none.
  int32_t SlotOf(int64_t row) const REQUIRES(mutex_) { return slot_of_[row]; }
  void Begin(const Write& write) EXCLUDES(mutex_);
  void End(const Write& write) EXCLUDES(mutex_);
  // Null where its bytes are not known.
  void EndOf(Slot& slot, char* kept, const char* bytes) REQUIRES(mutex_);
  // Calls `visit(slot, place)` for each slot with a row that is written, in part or whole; `place`
  // is where in the writer's memory its bytes are, counted in rows, -1 where not all are.
  template <typename Visit>
  void ForEachWritten(const Write& write, const Visit& visit) REQUIRES(mutex_);
  // Gives slots to `ids` alone; returns those of them that are to be read.
  std::vector<int64_t> MakeRoom(const std::vector<int64_t>& ids);
  // What has been read, as far as it has not been written since.
  void Put(const Rows& rows, const char* from);

  const int64_t row_bytes_, num_rows_, room_;
  Mutex keeping_;  // for as long as one keeps others
  mutable Mutex mutex_;
  std::vector<char> data_ GUARDED_BY(mutex_);
  std::vector<Slot> slots_ GUARDED_BY(mutex_);
  std::vector<int32_t> free_ GUARDED_BY(mutex_);     // slots without a row
  std::vector<int32_t> slot_of_ GUARDED_BY(mutex_);  // by row
  std::vector<float> taken_ GUARDED_BY(mutex_);      // by row
  Counts counts_ GUARDED_BY(mutex_);
  std::vector<const Write*> writes_ GUARDED_BY(mutex_);  // under way
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_TIERS_ROW_CACHE_H_

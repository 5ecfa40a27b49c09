// Page-aligned host memory for results and copies, reused.
//
// Fresh pages cost a fault each (about 0.1 ms a MiB, more than copying it), so a freed block goes
// to a list of its size and serves the next request of that size. The list is capped.

#ifndef JAXOFFLOAD_TIERS_HOST_POOL_H_
#define JAXOFFLOAD_TIERS_HOST_POOL_H_

#include <cstdint>
#include <map>
#include <vector>

#include "base/mutex.h"

namespace jaxoffload {

class HostPool {
 public:
  struct Stats {
    int64_t in_use_bytes = 0;  // handed out
    int64_t free_bytes = 0;    // kept for reuse
    int64_t num_mapped = 0;    // requests that the system served
    int64_t num_reused = 0;    // requests that the list served
  };

  explicit HostPool(int64_t cap_bytes) : cap_bytes_(cap_bytes) {}
  ~HostPool();
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  // Aligned to a page, from 2 MiB on to 2 MiB with huge pages advised. Contents are anything.
  // Throws std::bad_alloc.
  char* Allocate(int64_t bytes) EXCLUDES(mutex_);
  // `bytes` as given to Allocate.
  void Free(char* block, int64_t bytes) EXCLUDES(mutex_);

  // Gives the free blocks back to the system.
  void ReleaseFree() EXCLUDES(mutex_);
  // How many bytes of free blocks may be kept.
  void SetCap(int64_t cap_bytes) EXCLUDES(mutex_);
  Stats stats() const EXCLUDES(mutex_);

  // The one of this process; never destroyed, for blocks may outlive everything.
  static HostPool& Global();

 private:
  void ShrinkTo(int64_t bytes) REQUIRES(mutex_);

  mutable Mutex mutex_;
  int64_t cap_bytes_ GUARDED_BY(mutex_);
  std::map<int64_t, std::vector<char*>> free_ GUARDED_BY(mutex_);  // by rounded size
  Stats stats_ GUARDED_BY(mutex_);
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_TIERS_HOST_POOL_H_

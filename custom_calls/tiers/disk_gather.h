// Rows of a table on disk in any order, named any number of times: each is read or written once.

#ifndef JAXOFFLOAD_TIERS_DISK_GATHER_H_
#define JAXOFFLOAD_TIERS_DISK_GATHER_H_

#include <atomic>
#include <cstdint>
#include <string>

#include "tiers/disk_extent.h"
#include "tiers/disk_source.h"

namespace jaxoffload {

// What to move: rows of `row_bytes` each, numbered from `first_row` of the source on.
struct Gather {
  const int32_t* numbers;
  int64_t count;
  int64_t row_bytes;
  int64_t first_row;
};

// Reads row `numbers[i]` to the i-th place of `to`. Returns how many rows were read from disk, each
// once; -1, with *error set, where a number is none of the source's rows or the disk fails. Throws
// std::bad_alloc.
int64_t GatherFromDisk(const DiskSource& source, const Gather& gather, char* to,
                       const std::atomic<bool>& abort, std::string* error);

// The other way: writes the i-th row of `from` over row `numbers[i]`, of a row that is named
// several times the first, and likewise returns how many were written.
int64_t ScatterToDisk(DiskExtent& extent, const Gather& scatter, const char* from,
                      const std::atomic<bool>& abort, std::string* error);

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_TIERS_DISK_GATHER_H_

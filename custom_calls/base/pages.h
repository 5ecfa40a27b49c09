// Pages of memory, blocks of the disk tier, and multiples of a unit.

#ifndef JAXOFFLOAD_BASE_PAGES_H_
#define JAXOFFLOAD_BASE_PAGES_H_

#include <cstdint>

namespace jaxoffload {

constexpr int64_t kPage = 4096;  // also what O_DIRECT asks of addresses and offsets
constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kDiskBlock = 16384;  // of the disk tier: under one checksum

// Of numbers that are not negative.
constexpr int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
constexpr int64_t RoundDown(int64_t value, int64_t unit) { return value / unit * unit; }

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_BASE_PAGES_H_

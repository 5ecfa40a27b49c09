#include "tiers/host_rows.h"

#include <algorithm>
#include <cstring>

#include "base/in_parallel.h"

namespace jaxoffload {
namespace {

constexpr int64_t kLine = 64;           // bytes of a cache line
constexpr int64_t kAhead = 2048;        // bytes asked of memory before they are copied
constexpr int64_t kLeast = 256 * 1024;  // bytes for which another thread is worth its start

// Small rows wait for memory, not for its rate: several are asked for ahead.
void AskFor(const char* row, int64_t row_bytes) {
  for (int64_t at = 0; at < std::min(row_bytes, kAhead); at += kLine) __builtin_prefetch(row + at);
}

template <typename Copy>
void Each(const char* table, const int64_t* ids, int64_t count, int64_t row_bytes, int num_threads,
          const Copy& copy) {
  const int64_t ahead = std::max<int64_t>(1, kAhead / row_bytes);
  InParallel(count, num_threads, std::max<int64_t>(1, kLeast / row_bytes),
             [&](int64_t begin, int64_t end) {
               for (int64_t i = begin; i < end; ++i) {
                 if (i + ahead < end) AskFor(table + ids[i + ahead] * row_bytes, row_bytes);
                 copy(i, ids[i] * row_bytes);
               }
             });
}

}  // namespace

void TakeRows(const char* table, const int64_t* ids, int64_t count, int64_t row_bytes, char* to,
              int num_threads) {
  Each(table, ids, count, row_bytes, num_threads,
       [&](int64_t i, int64_t at) { std::memcpy(to + i * row_bytes, table + at, row_bytes); });
}

void PutRows(char* table, const int64_t* ids, int64_t count, int64_t row_bytes, const char* from,
             int num_threads) {
  Each(table, ids, count, row_bytes, num_threads,
       [&](int64_t i, int64_t at) { std::memcpy(table + at, from + i * row_bytes, row_bytes); });
}

}  // namespace jaxoffload

#include "tiers/host_rows.h"

#include <algorithm>
#include <cstring>

#include "base/in_parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxoffload {
namespace {

constexpr int64_t kLine = 64;     // bytes of a cache line
constexpr int64_t kAhead = 8192;  // bytes asked of memory before they are copied
constexpr int64_t kHead = 4096;   // the same of rows so long that the processor sees what follows
constexpr int64_t kLeast = 256 * 1024;  // bytes for which another thread is worth its start

// Small rows wait for memory, not for its rate: several are asked for ahead, into the second cache,
// as more requests can be under way to that than to the first.
template <typename Copy>
void Each(const char* table, const int64_t* ids, int64_t count, int64_t row_bytes, int num_threads,
          const Copy& copy_part) {
  const int64_t ahead = std::max<int64_t>(1, kAhead / row_bytes);
  const int64_t asked = std::min(row_bytes, kHead);
  InParallel(count, num_threads, std::max<int64_t>(1, kLeast / row_bytes),
             [&](int64_t begin, int64_t end) {
               copy_part(begin, end, [&](int64_t i) {
                 if (i + ahead < end) {
                   const char* const row = table + ids[i + ahead] * row_bytes;
                   for (int64_t at = 0; at < asked; at += kLine) __builtin_prefetch(row + at, 0, 2);
                 }
                 return ids[i] * row_bytes;
               });
             });
}

#if defined(__x86_64__)
constexpr int64_t kPastCache = int64_t{16} << 20;  // bytes that caches do not keep until use

// Whole lines to the start of one, past the cache. By as few loads as can be: each holds a place in
// a queue while memory is waited for.
__attribute__((target("avx"))) void WriteLines(char* to, const char* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kLine) {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at), first);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at + 32), second);
  }
}

// Writes bytes that come in pieces of any length one after another, past the cache in whole lines:
// through it each line would first be read. A line that pieces share is put together first.
class Stream {
 public:
  explicit Stream(char* to) : to_(to), head_(-reinterpret_cast<uintptr_t>(to) % kLine) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() {
    std::memcpy(to_, line_, filled_);
    _mm_sfence();  // all is there before the thread is joined
  }

  void Write(const char* from, int64_t bytes) {
    if (head_ > 0) {
      const int64_t length = std::min(head_, bytes);
      std::memcpy(to_, from, length);
      to_ += length, from += length, bytes -= length, head_ -= length;
    }
    if (filled_ > 0) {
      const int64_t length = std::min(kLine - filled_, bytes);
      std::memcpy(line_ + filled_, from, length);
      from += length, bytes -= length, filled_ += length;
      if (filled_ < kLine) return;
      WriteAll(line_, kLine);
    }
    filled_ = bytes % kLine;
    WriteAll(from, bytes - filled_);
    if (filled_ > 0) std::memcpy(line_, from + bytes - filled_, filled_);
  }

 private:
  void WriteAll(const char* from, int64_t bytes) {
    WriteLines(to_, from, bytes);
    to_ += bytes;
  }

  char* to_;
  int64_t head_;  // bytes before the first whole line
  int64_t filled_ = 0;
  alignas(kLine) char line_[kLine];
};
#endif

}  // namespace

void TakeRows(const char* table, const int64_t* ids, int64_t count, int64_t row_bytes, char* to,
              int num_threads) {
#if defined(__x86_64__)
  if (count * row_bytes >= kPastCache && __builtin_cpu_supports("avx")) {
    Each(table, ids, count, row_bytes, num_threads,
         [&](int64_t begin, int64_t end, const auto& row) {
           Stream stream(to + begin * row_bytes);
           for (int64_t i = begin; i < end; ++i) stream.Write(table + row(i), row_bytes);
         });
    return;
  }
#endif
  Each(table, ids, count, row_bytes, num_threads, [&](int64_t begin, int64_t end, const auto& row) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(to + i * row_bytes, table + row(i), row_bytes);
  });
}

void PutRows(char* table, const int64_t* ids, int64_t count, int64_t row_bytes, const char* from,
             int num_threads) {
  Each(table, ids, count, row_bytes, num_threads, [&](int64_t begin, int64_t end, const auto& row) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(table + row(i), from + i * row_bytes, row_bytes);
  });
}

}  // namespace jaxoffload

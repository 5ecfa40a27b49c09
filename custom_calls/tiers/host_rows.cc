#include "tiers/host_rows.h"

#include <algorithm>
#include <cstring>

#include "base/in_parallel.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace jaxoffload {
namespace {

constexpr int64_t kLine = 64;     // bytes of a cache line
constexpr int64_t kAhead = 4096;  // bytes asked of memory before they are copied
constexpr int64_t kHead = 1024;   // the same of rows so long that the processor sees what follows
constexpr int64_t kLeast = 256 * 1024;  // bytes for which another thread is worth its start

// Small rows wait for memory, not for its rate: several are asked for ahead.
template <typename Copy>
void Each(const char* table, const int64_t* ids, int64_t count, int64_t row_bytes, int num_threads,
          const Copy& copy_part) {
  const int64_t ahead = std::max<int64_t>(1, kAhead / row_bytes);
  const int64_t asked = row_bytes < kAhead ? row_bytes : kHead;
  InParallel(count, num_threads, std::max<int64_t>(1, kLeast / row_bytes),
             [&](int64_t begin, int64_t end) {
               copy_part(begin, end, [&](int64_t i) {
                 if (i + ahead < end) {
                   const char* const row = table + ids[i + ahead] * row_bytes;
                   for (int64_t at = 0; at < asked; at += kLine) __builtin_prefetch(row + at);
                 }
                 return ids[i] * row_bytes;
               });
             });
}

#if defined(__SSE2__)
constexpr int64_t kStage = 16384;
constexpr int64_t kPastCache = int64_t{16} << 20;  // bytes that caches do not keep until use

// Writes bytes that come in pieces of any length one after another, past the cache in whole lines:
// through it each line would first be read, and a piece that ends within a line would end that.
class Stream {
 public:
  explicit Stream(char* to) : to_(to), head_(-reinterpret_cast<uintptr_t>(to) % kLine) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() {
    std::memcpy(to_, stage_, filled_);
    _mm_sfence();  // all is there before the thread is joined
  }

  void Write(const char* from, int64_t bytes) {
    if (head_ > 0) {
      const int64_t length = std::min(head_, bytes);
      std::memcpy(to_, from, length);
      to_ += length, from += length, bytes -= length, head_ -= length;
    }
    while (bytes > 0) {
      const int64_t length = std::min(bytes, kStage - filled_);
      std::memcpy(stage_ + filled_, from, length);
      from += length, bytes -= length, filled_ += length;
      if (filled_ == kStage) Flush();
    }
  }

 private:
  void Flush() {
    for (int64_t at = 0; at < kStage; at += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to_ + at),
                       _mm_load_si128(reinterpret_cast<const __m128i*>(stage_ + at)));
    }
    to_ += kStage;
    filled_ = 0;
  }

  char* to_;
  int64_t head_;  // bytes before the first whole line
  int64_t filled_ = 0;
  alignas(kLine) char stage_[kStage];
};
#endif

}  // namespace

void TakeRows(const char* table, const int64_t* ids, int64_t count, int64_t row_bytes, char* to,
              int num_threads) {
#if defined(__SSE2__)
  if (count * row_bytes >= kPastCache) {
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

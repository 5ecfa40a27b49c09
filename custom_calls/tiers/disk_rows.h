// Rows of a table on disk: only the units (blocks under one checksum, pages) in which they lie,
// each once, neighbours in one request, many requests in flight.

#ifndef JAXOFFLOAD_TIERS_DISK_ROWS_H_
#define JAXOFFLOAD_TIERS_DISK_ROWS_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "base/pages.h"
#include "tiers/disk_source.h"

namespace jaxoffload {

// Which rows, ascending and no row twice, of a table of `bytes` a row; `places`: where each is in
// the caller's memory, counted in rows, null where they are in order there.
struct Rows {
  const int64_t* ids;
  int64_t count;
  int64_t bytes;
  const int64_t* places = nullptr;
};

// Whole units that follow one another on disk, and in a window of memory.
struct DiskSpan {
  int64_t offset;
  char* address;
  int64_t bytes;
};

// Goes through rows window by window. For each window calls
//   move(units, pieces, bytes): spans of all of its units, those of units that rows fill only in
//   part, and what of rows is in the window: (in the window, in the caller's memory, bytes).
// `base` is where the table starts, counted as units are; `memory` the caller's, row after row.
// False as soon as `move` returns false. Throws std::bad_alloc.
struct RowPiece {
  char* inside;
  int64_t outside;
  int64_t bytes;
};

template <typename Move>
bool ForEachWindow(const Rows& rows, int64_t base, int64_t unit, const Move& move) {
  // No more than the rows can need.
  const int64_t most = (rows.bytes + 2 * unit - 2) / unit * rows.count * unit;
  const int64_t window = RoundDown(most < kDiskWindow ? most : kDiskWindow, unit);
  if (rows.count == 0 || rows.bytes == 0) return true;
  const DiskBuffer buffer(window);
  std::vector<int64_t> units, filled;  // offsets, and how many bytes of each rows fill
  std::vector<RowPiece> pieces;
  const auto spans = [&](bool partial_only) {
    std::vector<DiskSpan> found;
    for (size_t i = 0; i < units.size(); ++i) {
      if (partial_only && filled[i] == unit) continue;
      char* const address = buffer.get() + static_cast<int64_t>(i) * unit;
      if (!found.empty() && found.back().offset + found.back().bytes == units[i] &&
          found.back().address + found.back().bytes == address) {
        found.back().bytes += unit;
      } else {
        found.push_back({units[i], address, unit});
      }
    }
    return found;
  };
  const auto flush = [&] {
    if (units.empty()) return true;
    const bool ok = move(spans(false), spans(true), pieces);
    units.clear();
    filled.clear();
    pieces.clear();
    return ok;
  };
  for (int64_t i = 0; i < rows.count; ++i) {
    int64_t at = base + rows.ids[i] * rows.bytes;
    int64_t outside = (rows.places == nullptr ? i : rows.places[i]) * rows.bytes;
    const int64_t end = at + rows.bytes;
    while (at < end) {
      const int64_t first = RoundDown(at, unit);
      const int64_t length = (first + unit < end ? first + unit : end) - at;
      if (units.empty() || units.back() != first) {
        if (static_cast<int64_t>(units.size()) * unit == window && !flush()) return false;
        units.push_back(first);
        filled.push_back(0);
      }
      filled.back() += length;
      char* const inside =
          buffer.get() + static_cast<int64_t>(units.size() - 1) * unit + (at - first);
      pieces.push_back({inside, outside, length});
      at += length;
      outside += length;
    }
  }
  return flush();
}

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_TIERS_DISK_ROWS_H_

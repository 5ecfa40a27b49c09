#include "tiers/disk_gather.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "tiers/disk_rows.h"

namespace jaxoffload {

namespace {

// Rows in the order of the disk.
struct Wanted {
  std::vector<std::pair<int64_t, int64_t>> all;  // (row, its place)
  std::vector<int64_t> rows, places;             // each row once, at its first place

  bool Order(const Gather& moved, int64_t bytes, std::string* error) {
    const int64_t count = bytes / moved.row_bytes - moved.first_row;
    all.resize(moved.count);
    for (int64_t i = 0; i < moved.count; ++i) {
      const int32_t row = moved.numbers[i];
      if (row < 0 || row >= count) {
        *error = "row " + std::to_string(row) + " is none of a table on disk of " +
                 std::to_string(count) + " rows";
        return false;
      }
      all[i] = {moved.first_row + row, i};
    }
    std::sort(all.begin(), all.end());
    for (const auto& [row, place] : all) {
      if (!rows.empty() && rows.back() == row) continue;
      rows.push_back(row);
      places.push_back(place);
    }
    return true;
  }

  Rows Each(int64_t row_bytes) const {
    return {rows.data(), static_cast<int64_t>(rows.size()), row_bytes, places.data()};
  }
};

}  // namespace

int64_t GatherFromDisk(const DiskSource& source, const Gather& gather, char* to,
                       const std::atomic<bool>& abort, std::string* error) {
  const int64_t size = gather.row_bytes;
  if (gather.count == 0 || size == 0) return 0;
  Wanted wanted;
  if (!wanted.Order(gather, source.bytes(), error)) return -1;
  int64_t read = 0;
  if (!source.ReadRows(wanted.Each(size), to, abort, error, &read)) return -1;
  const char* from = nullptr;  // where the row came that the ones before were
  for (size_t i = 0; i < wanted.all.size(); ++i) {
    char* const place = to + wanted.all[i].second * size;
    if (i == 0 || wanted.all[i - 1].first != wanted.all[i].first) {
      from = place;
    } else {
      std::memcpy(place, from, size);
    }
  }
  return read;
}

int64_t ScatterToDisk(DiskExtent& extent, const Gather& scatter, const char* from,
                      const std::atomic<bool>& abort, std::string* error) {
  if (scatter.count == 0 || scatter.row_bytes == 0) return 0;
  Wanted wanted;
  if (!wanted.Order(scatter, extent.bytes(), error)) return -1;
  if (!extent.WriteRows(wanted.Each(scatter.row_bytes), from, abort, error)) return -1;
  return static_cast<int64_t>(wanted.rows.size());
}

}  // namespace jaxoffload

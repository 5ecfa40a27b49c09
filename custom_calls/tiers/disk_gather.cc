#include "tiers/disk_gather.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "tiers/disk_rows.h"

namespace jaxoffload {

int64_t GatherFromDisk(const DiskSource& source, const Gather& gather, char* to,
                       const std::atomic<bool>& abort, std::string* error) {
  const int64_t size = gather.row_bytes;
  if (gather.count == 0 || size == 0) return 0;
  const int64_t last = source.bytes() / size - 1;
  std::vector<std::pair<int64_t, int64_t>> wanted(gather.count);  // (row, its place)
  for (int64_t i = 0; i < gather.count; ++i) {
    const int64_t row = gather.first_row + gather.numbers[i];
    if (gather.numbers[i] < 0 || row > last) {
      *error = "row " + std::to_string(gather.numbers[i]) + " is none of a table on disk of " +
               std::to_string(last + 1 - gather.first_row) + " rows";
      return -1;
    }
    wanted[i] = {row, i};
  }
  std::sort(wanted.begin(), wanted.end());
  std::vector<int64_t> rows, places;
  for (const auto& [row, place] : wanted) {
    if (!rows.empty() && rows.back() == row) continue;
    rows.push_back(row);
    places.push_back(place);
  }
  const auto count = static_cast<int64_t>(rows.size());
  if (!source.ReadRows({rows.data(), count, size, places.data()}, to, abort, error)) return -1;
  const char* from = nullptr;  // where the row came that the ones before were
  for (size_t i = 0; i < wanted.size(); ++i) {
    char* const place = to + wanted[i].second * size;
    if (i == 0 || wanted[i - 1].first != wanted[i].first) {
      from = place;
    } else {
      std::memcpy(place, from, size);
    }
  }
  return count;
}

}  // namespace jaxoffload

#include "planner/occupancy.h"

#include <algorithm>

namespace jaxoffload {

Occupancy::Occupancy(std::vector<int64_t> size, const std::vector<std::optional<int64_t>>& capacity,
                     std::vector<int32_t> arena_of)
    : size_(std::move(size)),
      start_(size_.size(), -1),
      use_(size_.size(), -1),
      spill_cost_(size_.size(), 0),
      since_(size_.size(), 0),
      arena_of_(std::move(arena_of)) {
  arenas_.reserve(capacity.size());
  for (const auto& bytes : capacity) arenas_.emplace_back(bytes);
}

void Occupancy::Occupy(int32_t tensor, int64_t start) {
  start_[tensor] = start;
  since_[tensor] = num_occupied_++;
  if (size_[tensor] == 0) return;
  Arena& mine = arenas_[arena_of_[tensor]];
  mine.at_start[start] = mine.at_end[start + size_[tensor]] = tensor;
}

void Occupancy::Vacate(int32_t tensor, Dependencies after, int64_t used) {
  const int64_t start = start_[tensor];
  Detach(tensor);
  arenas_[arena_of_[tensor]].space.Give(start, size_[tensor], after, used);
}

void Occupancy::Detach(int32_t tensor) {
  const int64_t start = start_[tensor], size = size_[tensor];
  if (size > 0) {
    Arena& mine = arenas_[arena_of_[tensor]];
    mine.at_start.erase(start);
    mine.at_end.erase(start + size);
  }
  start_[tensor] = use_[tensor] = -1;
}

void Occupancy::AllowEviction(int32_t tensor, int64_t use, int64_t spill_cost) {
  use_[tensor] = use;
  spill_cost_[tensor] = spill_cost;
  arenas_[arena_of_[tensor]].victims.emplace(-use, tensor);
}

void Occupancy::ForgetVictimsOf(int64_t vertex) {
  for (Arena& arena : arenas_) {
    auto& victims = arena.victims;
    while (!victims.empty() && std::prev(victims.end())->first >= -vertex) {
      victims.erase(std::prev(victims.end()));
    }
  }
}

std::vector<int32_t> Occupancy::ByAge(int32_t arena) const {
  std::vector<int32_t> found;
  for (const auto& [start, tensor] : arenas_[arena].at_start) found.push_back(tensor);
  std::sort(found.begin(), found.end(),
            [this](int32_t a, int32_t b) { return since_[a] < since_[b]; });
  return found;
}

}  // namespace jaxoffload

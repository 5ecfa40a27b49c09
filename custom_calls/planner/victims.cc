#include "planner/victims.h"

#include <algorithm>
#include <utility>

namespace jaxoffload {
namespace {

// Tensors from which a window is grown, at least and at most. More find better windows.
constexpr int64_t kLeastSeeds = 6;
constexpr int64_t kMostSeeds = 32;
constexpr int64_t kSeedWork = 300'000;  // vertices times seeds

double Over(int64_t cost, int64_t vertices) {
  return static_cast<double>(cost) / static_cast<double>(vertices);
}

}  // namespace

Victims::Victims(Occupancy& tier, VictimRule rule, int64_t num_vertices)
    : tier_(tier),
      rule_(rule),
      most_seeds_(std::max(kLeastSeeds,
                           std::min(kMostSeeds, kSeedWork / std::max<int64_t>(num_vertices, 1)))),
      tried_(tier.num_tensors(), 0) {}

bool Victims::FreeAPlace(int32_t arena, int64_t size, int64_t beyond) {
  Choice best{{}, 0};
  ++search_;
  for (const int32_t seed : Furthest(arena, beyond)) {
    if (tried_[seed] == search_) continue;  // a window that grew over it has it already
    std::vector<int32_t> window = Grow(arena, seed, size, beyond);
    if (window.empty()) continue;
    for (const int32_t t : window) tried_[t] = search_;
    Choice found = rule_ == VictimRule::kCheapest ? Cheapest(arena, std::move(window), size, beyond)
                                                  : Whole(std::move(window), beyond);
    if (best.window.empty() || found.cost < best.cost) best = std::move(found);
  }
  for (const int32_t t : best.window) tier_.Evict(t, beyond);
  return !best.window.empty();
}

std::vector<int32_t> Victims::Furthest(int32_t arena, int64_t beyond) {
  auto& victims = tier_.arena(arena).victims;
  std::vector<int32_t> found;
  for (auto at = victims.begin(); at != victims.end() && found.size() < most_seeds_;) {
    const int64_t when = -at->first;
    if (tier_.use(at->second) != when) {
      at = victims.erase(at);
      continue;
    }
    if (when <= beyond) break;
    found.push_back(at->second);
    ++at;
  }
  return found;
}

std::vector<int32_t> Victims::Grow(int32_t arena, int32_t seed, int64_t size,
                                   int64_t beyond) const {
  const Occupancy::Arena& mine = std::as_const(tier_).arena(arena);
  const auto start_of_window = [&](int32_t t) { return mine.space.StartOf(tier_.start(t)); };
  const auto end_of_window = [&](int32_t t) {
    return mine.space.EndOf(tier_.start(t) + tier_.size(t));
  };
  const auto tensor_at = [](const std::unordered_map<int64_t, int32_t>& at, int64_t address) {
    const auto found = at.find(address);
    return found == at.end() ? -1 : found->second;
  };
  int64_t low = start_of_window(seed), high = end_of_window(seed);
  std::vector<int32_t> window;  // what is below, seed last; then what is above
  std::vector<int32_t> above;
  window.push_back(seed);
  while (high - low < size) {
    const int32_t left = tensor_at(mine.at_end, low), right = tensor_at(mine.at_start, high);
    const int64_t left_use = left < 0 ? -1 : tier_.use(left);
    const int64_t right_use = right < 0 ? -1 : tier_.use(right);
    if (left_use <= beyond && right_use <= beyond) return {};
    if (left_use > right_use) {
      window.push_back(left);
      low = start_of_window(left);
    } else {
      above.push_back(right);
      high = end_of_window(right);
    }
  }
  std::reverse(window.begin(), window.end());
  window.insert(window.end(), above.begin(), above.end());
  return window;
}

Victims::Choice Victims::Cheapest(int32_t arena, std::vector<int32_t> window, int64_t size,
                                  int64_t beyond) const {
  const AddressSpace& space = std::as_const(tier_).arena(arena).space;
  const auto cost_of = [&](int32_t t) { return Over(tier_.spill_cost(t), tier_.use(t) - beyond); };
  if (window.size() == 1) {
    const double cost = cost_of(window[0]);
    return {std::move(window), cost};
  }
  double least = 0;
  for (const int32_t t : window) least += cost_of(t);
  const auto end_at = [&](size_t k) {
    return space.EndOf(tier_.start(window[k]) + tier_.size(window[k]));
  };
  size_t best_first = 0, best_last = window.size(), last = 0;
  double cost = 0;
  for (size_t first = 0; first < window.size(); ++first) {
    const int64_t low = space.StartOf(tier_.start(window[first]));
    while (last < window.size() && (last <= first || end_at(last - 1) - low < size)) {
      cost += cost_of(window[last]);
      ++last;
    }
    if (end_at(last - 1) - low < size) break;
    if (cost < least) {
      best_first = first;
      best_last = last;
      least = cost;
    }
    cost -= cost_of(window[first]);
  }
  return {{window.begin() + best_first, window.begin() + best_last}, least};
}

Victims::Choice Victims::Whole(std::vector<int32_t> window, int64_t beyond) const {
  double cost = 0;
  for (const int32_t t : window) cost = std::max(cost, Over(1, tier_.use(t) - beyond));
  return {std::move(window), cost};
}

}  // namespace jaxoffload

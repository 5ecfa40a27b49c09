#include "planner/skyline.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

namespace jaxoffload {
namespace {

constexpr int64_t kSmallest = std::numeric_limits<int64_t>::min();
constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();

// Lifetimes in an order, as a tree over it: the first that is within a stretch of time.
class Lifetimes {
 public:
  Lifetimes(const std::vector<int64_t>& lower, const std::vector<int64_t>& upper,
            const std::vector<int64_t>& order) {
    while (num_leaves_ < order.size()) num_leaves_ *= 2;
    latest_begin_.assign(2 * num_leaves_, kSmallest);
    earliest_end_.assign(2 * num_leaves_, kLargest);
    for (size_t k = 0; k < order.size(); ++k) {
      latest_begin_[num_leaves_ + k] = lower[order[k]];
      earliest_end_[num_leaves_ + k] = upper[order[k]];
    }
    for (size_t node = num_leaves_ - 1; node > 0; --node) Update(node);
  }

  // Its position in the order, taken out, or -1.
  int64_t Take(int64_t begin, int64_t end) {
    const int64_t leaf = Find(1, begin, end);
    if (leaf < 0) return -1;
    latest_begin_[leaf] = kSmallest;
    earliest_end_[leaf] = kLargest;
    for (size_t node = leaf / 2; node > 0; node /= 2) Update(node);
    return leaf - static_cast<int64_t>(num_leaves_);
  }

 private:
  void Update(size_t node) {
    latest_begin_[node] = std::max(latest_begin_[2 * node], latest_begin_[2 * node + 1]);
    earliest_end_[node] = std::min(earliest_end_[2 * node], earliest_end_[2 * node + 1]);
  }

  int64_t Find(size_t node, int64_t begin, int64_t end) const {
    if (latest_begin_[node] < begin || earliest_end_[node] > end) return -1;
    if (node >= num_leaves_) return static_cast<int64_t>(node);
    const int64_t found = Find(2 * node, begin, end);
    return found >= 0 ? found : Find(2 * node + 1, begin, end);
  }

  size_t num_leaves_ = 1;
  std::vector<int64_t> latest_begin_, earliest_end_;  // of the waiting leaves under each node
};

// Stretches of time side by side, each with its first free offset.
class Skyline {
 public:
  Skyline(int64_t begin, int64_t end) { Put(begin, end, 0); }

  struct Stretch {
    int64_t begin, end, height;
  };

  // The earliest of the lowest.
  Stretch lowest() const {
    const auto [height, begin] = *by_height_.begin();
    return {begin, stretches_.at(begin).end, height};
  }

  // Replaces a part of one by a higher one.
  void Raise(const Stretch& whole, int64_t begin, int64_t end, int64_t height) {
    Take(whole.begin);
    if (whole.begin < begin) Put(whole.begin, begin, whole.height);
    Put(begin, end, height);
    if (end < whole.end) Put(end, whole.end, whole.height);
  }

  // Raises one to its lower neighbour, or to both where they are equally high, and joins them.
  void Fill(const Stretch& whole) {
    const auto at = stretches_.find(whole.begin);
    const auto after = std::next(at);
    const bool is_first = at == stretches_.begin(), is_last = after == stretches_.end();
    const int64_t left = is_first ? kLargest : std::prev(at)->second.height;
    const int64_t right = is_last ? kLargest : after->second.height;
    const int64_t begin = !is_first && left <= right ? std::prev(at)->first : whole.begin;
    const int64_t end = !is_last && right <= left ? after->second.end : whole.end;
    Take(whole.begin);
    if (begin != whole.begin) Take(begin);
    if (end != whole.end) Take(whole.end);
    Put(begin, end, std::min(left, right));
  }

 private:
  struct Rest {
    int64_t end, height;
  };

  void Put(int64_t begin, int64_t end, int64_t height) {
    stretches_[begin] = {end, height};
    by_height_.emplace(height, begin);
  }

  void Take(int64_t begin) {
    const auto found = stretches_.find(begin);
    by_height_.erase({found->second.height, begin});
    stretches_.erase(found);
  }

  std::map<int64_t, Rest> stretches_;  // by their beginnings
  std::set<std::pair<int64_t, int64_t>> by_height_;
};

void CheckLifetimes(const std::vector<int64_t>& lower, const std::vector<int64_t>& upper,
                    const std::vector<int64_t>& size, const std::vector<int64_t>& order) {
  const size_t count = size.size();
  if (lower.size() != count || upper.size() != count || order.size() != count) {
    throw std::invalid_argument("place_on_skyline: lower, upper, size and order have " +
                                std::to_string(lower.size()) + ", " + std::to_string(upper.size()) +
                                ", " + std::to_string(count) + " and " +
                                std::to_string(order.size()) + " entries");
  }
  std::vector<bool> is_named(count);
  for (const int64_t i : order) {
    if (i < 0 || i >= static_cast<int64_t>(count) || is_named[i]) {
      throw std::invalid_argument("place_on_skyline: the order names buffer " + std::to_string(i) +
                                  ", which is none, or named twice");
    }
    is_named[i] = true;
    if (lower[i] == kSmallest || lower[i] >= upper[i] || size[i] < 0) {
      throw std::invalid_argument("place_on_skyline: buffer " + std::to_string(i) + " lives in [" +
                                  std::to_string(lower[i]) + ", " + std::to_string(upper[i]) +
                                  ") and has " + std::to_string(size[i]) + " bytes");
    }
  }
}

}  // namespace

std::vector<int64_t> PlaceOnSkyline(const std::vector<int64_t>& lower,
                                    const std::vector<int64_t>& upper,
                                    const std::vector<int64_t>& size,
                                    const std::vector<int64_t>& order, int64_t capacity) {
  CheckLifetimes(lower, upper, size, order);
  std::vector<int64_t> offsets(size.size());
  if (size.empty()) return offsets;
  Lifetimes waiting(lower, upper, order);
  Skyline skyline(*std::min_element(lower.begin(), lower.end()),
                  *std::max_element(upper.begin(), upper.end()));
  for (size_t placed = 0; placed < size.size();) {
    const Skyline::Stretch lowest = skyline.lowest();
    const int64_t position = waiting.Take(lowest.begin, lowest.end);
    if (position < 0) {
      skyline.Fill(lowest);
      continue;
    }
    const int64_t buffer = order[position];
    offsets[buffer] = lowest.height;
    int64_t top;
    if (__builtin_add_overflow(lowest.height, size[buffer], &top) || top > capacity) return {};
    skyline.Raise(lowest, lower[buffer], upper[buffer], top);
    ++placed;
  }
  return offsets;
}

}  // namespace jaxoffload

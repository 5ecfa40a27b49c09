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

constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();

// Lifetimes as points (begin, end), each with its position in the order, in a k-d tree: the first
// in the order that is within a stretch of time, in some square root of their number.
class Lifetimes {
 public:
  Lifetimes(const std::vector<int64_t>& lower, const std::vector<int64_t>& upper,
            const std::vector<int64_t>& order)
      : leaf_of_(order.size()) {
    std::vector<Point> points;
    for (size_t k = 0; k < order.size(); ++k) {
      points.push_back({lower[order[k]], upper[order[k]], static_cast<int64_t>(k)});
    }
    nodes_.reserve(2 * points.size());
    Build(points.begin(), points.end(), /*parent=*/-1, /*by_end=*/false);
  }

  // Its position in the order, taken out, or -1.
  int64_t Take(int64_t begin, int64_t end) {
    int64_t found = kGone;
    Find(0, begin, end, &found);
    if (found == kGone) return -1;
    int32_t node = leaf_of_[found];
    nodes_[node].first = kGone;
    while ((node = nodes_[node].parent) >= 0) {
      nodes_[node].first =
          std::min(nodes_[nodes_[node].left].first, nodes_[nodes_[node].right].first);
    }
    return found;
  }

 private:
  static constexpr int64_t kGone = std::numeric_limits<int64_t>::max();
  struct Point {
    int64_t begin, end, position;
  };
  using At = std::vector<Point>::iterator;
  struct Node {
    int64_t first;  // position of those under it that are still there
    int64_t first_begin, last_begin, first_end, last_end;
    int32_t parent, left, right;
  };

  int32_t Build(At from, At to, int32_t parent, bool by_end) {
    const auto id = static_cast<int32_t>(nodes_.size());
    nodes_.push_back(
        {from->position, from->begin, from->begin, from->end, from->end, parent, -1, -1});
    for (At at = from; at != to; ++at) {
      Node& node = nodes_[id];
      node.first = std::min(node.first, at->position);
      node.first_begin = std::min(node.first_begin, at->begin);
      node.last_begin = std::max(node.last_begin, at->begin);
      node.first_end = std::min(node.first_end, at->end);
      node.last_end = std::max(node.last_end, at->end);
    }
    if (to - from == 1) {
      leaf_of_[from->position] = id;
      return id;
    }
    const At middle = from + (to - from) / 2;
    std::nth_element(from, middle, to, [by_end](const Point& a, const Point& b) {
      return by_end ? a.end < b.end : a.begin < b.begin;
    });
    const int32_t left = Build(from, middle, id, !by_end);
    const int32_t right = Build(middle, to, id, !by_end);
    nodes_[id].left = left;
    nodes_[id].right = right;
    return id;
  }

  void Find(int32_t id, int64_t begin, int64_t end, int64_t* found) const {
    const Node& node = nodes_[id];
    if (node.first >= *found || node.last_begin < begin || node.first_end > end) return;
    if (node.first_begin >= begin && node.last_end <= end) {
      *found = node.first;
      return;
    }
    if (node.left < 0) return;
    const bool is_left_first = nodes_[node.left].first < nodes_[node.right].first;
    Find(is_left_first ? node.left : node.right, begin, end, found);
    Find(is_left_first ? node.right : node.left, begin, end, found);
  }

  std::vector<int32_t> leaf_of_;  // of each position
  std::vector<Node> nodes_;
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
    if (lower[i] >= upper[i] || size[i] < 0) {
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

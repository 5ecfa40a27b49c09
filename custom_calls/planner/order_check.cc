#include "planner/order_check.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace jaxoffload {
namespace {

constexpr int kWords = 8;  // of a row of bits: one cache line
constexpr int64_t kColumns = 64 * kWords;
using Reach = std::array<uint64_t, kWords>;

// One memory while it is written, range after range.
class Memory {
 public:
  explicit Memory(const WrittenRanges& ranges) : ranges_(ranges) {}

  // `from_start`: ranges that are there from the start.
  void Reset(std::vector<int64_t> from_start) {
    pieces_.clear();
    from_start_ = std::move(from_start);
    std::sort(from_start_.begin(), from_start_.end(),
              [this](int64_t a, int64_t b) { return ranges_.start[a] < ranges_.start[b]; });
    furthest_.clear();
    int64_t furthest = INT64_MIN;
    for (const int64_t i : from_start_) {
      furthest = std::max(furthest, ranges_.end[i]);
      furthest_.push_back(furthest);
    }
  }

  // Writes a range; `old` gets those that it is the next writer of, once each.
  void Write(int64_t written, std::vector<int64_t>* old) {
    old->clear();
    const int64_t start = ranges_.start[written], end = ranges_.end[written];
    auto piece = pieces_.upper_bound(start);
    if (piece != pieces_.begin() && std::prev(piece)->second.end > start) --piece;
    int64_t at = start;
    while (at < end) {
      if (piece == pieces_.end() || piece->first >= end) {
        FromStart(at, end, old);
        break;
      }
      if (piece->first > at) FromStart(at, piece->first, old);
      const auto [first, found] = *piece;
      old->push_back(found.owner);
      piece = pieces_.erase(piece);
      if (first < start) pieces_.emplace(first, Piece{start, found.owner});
      if (found.end > end) piece = pieces_.emplace(end, Piece{found.end, found.owner}).first;
      at = found.end;
    }
    pieces_.emplace(start, Piece{end, written});
    std::sort(old->begin(), old->end());
    old->erase(std::unique(old->begin(), old->end()), old->end());
  }

 private:
  struct Piece {
    int64_t end, owner;
  };

  // What was there from the start in addresses that nobody has written.
  void FromStart(int64_t start, int64_t end, std::vector<int64_t>* old) const {
    auto after = std::partition_point(from_start_.begin(), from_start_.end(),
                                      [&](int64_t i) { return ranges_.start[i] < end; });
    for (auto k = after - from_start_.begin() - 1; k >= 0 && furthest_[k] > start; --k) {
      if (ranges_.end[from_start_[k]] > start) old->push_back(from_start_[k]);
    }
  }

  const WrittenRanges& ranges_;
  std::map<int64_t, Piece> pieces_;  // by start; apart from one another
  std::vector<int64_t> from_start_;  // by start
  std::vector<int64_t> furthest_;    // the largest end so far
};

// Vertices visited before a pair is left to the closure. Most paths of a plan are short: what
// overwrites waits for what the former readers wrote.
constexpr int64_t kNearSteps = 32;

// What reaches one vertex after another, as far as a few steps tell.
class NearSearch {
 public:
  NearSearch(const std::vector<int64_t>& first, const std::vector<int64_t>& tails)
      : first_(first), tails_(tails), seen_(first.size() - 1, -1) {}

  // Marks what reaches `end`, nearest first, of vertices from `lowest` on.
  void Mark(int64_t end, int64_t lowest, int64_t steps) {
    end_ = end;
    queue_.assign(1, end);
    int64_t visited = 0;
    for (; visited < static_cast<int64_t>(queue_.size()) && visited < steps; ++visited) {
      const int64_t vertex = queue_[visited];
      for (int64_t e = first_[vertex]; e < first_[vertex + 1]; ++e) {
        if (tails_[e] < lowest || seen_[tails_[e]] == end) continue;
        seen_[tails_[e]] = end;
        queue_.push_back(tails_[e]);
      }
    }
    is_complete_ = visited == static_cast<int64_t>(queue_.size());
  }

  bool IsMarked(int64_t vertex) const { return seen_[vertex] == end_; }
  // Whether all that reaches it is marked.
  bool is_complete() const { return is_complete_; }

 private:
  const std::vector<int64_t>& first_;
  const std::vector<int64_t>& tails_;
  std::vector<int64_t> seen_, queue_;
  int64_t end_ = -1;
  bool is_complete_ = false;
};

// Pairs that the near search leaves open.
class Closure {
 public:
  Closure(const std::vector<int64_t>& first, const std::vector<int64_t>& tails, const int64_t* from,
          const int64_t* to, std::vector<uint8_t>* found)
      : first_(first), tails_(tails), from_(from), to_(to), found_(*found) {}

  void Search(std::vector<int64_t> open) {
    // Near pairs with near ones: a block's work is what lies between its ends.
    const auto key = [this](int64_t k) {
      int width = 0;
      for (int64_t span = to_[k] - from_[k]; span > 0; span >>= 1) ++width;
      return std::make_tuple(width, to_[k], from_[k]);
    };
    std::sort(open.begin(), open.end(), [&](int64_t a, int64_t b) { return key(a) < key(b); });
    std::vector<int64_t> block, targets;
    for (const int64_t k : open) {
      if (targets.empty() || targets.back() != to_[k]) {
        if (static_cast<int64_t>(targets.size()) == kColumns) {
          SearchBlock(block, targets);
          block.clear();
          targets.clear();
        }
        targets.push_back(to_[k]);
      }
      block.push_back(k);
    }
    if (!block.empty()) SearchBlock(block, targets);
  }

 private:
  void SearchBlock(const std::vector<int64_t>& block, const std::vector<int64_t>& targets) {
    int64_t lowest = from_[block[0]], highest = 0;
    for (const int64_t k : block) lowest = std::min(lowest, from_[k]);
    for (const int64_t target : targets) highest = std::max(highest, target);
    rows_.assign(highest - lowest + 1, Reach{});
    for (size_t column = 0; column < targets.size(); ++column) {
      rows_[targets[column] - lowest][column / 64] |= uint64_t{1} << (column % 64);
    }
    for (int64_t vertex = highest; vertex > lowest; --vertex) {
      const Reach row = rows_[vertex - lowest];
      if (std::all_of(row.begin(), row.end(), [](uint64_t word) { return word == 0; })) continue;
      for (int64_t e = first_[vertex]; e < first_[vertex + 1]; ++e) {
        if (tails_[e] < lowest) continue;
        Reach& mine = rows_[tails_[e] - lowest];
        for (int w = 0; w < kWords; ++w) mine[w] |= row[w];
      }
    }
    size_t column = 0;
    for (const int64_t k : block) {
      while (targets[column] != to_[k]) ++column;
      found_[k] = rows_[from_[k] - lowest][column / 64] >> (column % 64) & 1;
    }
  }

  const std::vector<int64_t>& first_;
  const std::vector<int64_t>& tails_;
  const int64_t* const from_;
  const int64_t* const to_;
  std::vector<uint8_t>& found_;
  std::vector<Reach> rows_;
};

void CheckVertices(int64_t num_vertices, const int64_t* tail, const int64_t* head, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (tail[i] < 0 || head[i] >= num_vertices || head[i] < 0 || tail[i] >= num_vertices) {
      throw std::invalid_argument("reaches: " + std::to_string(tail[i]) + " or " +
                                  std::to_string(head[i]) + " is none of " +
                                  std::to_string(num_vertices) + " vertices");
    }
  }
}

}  // namespace

std::vector<int64_t> NextWriters(const WrittenRanges& ranges) {
  std::vector<int64_t> order;
  for (int64_t i = 0; i < ranges.count; ++i) {
    if (ranges.start[i] < ranges.end[i]) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return std::make_tuple(ranges.memory[a], ranges.time[a], a) <
           std::make_tuple(ranges.memory[b], ranges.time[b], b);
  });
  Memory memory(ranges);
  std::vector<int64_t> pairs, old;
  for (size_t first = 0, last = 0; first < order.size(); first = last) {
    std::vector<int64_t> from_start;
    const int64_t mine = ranges.memory[order[first]];
    while (last < order.size() && ranges.memory[order[last]] == mine &&
           ranges.time[order[last]] < 0) {
      from_start.push_back(order[last++]);
    }
    memory.Reset(std::move(from_start));
    for (; last < order.size() && ranges.memory[order[last]] == mine; ++last) {
      memory.Write(order[last], &old);
      for (const int64_t other : old) {
        pairs.push_back(other);
        pairs.push_back(order[last]);
      }
    }
  }
  return pairs;
}

std::vector<uint8_t> Reaches(int64_t num_vertices, const int64_t* tail, const int64_t* head,
                             int64_t num_edges, const int64_t* from, const int64_t* to,
                             int64_t num_pairs) {
  CheckVertices(num_vertices, tail, head, num_edges);
  CheckVertices(num_vertices, from, to, num_pairs);
  std::vector<int64_t> first(num_vertices + 1, 0), tails(num_edges);
  for (int64_t e = 0; e < num_edges; ++e) {
    if (tail[e] >= head[e]) throw std::invalid_argument("reaches: an edge does not point forward");
    ++first[head[e] + 1];
  }
  std::partial_sum(first.begin(), first.end(), first.begin());
  std::vector<int64_t> next(first.begin(), first.end() - 1);
  for (int64_t e = 0; e < num_edges; ++e) tails[next[head[e]]++] = tail[e];

  std::vector<int64_t> at(num_vertices + 1, 0), by_end(num_pairs);
  for (int64_t k = 0; k < num_pairs; ++k) ++at[to[k] + 1];
  std::partial_sum(at.begin(), at.end(), at.begin());
  const std::vector<int64_t> pairs_of = at;  // by_end[pairs_of[v]:pairs_of[v + 1]] end at v
  for (int64_t k = 0; k < num_pairs; ++k) by_end[at[to[k]]++] = k;
  std::vector<uint8_t> found(num_pairs, 0);
  std::vector<int64_t> open;
  NearSearch near(first, tails);
  for (int64_t end = 0; end < num_vertices; ++end) {
    int64_t lowest = end;
    const int64_t mine = pairs_of[end], last = pairs_of[end + 1];
    for (int64_t i = mine; i < last; ++i) lowest = std::min(lowest, from[by_end[i]]);
    if (lowest == end) continue;
    near.Mark(end, lowest, kNearSteps + (last - mine));
    for (int64_t i = mine; i < last; ++i) {
      const int64_t k = by_end[i];
      found[k] = near.IsMarked(from[k]);
      if (!found[k] && from[k] < end && !near.is_complete()) open.push_back(k);
    }
  }
  Closure(first, tails, from, to, &found).Search(std::move(open));
  return found;
}

}  // namespace jaxoffload

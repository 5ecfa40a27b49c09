#include "planner/place_intervals.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace jaxoffload {
namespace {

constexpr int64_t kUnplaced = -1;
constexpr int64_t kCapacities = 5;  // from what is asked for down to what is needed at once

// Of a buffer, what orders among equal offsets look at.
enum Feature { kWidth, kArea, kCrowd, kSize, kEnd, kNumFeatures };
using Order = std::array<Feature, 3>;  // largest first, by one after the other
constexpr Order kOrders[] = {{kWidth, kArea, kCrowd},
                             {kCrowd, kArea, kWidth},
                             {kCrowd, kWidth, kArea},
                             {kEnd, kSize, kWidth}};

class Placer {
 public:
  Placer(const std::vector<int64_t>& lower, const std::vector<int64_t>& upper,
         const std::vector<int64_t>& size, int64_t capacity)
      : size_(size), most_(capacity), count_(static_cast<int>(size.size())) {
    std::vector<int64_t> ends = lower;
    ends.insert(ends.end(), upper.begin(), upper.end());
    std::sort(ends.begin(), ends.end());
    ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
    const auto place = [&ends](int64_t t) {
      return static_cast<int>(std::lower_bound(ends.begin(), ends.end(), t) - ends.begin());
    };
    num_sections_ = static_cast<int>(ends.size()) - 1;
    members_.resize(num_sections_);
    waiting_bytes_.assign(num_sections_, 0);
    crossing_.assign(num_sections_, 0);
    for (int i = 0; i < count_; ++i) {
      first_.push_back(place(lower[i]));
      last_.push_back(place(upper[i]));
      for (int s = first_[i]; s < last_[i]; ++s) {
        members_[s].push_back(i);
        waiting_bytes_[s] += size_[i];
        if (s + 1 < last_[i]) ++crossing_[s];
      }
    }
    overlaps_.resize(count_);
    for (int i = 0; i < count_; ++i) {
      for (int j = 0; j < count_; ++j) {
        if (i != j && first_[i] < last_[j] && first_[j] < last_[i]) overlaps_[i].push_back(j);
      }
      int64_t crowd = 0;
      for (int s = first_[i]; s < last_[i]; ++s) crowd = std::max(crowd, waiting_bytes_[s]);
      const int64_t width = upper[i] - lower[i];
      int64_t area;  // orders only, so the largest may be all alike
      if (__builtin_mul_overflow(width, size_[i], &area)) area = INT64_MAX;
      features_.push_back({width, area, crowd, size_[i], upper[i]});
    }
    floor_.assign(num_sections_, 0);
    least_.assign(count_, 0);
    offset_.assign(count_, kUnplaced);
  }

  std::vector<int64_t> Run(int64_t max_steps) {
    const int64_t least = *std::max_element(waiting_bytes_.begin(), waiting_bytes_.end());
    if (least > most_) return {};
    int64_t spent = 0;
    // Which try is lucky is a lottery with few good tickets, so tries are many and short at first.
    for (int64_t limit = 2 * count_; spent < max_steps; limit *= 2) {
      for (int64_t part = 0; part < kCapacities; ++part) {
        capacity_ = most_ - (most_ - least) * part / (kCapacities - 1);
        for (const Order& order : kOrders) {
          Rank(order);
          steps_left_ = std::min(limit, max_steps - spent);
          spent += steps_left_;
          found_.assign(count_, kUnplaced);
          const Outcome outcome = Decompose(by_rank_);
          if (outcome == Outcome::kFound) return found_;
          if (outcome == Outcome::kImpossible && part == 0) return {};
          spent -= std::max<int64_t>(steps_left_, 0);
          if (spent >= max_steps) return {};
        }
      }
    }
    return {};
  }

 private:
  enum class Outcome { kFound, kImpossible, kOutOfSteps };

  void Rank(const Order& order) {
    by_rank_.resize(count_);
    std::iota(by_rank_.begin(), by_rank_.end(), 0);
    std::sort(by_rank_.begin(), by_rank_.end(), [&](int i, int j) {
      for (const Feature f : order) {
        if (features_[i][f] != features_[j][f]) return features_[i][f] > features_[j][f];
      }
      return i < j;
    });
    rank_.resize(count_);
    for (int r = 0; r < count_; ++r) rank_[by_rank_[r]] = r;
  }

  // Solves the stretches of time that no waiting buffer connects, one after another.
  Outcome Decompose(const std::vector<int>& waiting) {
    std::vector<int> by_time(waiting);
    std::stable_sort(by_time.begin(), by_time.end(),
                     [this](int i, int j) { return first_[i] < first_[j]; });
    for (size_t start = 0; start < by_time.size();) {
      int end = last_[by_time[start]];
      size_t stop = start + 1;
      while (stop < by_time.size() && first_[by_time[stop]] < end) {
        end = std::max(end, last_[by_time[stop++]]);
      }
      std::vector<int> part(by_time.begin() + start, by_time.begin() + stop);
      const Outcome outcome = Search(part, first_[by_time[start]], end, 0, -1);
      if (outcome != Outcome::kFound) return outcome;
      start = stop;
    }
    return Outcome::kFound;
  }

  struct Change {
    int index;
    int64_t before;
  };

  // Places the waiting buffers of sections [begin, end), none below `least` or, at the same offset,
  // of a smaller rank than the last one.
  Outcome Search(const std::vector<int>& waiting, int begin, int end, int64_t least,
                 int least_rank) {
    if (waiting.empty()) return Outcome::kFound;
    std::vector<std::pair<int64_t, int>> candidates;
    int64_t lowest_top = std::numeric_limits<int64_t>::max();
    candidates.reserve(waiting.size());
    for (const int i : waiting) {
      candidates.emplace_back(least_[i], rank_[i]);
      lowest_top = std::min(lowest_top, least_[i] + size_[i]);
    }
    std::sort(candidates.begin(), candidates.end());
    for (const auto& [offset, rank] : candidates) {
      // What starts higher than another could end leaves a gap for nothing.
      if (offset >= lowest_top) break;
      if (offset < least || (offset == least && rank < least_rank)) continue;
      if (steps_left_-- <= 0) return Outcome::kOutOfSteps;
      const int i = by_rank_[rank];
      std::vector<Change> moved;
      std::vector<Change> lifted;
      bool has_hat = false;
      Place(i, offset, begin, end, moved, lifted, has_hat);
      Outcome outcome = Outcome::kImpossible;
      if (Fits(begin, end, offset)) {
        std::vector<int> rest;
        rest.reserve(waiting.size() - 1);
        for (const int j : waiting) {
          if (j != i) rest.push_back(j);
        }
        found_[i] = offset;
        outcome = is_cut_ ? Decompose(rest) : Search(rest, begin, end, offset, rank);
      }
      Undo(i, moved, lifted);
      if (outcome != Outcome::kImpossible) return outcome;
      if (!has_hat) break;  // nothing is above it: where it lies makes no difference
    }
    return Outcome::kImpossible;
  }

  void Place(int i, int64_t offset, int begin, int end, std::vector<Change>& moved,
             std::vector<Change>& lifted, bool& has_hat) {
    offset_[i] = offset;
    const int64_t top = offset + size_[i];
    int low = first_[i];
    int high = last_[i];
    for (const int j : overlaps_[i]) {
      if (offset_[j] != kUnplaced) continue;
      has_hat = true;
      if (least_[j] >= top) continue;
      moved.push_back({j, least_[j]});
      least_[j] = top;
      low = std::min(low, first_[j]);
      high = std::max(high, last_[j]);
    }
    is_cut_ = false;
    for (int s = first_[i]; s < last_[i]; ++s) {
      lifted.push_back({s, floor_[s]});
      floor_[s] = top;
      waiting_bytes_[s] -= size_[i];
      if (s + 1 < last_[i] && --crossing_[s] == 0) is_cut_ = true;
    }
    for (int s = std::max(low, begin); s < std::min(high, end); ++s) {
      int64_t lowest = std::numeric_limits<int64_t>::max();
      for (const int j : members_[s]) {
        if (offset_[j] == kUnplaced) lowest = std::min(lowest, least_[j]);
      }
      if (lowest == std::numeric_limits<int64_t>::max() || lowest <= floor_[s]) continue;
      lifted.push_back({s, floor_[s]});
      floor_[s] = lowest;
    }
  }

  void Undo(int i, const std::vector<Change>& moved, const std::vector<Change>& lifted) {
    for (auto change = lifted.rbegin(); change != lifted.rend(); ++change) {
      floor_[change->index] = change->before;
    }
    for (int s = first_[i]; s < last_[i]; ++s) {
      waiting_bytes_[s] += size_[i];
      if (s + 1 < last_[i]) ++crossing_[s];
    }
    for (const Change& change : moved) least_[change.index] = change.before;
    offset_[i] = kUnplaced;
  }

  // Whether what waits can be above what is there, given that nothing is placed lower any more.
  bool Fits(int begin, int end, int64_t offset) const {
    for (int s = begin; s < end; ++s) {
      if (std::max(floor_[s], offset) + waiting_bytes_[s] > capacity_) return false;
    }
    return true;
  }

  const std::vector<int64_t>& size_;
  const int64_t most_;
  const int count_;
  int num_sections_ = 0;
  std::vector<int> first_;  // of each buffer: its sections
  std::vector<int> last_;
  std::vector<std::vector<int>> overlaps_;
  std::vector<std::vector<int>> members_;  // of each section
  std::vector<std::array<int64_t, kNumFeatures>> features_;
  std::vector<int> by_rank_;
  std::vector<int> rank_;

  std::vector<int64_t> least_;   // of a waiting buffer: the lowest offset that is left to it
  std::vector<int64_t> offset_;  // of a placed one
  std::vector<int64_t> floor_;   // of a section: nothing that waits starts lower
  std::vector<int64_t> waiting_bytes_;
  std::vector<int> crossing_;  // buffers that wait in a section and in the next one
  bool is_cut_ = false;        // whether the last one placed was the last to cross somewhere
  int64_t capacity_ = 0;       // of this try
  int64_t steps_left_ = 0;
  std::vector<int64_t> found_;
};

// Returns all bytes together.
int64_t Check(const std::vector<int64_t>& lower, const std::vector<int64_t>& upper,
              const std::vector<int64_t>& size) {
  const auto refuse = [](const std::string& what) {
    throw std::invalid_argument("place_intervals: " + what);
  };
  if (lower.size() != size.size() || upper.size() != size.size()) {
    refuse("lower, upper and size have " + std::to_string(lower.size()) + ", " +
           std::to_string(upper.size()) + " and " + std::to_string(size.size()) + " entries");
  }
  int64_t total = 0;
  for (size_t i = 0; i < size.size(); ++i) {
    int64_t width;
    if (lower[i] >= upper[i] || size[i] <= 0 ||
        __builtin_sub_overflow(upper[i], lower[i], &width)) {
      refuse("buffer " + std::to_string(i) + " lives in [" + std::to_string(lower[i]) + ", " +
             std::to_string(upper[i]) + ") and has " + std::to_string(size[i]) + " bytes");
    }
    if (__builtin_add_overflow(total, size[i], &total) || total > INT64_MAX / kCapacities) {
      refuse("all buffers together have more bytes than can be added up");
    }
  }
  return total;
}

}  // namespace

std::vector<int64_t> PlaceIntervals(const std::vector<int64_t>& lower,
                                    const std::vector<int64_t>& upper,
                                    const std::vector<int64_t>& size, int64_t capacity,
                                    int64_t max_steps) {
  const int64_t total = Check(lower, upper, size);
  if (size.empty()) return {};
  return Placer(lower, upper, size, std::min(capacity, total)).Run(max_steps);
}

}  // namespace jaxoffload

#include "planner/best_cuts.h"

#include <algorithm>
#include <limits>

namespace jaxoffload {
namespace {

// The working set of a run that grows towards the front, its end fixed.
class Growing {
 public:
  explicit Growing(const Stretch& stretch)
      : stretch_(stretch), held_(stretch.num_values), seen_(stretch.num_values, 0) {}

  void Begin(int64_t stop) {
    stop_ = stop;
    total_ = largest_ = products_ = 0;
    all_fuse_ = true;
  }

  void Add(int64_t first) {
    const Stretch& s = stretch_;
    for (int64_t k = s.written_offsets[first]; k < s.written_offsets[first + 1]; ++k) {
      const int64_t value = s.written[k];
      Hold(value, s.until[value] < stop_ ? 0 : s.bytes[value]);
    }
    for (int64_t k = s.read_offsets[first]; k < s.read_offsets[first + 1]; ++k) {
      if (seen_[s.read[k]] != stop_) Hold(s.read[k], s.bytes[s.read[k]]);
    }
    all_fuse_ = all_fuse_ && s.is_elementwise[first] != 0;
    largest_ = std::max(largest_, s.alone[first]);
    products_ += s.is_product[first];
  }

  int64_t products() const { return products_; }

  double Needs(double where_all_fuse) const {
    const bool in_one_loop = all_fuse_ && total_ <= largest_;
    return in_one_loop ? static_cast<double>(total_) / where_all_fuse : static_cast<double>(total_);
  }

 private:
  void Hold(int64_t value, int64_t now) {
    total_ += now - (seen_[value] == stop_ ? held_[value] : 0);
    held_[value] = now;
    seen_[value] = stop_;
  }

  const Stretch& stretch_;
  std::vector<int64_t> held_;
  std::vector<int64_t> seen_;  // the end of the run to which `held_` belongs
  int64_t stop_ = 0, total_ = 0, largest_ = 0, products_ = 0;
  bool all_fuse_ = true;
};

}  // namespace

Cuts BestCuts(const Stretch& stretch, const CutLimits& limits) {
  const int64_t count = stretch.num_operations;
  std::vector<double> best(count + 1, std::numeric_limits<double>::infinity());
  std::vector<double> needs(count + 1, 0.0);
  std::vector<int64_t> previous(count + 1, 0);
  best[0] = 0.0;
  Growing run(stretch);
  for (int64_t stop = 1; stop <= count; ++stop) {
    run.Begin(stop);
    for (int64_t first = stop - 1; first >= 0 && stop <= stretch.ends[first]; --first) {
      run.Add(first);
      if (run.products() > limits.max_products) break;
      // What one operation needs is not the cut's choice.
      const double needed = first == stop - 1 ? 0.0 : run.Needs(limits.where_all_fuse);
      if (needed > limits.max_bytes) continue;
      const double price = best[first] + limits.price + stretch.crossing[stop];
      if (price < best[stop]) {
        best[stop] = price;
        previous[stop] = first;
        needs[stop] = needed;
      }
    }
  }
  Cuts cuts{{}, 0.0};
  for (int64_t stop = count; stop > 0; stop = previous[stop]) {
    cuts.begins.push_back(previous[stop]);
    cuts.least = std::max(cuts.least, needs[stop]);
  }
  std::reverse(cuts.begins.begin(), cuts.begins.end());
  return cuts;
}

}  // namespace jaxoffload

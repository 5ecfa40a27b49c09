#include "planner/edges.h"

#include <algorithm>

namespace jaxoffload {
namespace {

constexpr int64_t kMostTails = 64;  // of a predecessor; more would make a wide reduction quadratic
// Vertices visited in search of longer paths: fewer find little, more find nothing more.
constexpr int64_t kLeastSteps = 16;
constexpr int64_t kMostSteps = 512;
constexpr int64_t kStepWork = 2'000'000;  // vertices times steps

// Reduces a graph vertex by vertex; of the earlier ones it asks the reduced rows.
class Reduction {
 public:
  explicit Reduction(const EdgeRows& rows)
      : rows_(rows),
        steps_(std::min(kMostSteps, kStepWork / std::max<int64_t>(rows.num_rows(), 1))),
        suspect_of_(rows.num_rows(), -1),
        seen_by_(rows.num_rows(), -1) {}

  EdgeRows Run() {
    for (vertex_ = 0; vertex_ < rows_.num_rows(); ++vertex_) {
      const EdgeRows::Row mine = rows_[vertex_];
      num_left_ = 0;
      for (const Edge& edge : mine) num_left_ += Suspect(edge);
      if (num_left_ > 0) Reduce(mine);
      row_.clear();
      for (const Edge& edge : mine) {
        if (edge.is_data || suspect_of_[edge.tail] == vertex_) row_.push_back(edge);
      }
      reduced_.Add(&row_);
    }
    return std::move(reduced_);
  }

 private:
  // A memory edge, which another path may replace.
  bool Suspect(const Edge& edge) {
    if (!edge.is_data) suspect_of_[edge.tail] = vertex_;
    return !edge.is_data;
  }

  bool IsSuspect(int32_t tail) const { return suspect_of_[tail] == vertex_; }

  void Drop(int32_t tail) {
    suspect_of_[tail] = -1;
    --num_left_;
  }

  int32_t Oldest(EdgeRows::Row mine) const {
    return std::find_if(mine.begin(), mine.end(),
                        [this](const Edge& edge) { return IsSuspect(edge.tail); })
        ->tail;
  }

  void Reduce(EdgeRows::Row mine) {
    const int64_t suspects = num_left_;
    const int32_t oldest = Oldest(mine);
    for (int64_t k = mine.size(); k-- > 0 && num_left_ > 0;) {
      const int32_t tail = mine.begin()[k].tail;
      if (tail <= oldest) break;
      const EdgeRows::Row theirs = reduced_[tail];
      if (theirs.size() > kMostTails) continue;
      for (const Edge& other : theirs) {
        if (IsSuspect(other.tail)) Drop(other.tail);
      }
    }
    const int64_t num_edges = mine.size() - (suspects - num_left_);
    if (steps_ >= kLeastSteps && num_left_ > 0 && num_edges > 1) Search(mine);
  }

  // Drops edges to predecessors that a bounded search from the others comes upon.
  void Search(EdgeRows::Row mine) {
    const int32_t oldest = Oldest(mine);
    stack_.clear();
    for (const Edge& edge : mine) {
      if (edge.tail > oldest && (edge.is_data || IsSuspect(edge.tail))) stack_.push_back(edge.tail);
    }
    for (int64_t k = 0; k < steps_ && !stack_.empty() && num_left_ > 0; ++k) {
      const int32_t next = stack_.back();
      stack_.pop_back();
      for (const Edge& edge : reduced_[next]) {
        if (IsSuspect(edge.tail)) Drop(edge.tail);
        if (edge.tail <= oldest || seen_by_[edge.tail] == vertex_) continue;
        seen_by_[edge.tail] = vertex_;
        stack_.push_back(edge.tail);
      }
    }
  }

  const EdgeRows& rows_;
  const int64_t steps_;
  EdgeRows reduced_;
  int64_t vertex_ = 0;    // whose row is being reduced
  int64_t num_left_ = 0;  // of its memory edges
  std::vector<int64_t> suspect_of_;
  std::vector<int64_t> seen_by_;  // of each vertex, the last search that has put it on the stack
  std::vector<int32_t> stack_;
  std::vector<Edge> row_;
};

}  // namespace

void EdgeRows::Add(std::vector<Edge>* row) {
  std::sort(row->begin(), row->end(), [](const Edge& a, const Edge& b) {
    return a.tail != b.tail ? a.tail < b.tail : a.is_data > b.is_data;
  });
  for (const Edge& edge : *row) {
    if (num_edges() == offsets_.back() || edges_.back().tail != edge.tail) edges_.push_back(edge);
  }
  offsets_.push_back(num_edges());
}

EdgeRows Without(const EdgeRows& rows, const std::vector<bool>& stays) {
  std::vector<int32_t> number(rows.num_rows());
  int32_t count = 0;
  for (int64_t v = 0; v < rows.num_rows(); ++v) number[v] = stays[v] ? count++ : -1;
  // Rows of all vertices, of those that go as well, with the old numbers.
  EdgeRows bypassed;
  EdgeRows found;
  std::vector<Edge> row, renumbered;
  for (int64_t v = 0; v < rows.num_rows(); ++v) {
    row.clear();
    for (const Edge& edge : rows[v]) {
      if (stays[edge.tail]) {
        row.push_back(edge);
        continue;
      }
      for (const Edge& other : bypassed[edge.tail]) row.push_back({other.tail, false});
    }
    bypassed.Add(&row);
    if (!stays[v]) continue;
    renumbered.clear();
    for (const Edge& edge : bypassed[v]) {
      renumbered.push_back({number[edge.tail], edge.is_data});
    }
    found.Add(&renumbered);
  }
  return found;
}

EdgeRows ReduceTransitively(const EdgeRows& rows) { return Reduction(rows).Run(); }

}  // namespace jaxoffload

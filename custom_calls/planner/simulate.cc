#include "planner/simulate.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <stdexcept>
#include <string>
#include <utility>

namespace jaxoffload {
namespace {

// A ready vertex; the smallest goes first.
struct Ready {
  double negative_priority;
  int32_t vertex;

  bool operator>(const Ready& other) const {
    if (negative_priority != other.negative_priority) {
      return negative_priority > other.negative_priority;
    }
    return vertex > other.vertex;
  }
};

template <typename T>
using Soonest = std::priority_queue<T, std::vector<T>, std::greater<T>>;

struct Lane {
  Soonest<Ready> ready;
  std::vector<int32_t> upcoming;  // if fixed: what is still to start, the next one last
  bool idle = true;
};

}  // namespace

Successors::Successors(const Dag& dag)
    : offsets_(dag.num_vertices + 1, 0), heads_(dag.num_edges), waits_(dag.num_vertices, 0) {
  for (int64_t e = 0; e < dag.num_edges; ++e) {
    const int32_t tail = dag.tail[e], head = dag.head[e];
    if (tail < 0 || tail >= head || head >= dag.num_vertices) {
      throw std::invalid_argument("edge " + std::to_string(e) + " leads from vertex " +
                                  std::to_string(tail) + " to " + std::to_string(head) + " of " +
                                  std::to_string(dag.num_vertices) +
                                  ". Pass edges from smaller to larger numbers");
    }
    ++offsets_[tail + 1];
    ++waits_[head];
  }
  for (int64_t v = 0; v < dag.num_vertices; ++v) offsets_[v + 1] += offsets_[v];
  std::vector<int64_t> next(offsets_.begin(), offsets_.end() - 1);
  for (int64_t e = 0; e < dag.num_edges; ++e) heads_[next[dag.tail[e]]++] = dag.head[e];
}

std::vector<double> LongestPaths(const Successors& successors, const double* seconds) {
  std::vector<double> longest(successors.num_vertices());
  for (int64_t v = successors.num_vertices() - 1; v >= 0; --v) {
    longest[v] = seconds[v];
    for (const int32_t* head = successors.begin(v); head != successors.end(v); ++head) {
      longest[v] = std::max(longest[v], seconds[v] + longest[*head]);
    }
  }
  return longest;
}

Times Simulate(const Successors& successors, const double* seconds, const LaneRules& rules) {
  const int64_t count = successors.num_vertices();
  for (int64_t v = 0; v < count; ++v) {
    if (rules.lane[v] < 0 || rules.lane[v] >= rules.num_lanes) {
      throw std::invalid_argument("vertex " + std::to_string(v) + " is on lane " +
                                  std::to_string(rules.lane[v]) + " of " +
                                  std::to_string(rules.num_lanes));
    }
  }
  std::vector<Lane> lanes(rules.num_lanes);
  std::vector<int32_t> waits = successors.waits();
  Times times{std::vector<double>(count), std::vector<double>(count)};
  const auto make_ready = [&](int32_t v) {
    lanes[rules.lane[v]].ready.push({rules.fixed ? 0 : -rules.priority[v], v});
  };
  for (int64_t v = count - 1; v >= 0; --v) {
    if (rules.fixed) lanes[rules.lane[v]].upcoming.push_back(static_cast<int32_t>(v));
    if (waits[v] == 0) make_ready(static_cast<int32_t>(v));
  }
  Soonest<std::pair<double, int32_t>> running;  // one of each busy lane, by its end
  double now = 0;
  const auto start_next = [&](Lane& lane) {
    if (!lane.idle || lane.ready.empty()) return;
    const int32_t v = lane.ready.top().vertex;
    if (rules.fixed) {
      if (v != lane.upcoming.back()) return;
      lane.upcoming.pop_back();
    }
    lane.ready.pop();
    lane.idle = false;
    times.start[v] = now;
    times.end[v] = now + seconds[v];
    running.push({times.end[v], v});
  };
  for (Lane& lane : lanes) start_next(lane);
  std::vector<int32_t> touched;
  while (!running.empty()) {
    const auto [end, done] = running.top();
    running.pop();
    now = end;
    lanes[rules.lane[done]].idle = true;
    touched.assign(1, rules.lane[done]);
    for (const int32_t* head = successors.begin(done); head != successors.end(done); ++head) {
      if (--waits[*head] > 0) continue;
      make_ready(*head);
      if (rules.lane[*head] != touched[0]) touched.push_back(rules.lane[*head]);
    }
    for (const int32_t lane : touched) start_next(lanes[lane]);
  }
  return times;
}

}  // namespace jaxoffload

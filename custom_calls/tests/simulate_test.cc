// Simulated runs beside the plainest way to the same times.

#include "planner/simulate.h"

#include <cstdint>
#include <random>
#include <vector>

#include "tests/check.h"

namespace jaxoffload::testing {
namespace {

// Looks at every vertex at every moment.
Times PlainTimes(const Dag& dag, const std::vector<double>& seconds, const LaneRules& rules) {
  const int64_t count = dag.num_vertices;
  Times times{std::vector<double>(count), std::vector<double>(count)};
  std::vector<int> state(count, 0);  // waits, runs, is done
  double now = 0;
  for (;;) {
    for (int32_t lane = 0; lane < rules.num_lanes; ++lane) {
      int64_t best = -1;
      bool is_free = true;
      for (int64_t v = count - 1; v >= 0; --v) {
        if (rules.lane[v] != lane || state[v] == 2) continue;
        is_free &= state[v] == 0;
        bool is_ready = true;
        for (int64_t e = 0; e < dag.num_edges; ++e) {
          is_ready &= dag.head[e] != v || state[dag.tail[e]] == 2;
        }
        if (rules.fixed) {
          best = is_ready ? v : -1;
        } else if (is_ready && (best < 0 || rules.priority[v] >= rules.priority[best])) {
          best = v;
        }
      }
      if (!is_free || best < 0) continue;
      state[best] = 1;
      times.start[best] = now;
      times.end[best] = now + seconds[best];
    }
    int64_t next = -1;
    for (int64_t v = 0; v < count; ++v) {
      if (state[v] == 1 && (next < 0 || times.end[v] < times.end[next])) next = v;
    }
    if (next < 0) return times;
    state[next] = 2;
    now = times.end[next];
  }
}

TEST(SimulateTakesTheBestReadyVertexOfEachLane) {
  constexpr int64_t kCount = 30;
  std::mt19937 random(3);
  for (int round = 0; round < 60; ++round) {
    std::vector<int32_t> tail, head, lane(kCount);
    std::vector<double> seconds(kCount), priority(kCount);
    for (int64_t k = 0; k < 2 * kCount; ++k) {
      head.push_back(1 + static_cast<int32_t>(random() % (kCount - 1)));
      tail.push_back(static_cast<int32_t>(random() % head.back()));
    }
    for (int64_t v = 0; v < kCount; ++v) {
      lane[v] = static_cast<int32_t>(random() % 3);
      seconds[v] = static_cast<double>(random() % 4);  // ties, and vertices that take no time
      priority[v] = static_cast<double>(random() % 4);
    }
    const Dag dag{kCount, static_cast<int64_t>(tail.size()), tail.data(), head.data()};
    for (const bool fixed : {false, true}) {
      const LaneRules rules{lane.data(), priority.data(), 3, fixed};
      const Times want = PlainTimes(dag, seconds, rules);
      const Times found = Simulate(Successors(dag), seconds.data(), rules);
      CHECK(found.start == want.start);
      CHECK(found.end == want.end);
    }
  }
}

TEST(SimulateFindsTheLongestPaths) {
  const std::vector<int32_t> tail{0, 0, 1, 2}, head{1, 2, 3, 3};
  const std::vector<double> seconds{1, 5, 2, 1};
  const Successors successors({4, 4, tail.data(), head.data()});
  CHECK(LongestPaths(successors, seconds.data()) == (std::vector<double>{7, 6, 3, 1}));
}

TEST(SimulateRefusesEdgesThatPointBackwards) {
  const std::vector<int32_t> tail{1}, head{1};
  CHECK_THROWS(Successors({2, 1, tail.data(), head.data()}), "from vertex 1 to 1 of 2");
}

}  // namespace
}  // namespace jaxoffload::testing

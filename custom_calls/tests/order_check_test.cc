// The verifier's searches beside the plainest way to the same answers.

#include "planner/order_check.h"

#include <cstdint>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "tests/check.h"

namespace jaxoffload::testing {
namespace {

TEST(OrderCheckFindsEveryPathAndNoOther) {
  std::mt19937 random(1);
  for (const int64_t count : {2, 40, 700}) {
    std::vector<int64_t> tail, head, from, to;
    for (int64_t k = 0; k < 2 * count; ++k) {
      head.push_back(1 + static_cast<int64_t>(random() % (count - 1)));
      tail.push_back(static_cast<int64_t>(random() % head.back()));
    }
    std::vector<std::vector<bool>> reached(count, std::vector<bool>(count, false));
    for (int64_t v = 0; v < count; ++v) {
      for (size_t e = 0; e < head.size(); ++e) {
        if (head[e] != v) continue;
        reached[tail[e]][v] = true;
        for (int64_t u = 0; u < count; ++u) {
          if (reached[u][tail[e]]) reached[u][v] = true;
        }
      }
      for (int64_t u = 0; u < count; ++u) {
        from.push_back(u);
        to.push_back(v);
      }
    }
    const std::vector<uint8_t> found =
        Reaches(count, tail.data(), head.data(), tail.size(), from.data(), to.data(), from.size());
    for (size_t k = 0; k < found.size(); ++k) CHECK((found[k] != 0) == reached[from[k]][to[k]]);
  }
}

TEST(OrderCheckFindsWhoFollowsWhomAtEachAddress) {
  constexpr int64_t kAddresses = 64;
  constexpr int64_t kMemories = 2;
  std::mt19937 random(2);
  for (int round = 0; round < 200; ++round) {
    std::vector<int64_t> memory, start, end, time;
    for (int64_t k = 0; k < 20; ++k) {
      memory.push_back(random() % kMemories);
      start.push_back(random() % kAddresses);
      end.push_back(start.back() + random() % (kAddresses - start.back() + 1));
      time.push_back(static_cast<int64_t>(k) - 4);  // the first four are there from the start
    }
    std::set<std::pair<int64_t, int64_t>> want;
    for (int64_t m = 0; m < kMemories; ++m) {
      for (int64_t address = 0; address < kAddresses; ++address) {
        std::vector<int64_t> before;
        for (int64_t k = 0; k < 20; ++k) {
          if (memory[k] != m || address < start[k] || end[k] <= address) continue;
          if (time[k] >= 0) {
            for (const int64_t old : before) want.emplace(old, k);
            before.clear();
          }
          before.push_back(k);
        }
      }
    }
    const std::vector<int64_t> pairs =
        NextWriters({memory.data(), start.data(), end.data(), time.data(), 20});
    std::set<std::pair<int64_t, int64_t>> found;
    for (size_t k = 0; k < pairs.size(); k += 2) found.emplace(pairs[k], pairs[k + 1]);
    CHECK(found == want);
    CHECK(found.size() * 2 == pairs.size());
  }
}

}  // namespace
}  // namespace jaxoffload::testing

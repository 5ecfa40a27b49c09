#include "graph/sampler.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "base/in_parallel.h"

namespace jaxoffload {
namespace {

constexpr int64_t kLeast = 256;  // nodes for which another thread is worth its start

// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): one state a node, no state between nodes.
class Draws {
 public:
  explicit Draws(uint64_t state) : state_(state) {}
  uint64_t Next() { return Mixed(state_ += 0x9E3779B97F4A7C15u); }
  // Evenly of [0, bound): by the high half of a product, the uneven rest drawn again (Lemire 2019).
  uint64_t Below(uint64_t bound) {
    for (;;) {
      const auto product = static_cast<unsigned __int128>(Next()) * bound;
      if (static_cast<uint64_t>(product) >= (0 - bound) % bound) return product >> 64;
    }
  }
  static uint64_t Mixed(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

 private:
  uint64_t state_;
};

// Calls take(edge) for up to `fanout` edges of [begin, end), ascending.
template <typename Take>
void Draw(int64_t begin, int64_t end, int64_t fanout, uint64_t state, std::vector<int64_t>& drawn,
          const Take& take) {
  const int64_t count = end - begin;
  if (fanout < 0 || count <= fanout) {
    for (int64_t e = begin; e < end; ++e) take(e);
    return;
  }
  // Floyd's way: `fanout` draws, every subset as likely as any other (Bentley and Floyd 1987).
  Draws draws(state);
  drawn.clear();
  for (int64_t last = count - fanout; last < count; ++last) {
    const auto one = static_cast<int64_t>(draws.Below(last + 1));
    const auto place = std::lower_bound(drawn.begin(), drawn.end(), one);
    if (place != drawn.end() && *place == one) {
      drawn.push_back(last);  // larger than all
    } else {
      drawn.insert(place, one);
    }
  }
  for (const int64_t one : drawn) take(begin + one);
}

// Calls take(edge) for what is drawn for a node.
template <typename Take>
void DrawForNode(const EdgeColumns& edges, int32_t node, int64_t fanout, bool per_relation,
                 uint64_t state, std::vector<int64_t>& drawn, const Take& take) {
  const int64_t end = edges.offsets[node + 1];
  state = Draws::Mixed(state + static_cast<uint64_t>(node));
  if (!per_relation) {
    Draw(edges.offsets[node], end, fanout, state, drawn, take);
    return;
  }
  for (int64_t begin = edges.offsets[node]; begin < end;) {
    const int32_t relation = edges.relations[begin];
    const int64_t stop =
        std::upper_bound(edges.relations + begin, edges.relations + end, relation) -
        edges.relations;
    Draw(begin, stop, fanout, Draws::Mixed(state + static_cast<uint64_t>(relation) + 1), drawn,
         take);
    begin = stop;
  }
}

}  // namespace

Sample SampleNeighbours(const EdgeColumns& edges, const int32_t* seeds, int64_t num_seeds,
                        const std::vector<int64_t>& fanouts, bool per_relation, uint64_t seed,
                        int num_threads) {
  Sample found;
  std::unordered_map<int32_t, int32_t> place;  // of a node in `nodes`
  for (int64_t i = 0; i < num_seeds; ++i) {
    const std::string name = "seeds[" + std::to_string(i) + "]=" + std::to_string(seeds[i]);
    if (seeds[i] < 0 || seeds[i] >= edges.num_nodes) {
      throw std::invalid_argument(name + " is none of the " + std::to_string(edges.num_nodes) +
                                  " nodes.");
    }
    if (!place.emplace(seeds[i], static_cast<int32_t>(i)).second)
      throw std::invalid_argument(name + " is there twice. Pass each node once.");
    found.nodes.push_back(seeds[i]);
  }
  found.node_offsets.push_back(num_seeds);
  found.edge_offsets.push_back(0);
  int64_t first = 0;
  for (size_t hop = 0; hop < fanouts.size(); ++hop) {
    const auto last = static_cast<int64_t>(found.nodes.size());
    const uint64_t state = Draws::Mixed(Draws::Mixed(seed) + hop + 1);
    const int64_t count = last - first;
    std::vector<std::vector<int64_t>> drawn_for(count);
    InParallel(count, num_threads, kLeast, [&](int64_t begin, int64_t end) {
      std::vector<int64_t> drawn;
      for (int64_t i = begin; i < end; ++i) {
        DrawForNode(edges, found.nodes[first + i], fanouts[hop], per_relation, state, drawn,
                    [&](int64_t e) { drawn_for[i].push_back(e); });
      }
    });
    for (int64_t i = 0; i < count; ++i) {
      for (const int64_t e : drawn_for[i]) {
        const auto next = static_cast<int32_t>(found.nodes.size());
        const auto [entry, is_new] = place.emplace(edges.sources[e], next);
        if (is_new) found.nodes.push_back(edges.sources[e]);
        found.sources.push_back(entry->second);
        found.destinations.push_back(static_cast<int32_t>(first + i));
        found.relations.push_back(edges.relations[e]);
      }
    }
    first = last;
    found.node_offsets.push_back(static_cast<int64_t>(found.nodes.size()));
    found.edge_offsets.push_back(static_cast<int64_t>(found.sources.size()));
  }
  return found;
}

}  // namespace jaxoffload

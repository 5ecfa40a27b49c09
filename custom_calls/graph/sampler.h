// Neighbours of nodes, drawn evenly and without replacement, by several threads: the same for the
// same seed whatever their number, since what is drawn for a node depends on the seed, the hop, the
// node and the relation alone.

#ifndef JAXOFFLOAD_GRAPH_SAMPLER_H_
#define JAXOFFLOAD_GRAPH_SAMPLER_H_

#include <cstdint>
#include <vector>

namespace jaxoffload {

// The edges into node n are [offsets[n], offsets[n + 1]), those of one relation side by side.
struct EdgeColumns {
  int64_t num_nodes;
  const int64_t* offsets;
  const int32_t* sources;
  const int32_t* relations;
};

struct Sample {
  std::vector<int32_t> nodes;                  // each once: the seeds, then in order of appearance
  std::vector<int64_t> node_offsets;           // nodes known before each hop, and at the end
  std::vector<int32_t> sources, destinations;  // of each edge, as positions in `nodes`
  std::vector<int32_t> relations;
  std::vector<int64_t> edge_offsets;  // where each hop's edges begin, and the end
};

// Hop by hop, up to fanouts[h] edges into each node that the hop before has found, of each relation
// if `per_relation`; a negative fanout takes all. Throws std::invalid_argument: a seed is no node,
// or is there twice.
Sample SampleNeighbours(const EdgeColumns& edges, const int32_t* seeds, int64_t num_seeds,
                        const std::vector<int64_t>& fanouts, bool per_relation, uint64_t seed,
                        int num_threads);

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_GRAPH_SAMPLER_H_

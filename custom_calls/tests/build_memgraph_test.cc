// MemGraphs of random TaskGraphs, run in random orders that their edges allow on bytes that know
// whose they are. (tests/plan judges them more thoroughly; here the sanitizers look on.)

#include "planner/build_memgraph.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/check.h"

namespace jaxoffload::testing {
namespace {

constexpr int64_t kUnit = 64;  // all sizes are multiples of it

// A TaskGraph that grows.
struct Draft {
  std::vector<int64_t> bytes, argument_offset, result_offset;
  std::vector<int32_t> device, argument, result, vertex_device, inputs, outputs, overwrites;
  std::vector<int64_t> result_offsets{0}, input_offsets{0}, output_offsets{0}, overwrite_offsets{0};
  std::vector<uint8_t> kind, adds, gathered;
  std::vector<int32_t> disk_arguments, disk_results, device_arguments, device_results;
  std::vector<std::pair<int32_t, int32_t>> replicas;

  int32_t AddTensor(int64_t size, int32_t where, int32_t flat_argument = -1) {
    bytes.push_back(size);
    device.push_back(where);
    argument.push_back(flat_argument);
    argument_offset.push_back(0);
    return static_cast<int32_t>(bytes.size()) - 1;
  }

  void AddVertex(int32_t where, const std::vector<int32_t>& reads,
                 const std::vector<int32_t>& writes, bool overwrites_first) {
    kind.push_back(static_cast<uint8_t>(TaskKind::kKernel));
    vertex_device.push_back(where);
    adds.push_back(0);
    inputs.insert(inputs.end(), reads.begin(), reads.end());
    input_offsets.push_back(static_cast<int64_t>(inputs.size()));
    outputs.insert(outputs.end(), writes.begin(), writes.end());
    output_offsets.push_back(static_cast<int64_t>(outputs.size()));
    if (overwrites_first) overwrites.insert(overwrites.end(), {0, 0});
    overwrite_offsets.push_back(static_cast<int64_t>(overwrites.size()) / 2);
  }

  // Every `each`th of the tensors that are left is a result.
  void AddResults(const std::vector<bool>& is_left, size_t each) {
    for (size_t t = 0; t < bytes.size(); ++t) {
      if (is_left[t] && t % each == 0) {
        result.push_back(static_cast<int32_t>(result.size()));
        result_offset.push_back(0);
      }
      result_offsets.push_back(static_cast<int64_t>(result.size()));
    }
    gathered.resize(inputs.size());
  }

  TaskColumns Columns() const {
    return {static_cast<int64_t>(bytes.size()),
            static_cast<int64_t>(kind.size()),
            bytes.data(),
            device.data(),
            argument.data(),
            argument_offset.data(),
            result_offsets.data(),
            result.data(),
            result_offset.data(),
            kind.data(),
            vertex_device.data(),
            adds.data(),
            input_offsets.data(),
            inputs.data(),
            gathered.data(),
            output_offsets.data(),
            outputs.data(),
            overwrite_offsets.data(),
            overwrites.data(),
            {},
            disk_arguments,
            disk_results,
            device_arguments,
            device_results,
            replicas};
  }
};

Draft RandomGraph(std::mt19937& random, int32_t num_devices, int64_t num_vertices) {
  Draft draft;
  const auto size = [&] { return static_cast<int64_t>(random() % 20) * kUnit; };
  std::vector<std::vector<int32_t>> alive(num_devices);
  for (int32_t a = 0; a < 6; ++a) {
    const auto where = static_cast<int32_t>(random() % num_devices);
    alive[where].push_back(draft.AddTensor(size(), where, a));
    if (random() % 4 == 0) draft.disk_arguments.push_back(a);
  }
  for (int32_t a = 0; a < 6; ++a) {  // what others have as well
    const int32_t where = (draft.device[a] + 1) % num_devices;
    if (where == draft.device[a] || random() % 2 == 0) continue;
    const auto own = static_cast<int32_t>(draft.bytes.size());
    alive[where].push_back(draft.AddTensor(draft.bytes[a], where, own));
    draft.replicas.emplace_back(own, a);
  }
  std::vector<bool> is_left(draft.bytes.size(), true);
  for (int64_t v = 0; v < num_vertices; ++v) {
    const auto where = static_cast<int32_t>(random() % num_devices);
    std::vector<int32_t>& here = alive[where];
    std::shuffle(here.begin(), here.end(), random);
    const size_t num_read = std::min<size_t>(here.size(), random() % 4);
    const std::vector<int32_t> reads(here.end() - num_read, here.end());
    const bool overwrites = num_read > 0 && random() % 4 == 0;
    std::vector<int32_t> writes;
    if (overwrites) {
      writes.push_back(draft.AddTensor(draft.bytes[reads[0]], where));
      here.erase(std::find(here.begin(), here.end(), reads[0]));
      is_left[reads[0]] = false;
    }
    while (writes.empty() || random() % 3 == 0) writes.push_back(draft.AddTensor(size(), where));
    here.insert(here.end(), writes.begin(), writes.end());
    is_left.resize(draft.bytes.size(), true);
    draft.AddVertex(where, reads, writes, overwrites);
  }
  draft.AddResults(is_left, 5);
  if (!draft.result.empty() && random() % 2 == 0) draft.disk_results.push_back(0);
  return draft;
}

// The most that any vertex needs, and a little more.
std::vector<int64_t> Budget(const TaskTable& table, int64_t more) {
  int64_t most = 0;
  for (int64_t v = 0; v < table.num_vertices(); ++v) {
    int64_t need = 0;
    for (const Row row : {table.inputs(v), table.outputs(v)}) {
      for (const int32_t t : row) need += RoundUp(table.columns().bytes[t], kPlaceAlignment);
    }
    most = std::max(most, need);
  }
  return std::vector<int64_t>(table.num_devices(), most + more * kPlaceAlignment);
}

// Runs a MemGraph; each byte knows which version it belongs to, and is read as that version only.
void Run(const TaskTable& table, const MemGraphColumns& plan, std::mt19937& random) {
  const auto count = static_cast<int64_t>(plan.kind.size());
  std::vector<int> waits(count, 0);
  for (const int32_t head : plan.edge_head) ++waits[head];
  std::vector<int32_t> ready;
  for (int32_t v = 0; v < count; ++v) {
    if (waits[v] == 0) ready.push_back(v);
  }
  std::map<std::tuple<uint8_t, int32_t, int64_t>, int32_t> owner;  // of (space, index, unit)
  const auto each_unit = [&](int32_t version, const auto& visit) {
    for (int64_t b = 0; b < table.columns().bytes[plan.tensor[version]]; b += kUnit) {
      visit(owner[{plan.space[version], plan.index[version], plan.offset[version] + b}]);
    }
  };
  for (size_t x = 0; x < plan.tensor.size(); ++x) {
    const auto version = static_cast<int32_t>(x);
    if (plan.writer[x] < 0) each_unit(version, [&](int32_t& unit) { unit = version; });
  }
  int64_t num_run = 0;
  while (!ready.empty()) {
    std::swap(ready[random() % ready.size()], ready.back());
    const int32_t v = ready.back();
    ready.pop_back();
    ++num_run;
    for (int64_t at = plan.input_offsets[v]; at < plan.input_offsets[v + 1]; ++at) {
      each_unit(plan.inputs[at], [&](int32_t unit) { CHECK_EQ(unit, plan.inputs[at]); });
    }
    for (int64_t at = plan.output_offsets[v]; at < plan.output_offsets[v + 1]; ++at) {
      each_unit(plan.outputs[at], [&](int32_t& unit) { unit = plan.outputs[at]; });
    }
    for (size_t e = 0; e < plan.edge_tail.size(); ++e) {
      if (plan.edge_tail[e] == v && --waits[plan.edge_head[e]] == 0) {
        ready.push_back(plan.edge_head[e]);
      }
    }
  }
  CHECK_EQ(num_run, count);
}

TEST(BuildMemGraphKeepsEveryByteThatIsStillRead) {
  std::mt19937 random(11);
  int num_evicting = 0, num_full = 0;
  int64_t num_from_peers = 0;
  for (int round = 0; round < 120; ++round) {
    const Draft draft = RandomGraph(random, 1 + static_cast<int32_t>(random() % 3), 40);
    const TaskTable table(draft.Columns());
    BuildOptions options;
    options.capacity = Budget(table, static_cast<int64_t>(random() % 3) * 8);
    options.disk = random() % 2 == 0;
    if (random() % 2 == 0) options.host_capacity = 4096 * (1 + random() % 8);
    options.in_place_io = random() % 2 == 0;
    options.victims = random() % 2 == 0 ? VictimRule::kCheapest : VictimRule::kFurthest;
    if (random() % 2 == 0) options.lookahead = 1 + random() % 5;
    options.unreduced = random() % 2 == 0;
    try {
      const MemGraphColumns plan = BuildMemGraph(table, options);
      Run(table, plan, random);
      const auto kind = static_cast<uint8_t>(Space::kHost);
      num_evicting += std::count(plan.space.begin(), plan.space.end(), kind) > 0;
      const auto peers = static_cast<uint8_t>(Kind::kPeerReload);
      num_from_peers += std::count(plan.kind.begin(), plan.kind.end(), peers);
    } catch (const HostTierFull& full) {
      CHECK(options.host_capacity.has_value());
      ++num_full;
    }
  }
  CHECK(num_evicting > 30);
  CHECK(num_full > 5);
  CHECK(num_from_peers > 20);
}

TEST(BuildMemGraphLetsSumsTakeWhatTheyAddInAnyOrder) {
  Draft draft;
  int32_t total = draft.AddTensor(kUnit, 0);
  draft.AddVertex(0, {}, {total}, false);
  for (int32_t k = 0; k < 3; ++k) {
    const int32_t part = draft.AddTensor(kUnit, 0, k);
    const int32_t made = draft.AddTensor(kUnit, 0);
    draft.AddVertex(0, {total, part}, {made}, true);
    draft.adds.back() = 1;
    total = made;
  }
  draft.AddVertex(0, {total}, {draft.AddTensor(kUnit, 0)}, false);
  draft.AddResults(std::vector<bool>(draft.bytes.size(), false), 1);
  const TaskTable table(draft.Columns());
  BuildOptions options;
  options.capacity = Budget(table, 8);
  const MemGraphColumns plan = BuildMemGraph(table, options);
  std::map<int32_t, std::vector<int32_t>> after;  // the TaskGraph's vertices that each waits for
  for (size_t e = 0; e < plan.edge_tail.size(); ++e) {
    if (plan.kind[plan.edge_tail[e]] != static_cast<uint8_t>(Kind::kKernel)) continue;
    after[plan.task_vertex[plan.edge_head[e]]].push_back(plan.task_vertex[plan.edge_tail[e]]);
  }
  for (int32_t add = 1; add <= 3; ++add) CHECK(after[add] == std::vector<int32_t>{0});
  CHECK((after[4] == std::vector<int32_t>{1, 2, 3}));
}

TEST(BuildMemGraphRefusesOptionsOfAnotherGraph) {
  std::mt19937 random(12);
  const Draft draft = RandomGraph(random, 1, 3);
  const TaskTable table(draft.Columns());
  BuildOptions options;
  CHECK_THROWS(BuildMemGraph(table, options), "capacity has not one entry for each device");
  options.capacity = Budget(table, 0);
  options.host_capacity = -1;
  CHECK_THROWS(BuildMemGraph(table, options), "host_capacity is negative");
  options.host_capacity.reset();
  options.places = {0};
  CHECK_THROWS(BuildMemGraph(table, options), "places has not one entry for each tensor");
}

TEST(TaskTableRefusesWhatIsNoSerialOrder) {
  const auto refused = [](const std::vector<int32_t>& reads, const std::vector<int32_t>& writes,
                          bool overwrites, int64_t size = kUnit) {
    Draft draft;
    draft.AddTensor(kUnit, 0, 0);
    draft.AddTensor(kUnit, 0);
    draft.AddTensor(size, 0);
    draft.AddVertex(0, {0}, {1}, /*overwrites_first=*/true);
    draft.AddVertex(0, reads, writes, overwrites);
    draft.AddResults({false, false, false}, 1);
    return TaskTable(draft.Columns()).num_vertices();
  };
  CHECK_EQ(refused({1}, {2}, true), 2);
  CHECK_THROWS(refused({1}, {3}, false), "vertex 1 names a tensor that is none");
  CHECK_THROWS(refused({2}, {2}, false), "vertex 1 reads what is not there");
  CHECK_THROWS(refused({0}, {2}, false), "vertex 1 reads what is not there");
  CHECK_THROWS(refused({1, 1}, {2}, false), "vertex 1 names an input twice");
  CHECK_THROWS(refused({1}, {1}, false), "vertex 1 writes what has been written");
  CHECK_THROWS(refused({}, {2}, true), "vertex 1 overwrites what it has not");
  CHECK_THROWS(refused({1}, {2}, true, 2 * kUnit), "what has another size");
  CHECK_THROWS(refused({1}, {2}, false, -1), "tensor 2 has a negative size");
  CHECK_THROWS(refused({1}, {2}, false, kMostBytes), "more bytes than can be added up");
}

}  // namespace
}  // namespace jaxoffload::testing

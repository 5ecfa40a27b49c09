#include "tests/plan_maker.h"

#include <algorithm>

namespace jaxoffload::testing {

int32_t PlanMaker::Version(Space space, int32_t index, int64_t offset, int64_t bytes) {
  a_.space.push_back(static_cast<uint8_t>(space));
  a_.index.push_back(index);
  a_.offset.push_back(offset);
  a_.bytes.push_back(bytes);
  a_.dtype.push_back(6);
  a_.dims.push_back(bytes);
  Grow(space, index, offset + bytes);
  return static_cast<int32_t>(a_.space.size()) - 1;
}

PlanArrays PlanMaker::Arrays() const {
  PlanArrays a = a_;
  const size_t n = a.kind.size();
  a.succ_offsets.assign(n + 1, 0);
  for (const auto& [tail, head] : edges_) {
    ++a.succ_offsets[tail + 1];
    a.succ.push_back(head);
  }
  for (size_t v = 0; v < n; ++v) a.succ_offsets[v + 1] += a.succ_offsets[v];
  a.input_offsets.insert(a.input_offsets.begin(), 0);
  a.output_offsets.insert(a.output_offsets.begin(), 0);
  a.dims_offsets.clear();
  for (size_t v = 0; v <= a.space.size(); ++v) a.dims_offsets.push_back(v);
  return a;
}

std::shared_ptr<const LoadedPlan> PlanMaker::Load() const {
  return std::make_shared<LoadedPlan>(LoadedPlan::Load(Arrays(), kDevices, 1));
}

int32_t PlanMaker::Add(Kind kind, int32_t lane, double priority, const std::vector<int32_t>& inputs,
                       const std::vector<int32_t>& outputs,
                       const std::vector<int32_t>& overwritten) {
  const int32_t v = static_cast<int32_t>(a_.kind.size());
  writer_.resize(a_.space.size(), -1);
  a_.kind.push_back(static_cast<uint8_t>(kind));
  a_.lane.push_back(lane);
  a_.priority.push_back(priority);
  a_.executable.push_back(IsKernel(kind) ? 0 : -1);
  a_.descriptions.push_back("v" + std::to_string(v));
  a_.inputs.insert(a_.inputs.end(), inputs.begin(), inputs.end());
  a_.outputs.insert(a_.outputs.end(), outputs.begin(), outputs.end());
  a_.overwritten.insert(a_.overwritten.end(), overwritten.begin(), overwritten.end());
  a_.input_offsets.push_back(a_.inputs.size());
  a_.output_offsets.push_back(a_.outputs.size());
  for (int32_t version : inputs) {
    if (writer_[version] >= 0) Edge(writer_[version], v);
  }
  for (int32_t version : outputs) writer_[version] = v;
  return v;
}

void PlanMaker::Grow(Space space, int32_t index, int64_t end) {
  if (space == Space::kHost) {
    a_.host_bytes = std::max(a_.host_bytes, end);
    return;
  }
  std::vector<int64_t>& sizes = space == Space::kDevice     ? a_.arena_bytes
                                : space == Space::kArgument ? a_.argument_bytes
                                                            : a_.result_bytes;
  if (static_cast<int64_t>(sizes.size()) <= index) sizes.resize(index + 1, 0);
  sizes[index] = std::max(sizes[index], end);
}

PlanMaker RandomPlan(uint64_t seed, int32_t num_vertices) {
  constexpr int64_t kUnit = 64;
  constexpr int64_t kArenaUnits = 24;
  struct Known {
    int32_t version = -1;
    Space space;
    int32_t index;
    int64_t begin;
    int64_t end;
    bool Overlaps(const Known& o) const {
      return space == o.space && index == o.index && begin < o.end && o.begin < end;
    }
  };
  Random random(seed);
  PlanMaker maker;
  std::vector<Known> history;               // every version that was ever written
  std::vector<Known> alive;                 // those whose bytes are still there
  std::vector<std::vector<int32_t>> users;  // by version: its writer, then its readers
  const auto add = [&](Known place) {
    place.version = maker.Version(place.space, place.index, place.begin * kUnit,
                                  (place.end - place.begin) * kUnit);
    users.emplace_back();
    return place;
  };
  // Whoever used anything that was ever where the vertex writes comes before it.
  const auto added = [&](int32_t vertex, const std::vector<int32_t>& inputs,
                         const std::vector<Known>& outputs) {
    for (int32_t input : inputs) users[input].push_back(vertex);
    for (const Known& out : outputs) {
      for (const Known& old : history) {
        if (!old.Overlaps(out)) continue;
        for (int32_t user : users[old.version]) {
          if (user != vertex) maker.Edge(user, vertex);
        }
      }
    }
    std::vector<Known> left;
    for (const Known& k : alive) {
      if (std::none_of(outputs.begin(), outputs.end(),
                       [&](const Known& out) { return k.Overlaps(out); })) {
        left.push_back(k);
      }
    }
    alive = left;
    for (const Known& out : outputs) {
      users[out.version].push_back(vertex);
      history.push_back(out);
      alive.push_back(out);
    }
  };
  // A random place that touches none of `keep`; begin < 0 if the first try fails.
  const auto place = [&](Space space, int32_t index, int64_t units,
                         const std::vector<Known>& keep) {
    const int64_t begin = random.Below(kArenaUnits - units + 1);
    Known found{-1, space, index, begin, begin + units};
    for (const Known& k : keep) {
      if (k.Overlaps(found)) found.begin = -1;
    }
    return found;
  };

  for (int32_t argument = 0; argument < 3; ++argument) {
    alive.push_back(add({-1, Space::kArgument, argument, 0, 1 + random.Below(4)}));
  }
  for (int32_t tries = 0; tries < 50 * num_vertices; ++tries) {
    if (static_cast<int32_t>(history.size()) >= num_vertices) break;
    const int32_t device = static_cast<int32_t>(random.Below(PlanMaker::kDevices));
    const double priority = static_cast<double>(random.Below(100));
    std::vector<Known> here;
    std::vector<Known> elsewhere;
    std::vector<Known> on_host;
    for (const Known& k : alive) {
      const bool on_device = k.space == Space::kDevice && k.index == device;
      (on_device ? here : elsewhere).push_back(k);
      if (k.space == Space::kHost || k.space == Space::kArgument) on_host.push_back(k);
    }
    const int64_t choice = random.Below(12);
    const Kind runs = choice < 10 ? Kind::kKernel : Kind::kHostKernel;
    const Space space = choice < 10 ? Space::kDevice : Space::kHost;
    const int32_t index = choice < 10 ? device : 0;
    const std::vector<Known>& near = choice < 10 ? here : on_host;
    if ((choice < 6 || choice >= 10) && !near.empty()) {
      std::vector<Known> read;
      std::vector<int32_t> inputs;
      for (int64_t i = 1 + random.Below(3); i > 0; --i) {
        const Known& k = near[random.Below(near.size())];
        if (std::count(inputs.begin(), inputs.end(), k.version) > 0) continue;
        inputs.push_back(k.version);
        read.push_back(k);
      }
      if ((choice < 2 || choice == 10) && read[0].space == space) {  // in place
        const Known out = add({-1, space, index, read[0].begin, read[0].end});
        const int32_t vertex =
            maker.Kernel(inputs, {out.version}, priority, {inputs[0]}, device, runs);
        added(vertex, inputs, {out});
        continue;
      }
      const Known first = place(space, index, 1 + random.Below(5), read);
      read.push_back(first);
      const Known second = place(space, index, 1 + random.Below(5), read);
      if (first.begin < 0) continue;
      std::vector<Known> outs = {add(first)};
      std::vector<int32_t> outputs = {outs[0].version};
      if (second.begin >= 0) {
        outs.push_back(add(second));
        outputs.push_back(outs[1].version);
      }
      added(maker.Kernel(inputs, outputs, priority, {}, device, runs), inputs, outs);
      continue;
    }
    const bool down = choice == 9 && !here.empty();
    const std::vector<Known>& sources = down ? here : elsewhere;
    if (sources.empty()) continue;
    const Known from = sources[random.Below(sources.size())];
    const Known to = place(down ? Space::kHost : Space::kDevice, down ? 0 : device,
                           from.end - from.begin, {from});
    if (to.begin < 0) continue;
    const Known out = add(to);
    const Kind kind = down                           ? Kind::kOffload
                      : from.space == Space::kDevice ? Kind::kTransfer
                                                     : Kind::kReload;
    added(maker.Copy(kind, from.version, out.version, device, priority), {from.version}, {out});
  }
  int32_t result = 0;
  for (const Known& k : std::vector<Known>(alive)) {
    if (k.space != Space::kDevice) continue;
    const Known out = add({-1, Space::kResult, result++, 0, k.end - k.begin});
    added(maker.Copy(Kind::kOffload, k.version, out.version, k.index), {k.version}, {out});
  }
  return maker;
}

}  // namespace jaxoffload::testing

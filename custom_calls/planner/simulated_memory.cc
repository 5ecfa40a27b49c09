#include "planner/simulated_memory.h"

#include <stdexcept>
#include <utility>

namespace jaxoffload {
namespace {

std::vector<int64_t> Places(const TaskTable& table) {
  std::vector<int64_t> found;
  for (int64_t t = 0; t < table.num_tensors(); ++t) {
    found.push_back(RoundUp(table.columns().bytes[t], kPlaceAlignment));
  }
  return found;
}

std::vector<int32_t> Devices(const TaskTable& table) {
  const int32_t* devices = table.columns().tensor_device;
  return {devices, devices + table.num_tensors()};
}

}  // namespace

SimulatedMemory::SimulatedMemory(const TaskTable& table, const CallersMemory& callers,
                                 const BuildOptions& options)
    : Occupancy(Places(table), {options.capacity.begin(), options.capacity.end()}, Devices(table)),
      table_(table),
      callers_(callers),
      places_(options.places),
      lower_(table, emitter_, options.host_capacity, options.disk),
      resident_start_(table.num_tensors(), -1),
      succeeded_(table.num_tensors(), -1),
      placed_(table.num_tensors(), false),
      version_(table.num_tensors(), -1),
      num_read_(table.num_tensors(), 0),
      last_touch_(table.num_tensors(), -1),
      left_(table.num_tensors()),
      is_reload_(table.num_tensors(), 0),
      is_still_there_(table.num_tensors(), 0) {
  PlaceResidents(options.residents);
  if (!lower_.is_capped()) return;
  for (int32_t t = 0; t < num_tensors(); ++t) lower_.NoteUse(t, UseAfter(t, 0), false);
}

void SimulatedMemory::PlaceResidents(const std::vector<int32_t>& residents) {
  std::vector<int64_t> end;
  for (int32_t d = 0; d < table_.num_devices(); ++d) {
    end.push_back(arena(d).space.free() / kPlaceAlignment * kPlaceAlignment);
  }
  for (const int32_t t : residents) {
    int64_t& start = end[device(t)];
    start -= size(t);
    if (start < 0 || !arena(device(t)).space.TakeAt(start, size(t))) {
      throw std::invalid_argument("build_memgraph: residents take more than there is");
    }
    resident_start_[t] = start;
  }
  if (residents.empty()) return;
  for (int64_t v = 0; v < table_.num_vertices(); ++v) {
    for (int64_t k = 0; k < table_.num_overwrites(v); ++k) {
      const auto [read, write] = table_.overwrite(v, k);
      const int32_t operand = table_.inputs(v)[read], output = table_.outputs(v)[write];
      if (!stays(operand)) continue;
      resident_start_[output] = resident_start_[operand];
      succeeded_[output] = succeeded_[operand] < 0 ? operand : succeeded_[operand];
    }
  }
}

// The alloc horizon ------------------------------------------------------------------------------

bool SimulatedMemory::PlaceVertex(int64_t vertex, Victims* victims) {
  const Needs& needs = NeedsOf(vertex);
  if (victims == nullptr && LacksRoom(needs.wanted)) return false;
  // What the host's cores make can be reloaded once it is there.
  for (const int32_t t : needs.reloads) {
    if (!lower_.HasCopy(t)) return false;
  }
  std::vector<int32_t> pending;
  if (!PlaceAll(vertex, needs.reloads, needs.wanted, victims, &pending)) return false;
  pending_.push_back(std::move(pending));
  BringResidents(vertex);
  if (table_.on_host(vertex)) return true;
  for (const int32_t t : table_.outputs(vertex)) placed_[t] = true;
  return true;
}

const SimulatedMemory::Needs& SimulatedMemory::NeedsOf(int64_t vertex) {
  if (needs_.vertex == vertex) return needs_;
  const TaskColumns& columns = table_.columns();
  needs_.vertex = vertex;
  needs_.reloads.clear();
  for (int64_t e = columns.input_offsets[vertex]; e < columns.input_offsets[vertex + 1]; ++e) {
    const int32_t t = columns.inputs[e];
    if (placed_[t] || stays(t) || callers_.read_in_place()[e]) continue;
    needs_.reloads.push_back(t);
  }
  needs_.wanted = needs_.reloads;
  for (int64_t e = columns.output_offsets[vertex]; e < columns.output_offsets[vertex + 1]; ++e) {
    if (table_.is_fresh(e) && !callers_.written_in_place()[e]) {
      needs_.wanted.push_back(columns.outputs[e]);
    }
  }
  std::stable_sort(needs_.wanted.begin(), needs_.wanted.end(),
                   [this](int32_t a, int32_t b) { return size(a) > size(b); });
  return needs_;
}

void SimulatedMemory::BringResidents(int64_t vertex) {
  const TaskColumns& columns = table_.columns();
  for (int64_t e = columns.input_offsets[vertex]; e < columns.input_offsets[vertex + 1]; ++e) {
    const int32_t t = columns.inputs[e];
    if (placed_[t] || !stays(t) || callers_.read_in_place()[e]) continue;
    version_[t] = emitter_.Version(t, Space::kDevice, device(t), resident_start_[t]);
    placed_[t] = true;
    const int32_t source = lower_.Fetch(t, vertex);
    emitter_.Vertex(Kind::kReload, vertex, device(t), {source}, {version_[t]}, {});
    emitter_.Stays(version_[t]);
    if (lower_.is_capped()) lower_.NoteUse(t, kNever, true);
  }
}

bool SimulatedMemory::LacksRoom(const std::vector<int32_t>& wanted) const {
  if (table_.num_devices() != 1) return false;
  int64_t bytes = 0;
  for (const int32_t t : wanted) bytes += size(t);
  return bytes > arena(0).space.free();
}

bool SimulatedMemory::PlaceAll(int64_t vertex, const std::vector<int32_t>& reloads,
                               const std::vector<int32_t>& wanted, Victims* victims,
                               std::vector<int32_t>* pending) {
  bool any_stays = false;
  for (const int32_t t : reloads) {
    is_reload_[t] = true;
    is_still_there_[t] = IsStillThere(t);
    any_stays |= is_still_there_[t] != 0;
  }
  std::vector<Taken> taken;
  bool found = TryToPlace(vertex, wanted, any_stays, victims, &taken);
  if (!found && any_stays) {
    for (const int32_t t : reloads) is_still_there_[t] = false;
    found = TryToPlace(vertex, wanted, false, victims, &taken);
  }
  for (const auto& [tensor, place] : taken) {
    if (is_still_there_[tensor]) {
      Hold(tensor, version_[tensor], place.start);
      UpdateVictim(tensor);
      continue;
    }
    const int32_t version = emitter_.Version(tensor, Space::kDevice, device(tensor), place.start);
    Hold(tensor, version, place.start);
    if (!is_reload_[tensor]) {
      for (const Piece& piece : place.pieces) emitter_.AppendTo(pending, piece.after);
      continue;
    }
    std::vector<int32_t> after;
    for (const Piece& piece : place.pieces) emitter_.AppendTo(&after, piece.after);
    Reload(tensor, version, vertex, after);
    UpdateVictim(tensor);
  }
  for (const int32_t t : reloads) is_reload_[t] = is_still_there_[t] = false;
  return found;
}

void SimulatedMemory::Reload(int32_t tensor, int32_t version, int64_t vertex,
                             const std::vector<int32_t>& after) {
  const int32_t peer = PeerOf(tensor);
  if (peer < 0) {
    const int32_t source = lower_.Fetch(tensor, vertex);
    emitter_.Vertex(Kind::kReload, vertex, device(tensor), {source}, {version}, after);
    return;
  }
  const bool has_left = !placed_[peer];
  if (has_left) {  // whoever has its place next waits for this reader too
    arena(device(peer)).space.TakeAt(left_[peer].start, size(peer));
    Hold(peer, version_[peer], left_[peer].start);
  }
  emitter_.Vertex(Kind::kPeerReload, vertex, device(tensor), {version_[peer]}, {version}, after);
  if (has_left) Leave(peer);
}

int32_t SimulatedMemory::PeerOf(int32_t tensor) const {
  const Row peers = table_.peers(tensor);
  for (const int32_t t : peers) {
    if (placed_[t]) return t;
  }
  for (const int32_t t : peers) {
    if (IsStillThere(t)) return t;
  }
  return kNone;
}

bool SimulatedMemory::TryToPlace(int64_t vertex, std::vector<int32_t> wanted, bool stay,
                                 Victims* victims, std::vector<Taken>* taken) {
  if (stay) {  // first those that can be in one place only
    std::stable_partition(wanted.begin(), wanted.end(),
                          [this](int32_t t) { return is_still_there_[t] != 0; });
  }
  for (const int32_t t : wanted) {
    AddressSpace& space = arena(device(t)).space;
    const int64_t wish = is_still_there_[t] ? left_[t].start : places_.empty() ? -1 : places_[t];
    std::optional<Place> found = wish < 0 ? space.Take(size(t)) : space.TakeAt(wish, size(t));
    if (!found && victims != nullptr && victims->FreeAPlace(device(t), size(t), vertex)) {
      found = space.Take(size(t));
    }
    if (!found) {
      for (auto other = taken->rbegin(); other != taken->rend(); ++other) {
        arena(device(other->tensor)).space.Undo(other->place, size(other->tensor));
      }
      taken->clear();
      return false;
    }
    taken->push_back({t, *std::move(found)});
  }
  return true;
}

bool SimulatedMemory::IsStillThere(int32_t tensor) const {
  const Left& left = left_[tensor];
  return left.start >= 0 &&
         arena(device(tensor)).space.IsUntouched(left.start, size(tensor), left.after);
}

void SimulatedMemory::Hold(int32_t tensor, int32_t version, int64_t start) {
  version_[tensor] = version;
  placed_[tensor] = true;
  left_[tensor] = {};
  Occupy(tensor, start);
}

void SimulatedMemory::UpdateVictim(int32_t tensor) {
  if (stays(tensor) && placed_[tensor]) return;
  if (start(tensor) < 0 && lower_.is_capped()) lower_.NoteUse(tensor, UseAfter(tensor, 0), false);
  if (start(tensor) < 0 || size(tensor) == 0) return;
  if (lower_.is_capped()) lower_.NoteUse(tensor, UseAfter(tensor, 1), true);
  AllowEviction(tensor, UseAfter(tensor, 0), lower_.SpillCostOf(tensor, size(tensor)));
}

int64_t SimulatedMemory::UseAfter(int32_t tensor, int64_t count) const {
  const Row readers = table_.readers(tensor);
  const int64_t at = num_read_[tensor] + count;
  return at < readers.size() ? readers[at] : kNever;
}

// Eviction ---------------------------------------------------------------------------------------

void SimulatedMemory::Evict(int32_t tensor, int64_t vertex) {
  if (!lower_.HasCopy(tensor)) lower_.Offload(tensor, version_[tensor], vertex);
  if (lower_.is_capped()) lower_.NoteUse(tensor, use(tensor), false);
  Leave(tensor);
}

bool SimulatedMemory::EvictUntilPlaced(int64_t vertex, int32_t device) {
  std::vector<std::pair<double, int32_t>> found;
  for (const auto& [start, t] : arena(device).at_start) {
    const int64_t wait = std::max(use(t), vertex) - vertex + 1;
    found.emplace_back(static_cast<double>(spill_cost(t)) / static_cast<double>(wait), t);
  }
  std::sort(found.begin(), found.end());
  for (const auto& [cost, t] : found) {
    Evict(t, vertex);
    needs_.vertex = -1;
    if (PlaceVertex(vertex, nullptr)) return true;
  }
  return false;
}

}  // namespace jaxoffload

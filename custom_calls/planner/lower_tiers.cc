#include "planner/lower_tiers.h"

namespace jaxoffload {
namespace {

// More than any vertex id: the next uses of copies that nobody will ask for lie above it.
constexpr int64_t kFirstNever = int64_t{1} << 40;
// Spill cost of a byte that is read from disk, in bytes copied between device and host: assumed.
constexpr int64_t kDiskCost = 8;
// Vertices of the host's cores for which a place rests: one under way, one whose results leave and
// one whose operands arrive.
constexpr int64_t kRest = 3;

std::vector<int64_t> Places(const TaskTable& table, bool uses_disk) {
  std::vector<int64_t> found;
  for (int64_t t = 0; t < table.num_tensors(); ++t) {
    found.push_back(RoundUp(table.columns().bytes[t], uses_disk ? kPage : kPlaceAlignment));
  }
  return found;
}

}  // namespace

LowerTiers::LowerTiers(const TaskTable& table, Emitter& emitter, std::optional<int64_t> capacity,
                       bool disk)
    : Occupancy(Places(table, disk || table.uses_disk()), {capacity},
                std::vector<int32_t>(table.num_tensors(), 0)),
      table_(table),
      emitter_(emitter),
      has_disk_(disk),
      is_capped_(capacity.has_value()),
      arguments_(table.num_tensors(), -1),
      in_callers_(table.num_tensors(), -1),
      in_host_(table.num_tensors(), -1),
      on_disk_(table.num_tensors(), -1),
      disk_start_(table.num_tensors(), -1),
      disk_space_(std::nullopt),
      next_use_(table.num_tensors(), 0),
      on_device_(table.num_tensors(), false),
      is_pinned_(table.num_tensors(), false),
      rule_(*this, VictimRule::kCheapest, table.num_vertices()) {
  const TaskColumns& columns = table.columns();
  for (int32_t t = 0; t < columns.num_tensors; ++t) {
    if (!table.is_argument(t)) continue;
    const int32_t argument = columns.argument[t];
    arguments_[t] = emitter.Version(t, Space::kArgument, argument, columns.argument_offset[t]);
    (table.on_disk(argument) ? on_disk_ : in_callers_)[t] = arguments_[t];
  }
}

int32_t LowerTiers::InMemory(int32_t tensor) const {
  return in_callers_[tensor] >= 0 ? in_callers_[tensor] : in_host_[tensor];
}

int64_t LowerTiers::SpillCostOf(int32_t tensor, int64_t size) const {
  if (InMemory(tensor) >= 0) return size;
  return on_disk_[tensor] >= 0 ? size * (1 + kDiskCost) : 2 * size;
}

void LowerTiers::NoteUse(int32_t tensor, int64_t next_use, bool on_device) {
  next_use_[tensor] = next_use;
  on_device_[tensor] = on_device;
  if (start(tensor) >= 0) UpdateVictim(tensor);
}

void LowerTiers::AddResult(int32_t tensor, int32_t version) {
  if (in_callers_[tensor] < 0) in_callers_[tensor] = version;
}

int32_t LowerTiers::Offload(int32_t tensor, int32_t source, int64_t vertex) {
  if (in_host_[tensor] < 0) {
    std::vector<int32_t> after;
    const int32_t version = TakePlace(tensor, vertex, &after);
    emitter_.Vertex(Kind::kOffload, vertex, device(tensor), {source}, {version}, after);
    Enter(tensor, version);
  }
  return in_host_[tensor];
}

int32_t LowerTiers::Fetch(int32_t tensor, int64_t vertex) {
  const int32_t found = InMemory(tensor);
  return found >= 0 ? found : Load(tensor, vertex);
}

int32_t LowerTiers::Hold(int32_t tensor, int32_t source, int64_t vertex) {
  int32_t found = in_host_[tensor];
  if (found < 0) found = source >= 0 ? Offload(tensor, source, vertex) : Load(tensor, vertex);
  Pin(tensor);
  return found;
}

int32_t LowerTiers::Make(int32_t tensor, int64_t vertex, std::vector<int32_t>* after) {
  const int32_t version = TakePlace(tensor, vertex, after);
  Enter(tensor, version);
  Pin(tensor);
  return version;
}

int32_t LowerTiers::Inherit(int32_t tensor, int32_t old) {
  const int32_t operand = emitter_.tensor(old);
  const int32_t version = emitter_.Version(tensor, Space::kHost, 0, emitter_.offset(old));
  Bequeath(operand);
  in_host_[operand] = -1;
  Enter(tensor, version);
  Pin(tensor);
  return version;
}

void LowerTiers::Release(int64_t vertex) {
  ForgetVictimsOf(vertex);
  for (const int32_t t : pinned_) is_pinned_[t] = false;
  pinned_.clear();
  if (!table_.on_host(vertex)) return;
  ++num_host_vertices_;
  while (!resting_.empty() && resting_.front().since + kRest <= num_host_vertices_) Wake();
}

void LowerTiers::Wake() {
  const Resting& place = resting_.front();
  arena(0).space.Give(place.start, place.size, place.after, place.used);
  resting_.pop_front();
}

void LowerTiers::StoreResult(int32_t tensor, int32_t source, int64_t part,
                             const std::vector<int32_t>& after, int64_t vertex) {
  int32_t host = in_host_[tensor];
  if (source >= 0) {
    host = Offload(tensor, source, vertex);
  } else if (host < 0) {
    host = Load(tensor, vertex);
  }
  const TaskColumns& columns = table_.columns();
  const int32_t version =
      emitter_.Version(tensor, Space::kResult, columns.result[part], columns.result_offset[part]);
  emitter_.Vertex(Kind::kStore, vertex, device(tensor), {host}, {version}, after);
  if (on_disk_[tensor] >= 0) return;
  on_disk_[tensor] = version;
  UpdateVictim(tensor);
}

void LowerTiers::Retire(int32_t tensor, int64_t used) {
  if (start(tensor) >= 0 && used >= 0 && table_.on_host(used)) {
    resting_.push_back({start(tensor), size(tensor), emitter_.LastUsers(in_host_[tensor]), used,
                        num_host_vertices_});
    Detach(tensor);
    in_host_[tensor] = -1;
  }
  if (start(tensor) >= 0) Leave(tensor, used);
  if (disk_start_[tensor] < 0) return;
  disk_space_.Give(disk_start_[tensor], DiskBytes(tensor), emitter_.LastUsers(on_disk_[tensor]),
                   used);
  disk_start_[tensor] = -1;
}

void LowerTiers::Evict(int32_t tensor, int64_t vertex) {
  if (on_disk_[tensor] < 0 && !on_device_[tensor]) {
    if (!has_disk_) throw HostTierFull{tensor};
    const Place place = *disk_space_.Take(DiskBytes(tensor));  // it grows
    std::vector<int32_t> after;
    AppendTo(&after, place);
    const int32_t version = emitter_.Version(tensor, Space::kDisk, 0, place.start);
    emitter_.Vertex(Kind::kStore, vertex, device(tensor), {in_host_[tensor]}, {version}, after);
    on_disk_[tensor] = version;
    disk_start_[tensor] = place.start;
  }
  Leave(tensor, vertex);
}

int32_t LowerTiers::Load(int32_t tensor, int64_t vertex) {
  std::vector<int32_t> after;
  const int32_t version = TakePlace(tensor, vertex, &after);
  emitter_.Vertex(Kind::kLoad, vertex, device(tensor), {on_disk_[tensor]}, {version}, after);
  Enter(tensor, version);
  return version;
}

int32_t LowerTiers::TakePlace(int32_t tensor, int64_t vertex, std::vector<int32_t>* after) {
  AddressSpace& space = arena(0).space;
  std::optional<Place> found = space.Take(size(tensor));
  while (!found && !resting_.empty()) {
    Wake();
    found = space.Take(size(tensor));
  }
  if (!found && rule_.FreeAPlace(0, size(tensor), vertex)) found = space.Take(size(tensor));
  if (!found) {
    for (const int32_t other : ByAge(0)) {
      if (!is_pinned_[other]) Evict(other, vertex);
    }
    found = space.Take(size(tensor));
  }
  if (!found) throw HostTierFull{tensor};
  AppendTo(after, *found);
  return emitter_.Version(tensor, Space::kHost, 0, found->start);
}

void LowerTiers::Pin(int32_t tensor) {
  if (is_pinned_[tensor]) return;
  is_pinned_[tensor] = true;
  pinned_.push_back(tensor);
  ForbidEviction(tensor);
}

void LowerTiers::Enter(int32_t tensor, int32_t version) {
  in_host_[tensor] = version;
  Occupy(tensor, emitter_.offset(version));
  UpdateVictim(tensor);
}

void LowerTiers::UpdateVictim(int32_t tensor) {
  if (!is_capped_ || start(tensor) < 0 || size(tensor) == 0 || is_pinned_[tensor]) return;
  int64_t use = next_use_[tensor];
  if (use == kNever) use = 2 * kFirstNever - in_host_[tensor];
  int64_t cost = kDiskCost * size(tensor);
  if (on_disk_[tensor] < 0) cost = on_device_[tensor] ? size(tensor) : 2 * cost;
  AllowEviction(tensor, use, cost);
}

void LowerTiers::Leave(int32_t tensor, int64_t used) {
  Vacate(tensor, emitter_.LastUsers(in_host_[tensor]), used);
  in_host_[tensor] = -1;
}

void LowerTiers::AppendTo(std::vector<int32_t>* after, const Place& place) const {
  for (const Piece& piece : place.pieces) emitter_.AppendTo(after, piece.after);
}

int64_t LowerTiers::DiskBytes(int32_t tensor) const {
  return RoundUp(table_.columns().bytes[tensor], kDiskBlock);
}

}  // namespace jaxoffload

// Which buffers and addresses the kernels of a plan use: their calls and slots, made once, and the
// addresses that slots take for a run.

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>

#include "pjrt/item_bytes.h"
#include "pjrt/plan_backend.h"
#include "tiers/host_block.h"

namespace jaxoffload {
namespace {

// XLA's CPU client takes zero-copy buffers at multiples of this (xla::cpu::MinAlign).
constexpr uintptr_t kAlignment = 64;

bool IsAligned(const char* address) {
  return reinterpret_cast<uintptr_t>(address) % kAlignment == 0;
}

std::string ShapeText(int32_t dtype, const int64_t* dims, int64_t num_dims) {
  std::string text = "PJRT type " + std::to_string(dtype) + " [";
  for (int64_t d = 0; d < num_dims; ++d) {
    if (d > 0) text += ",";
    text += std::to_string(dims[d]);
  }
  return text + "]";
}

[[noreturn]] void Refuse(const std::string& what) { throw std::invalid_argument("Plan: " + what); }

}  // namespace

void PlanBackend::AddCall(int32_t vertex_id) {
  const std::shared_ptr<Executable>& executable = executables_[plan_->executable(vertex_id)];
  if (executable == nullptr) {
    Refuse("executables[" + std::to_string(plan_->executable(vertex_id)) + "] is None, but " +
           plan_->Describe(vertex_id) + " needs it");
  }
  const Range inputs = plan_->inputs(vertex_id);
  const Range outputs = plan_->outputs(vertex_id);
  if (executable->num_outputs() != outputs.size()) {
    Refuse(plan_->Describe(vertex_id) + " has " + std::to_string(outputs.size()) +
           " outputs, but its executable " + std::to_string(executable->num_outputs()));
  }
  const bool on_host = plan_->kind(vertex_id) == Kind::kHostKernel;
  if (on_host && client_->host() == nullptr) {
    Refuse(plan_->Describe(vertex_id) + " is for the host's cores, which this client cannot use");
  }
  const int32_t device = on_host ? host_device() : plan_->device(vertex_id);
  Call& call = calls_[vertex_id];
  call.client = &client_of(device);
  if (executable->client().get() != call.client) {
    Refuse(plan_->Describe(vertex_id) + " has an executable of another client");
  }
  call.executable = executable->get();
  PJRT_Device* const wanted = call.client->device(on_host ? call.client->num_devices() : device);
  if (executable->device() != wanted) call.device = wanted;

  call.parameters.begin = static_cast<int64_t>(parameter_slot_.size());
  for (int64_t i = inputs.begin; i < inputs.end; ++i) {
    parameter_slot_.push_back(SlotOf(plan_->input(i), device));
  }
  call.outputs.begin = static_cast<int64_t>(output_slot_.size());
  for (int64_t o = outputs.begin; o < outputs.end; ++o) {
    const int32_t version = plan_->output(o);
    CheckOutput(vertex_id, o - outputs.begin, version);
    const int32_t slot = SlotOf(version, device);
    const int32_t overwritten = plan_->overwritten(o);
    if (overwritten < 0) parameter_slot_.push_back(slot);
    output_slot_.push_back(slot);
    donor_slot_.push_back(overwritten < 0 ? slot : SlotOf(overwritten, device));
    output_version_.push_back(version);
  }
  call.parameters.end = static_cast<int64_t>(parameter_slot_.size());
  call.outputs.end = static_cast<int64_t>(output_slot_.size());
}

void PlanBackend::CheckOutput(int32_t vertex_id, int64_t position, int32_t version_id) const {
  const Executable& executable = *executables_[plan_->executable(vertex_id)];
  const std::vector<int64_t>& dims = executable.output_dims(position);
  const int64_t* const planned = plan_->dims(version_id);
  const int64_t num_dims = plan_->num_dims(version_id);
  if (executable.output_type(position) == plan_->dtype(version_id) &&
      std::equal(dims.begin(), dims.end(), planned, planned + num_dims)) {
    return;
  }
  Refuse(
      "output " + std::to_string(position) + " of " + plan_->Describe(vertex_id) + " is " +
      ShapeText(plan_->dtype(version_id), planned, num_dims) + ", but that of its executable " +
      ShapeText(executable.output_type(position), dims.data(), static_cast<int64_t>(dims.size())));
}

int32_t PlanBackend::SlotOf(int32_t version_id, int32_t device) {
  int32_t& slot_id =
      (device == host_device() ? host_slot_of_version_ : slot_of_version_)[version_id];
  if (slot_id >= 0) {
    if (slots_[slot_id].device != device) {
      Refuse("version " + std::to_string(version_id) + " is used by kernels of devices " +
             std::to_string(slots_[slot_id].device) + " and " + std::to_string(device));
    }
    return slot_id;
  }
  CheckPlace(version_id, device);
  const Space space = plan_->space(version_id);
  const Owner owner = space == Space::kDevice ? Owner::kArena
                      : space == Space::kHost ? Owner::kHostTier
                                              : Owner::kCaller;
  const int32_t argument = DonatedArgumentOf(version_id);
  const bool has_place = owner != Owner::kCaller || argument >= 0;
  if (has_place && plan_->bytes(version_id) > 0) {  // empty ones take none, so do not share one
    const int64_t* const dims = plan_->dims(version_id);
    const auto place =
        std::make_tuple(device, argument, plan_->offset(version_id), plan_->dtype(version_id),
                        std::vector<int64_t>(dims, dims + plan_->num_dims(version_id)));
    const auto [found, is_new] = slot_of_place_.emplace(place, static_cast<int32_t>(slots_.size()));
    if (!is_new) return slot_id = found->second;
  }
  slot_id = static_cast<int32_t>(slots_.size());
  Slot slot;
  slot.version = version_id;
  slot.device = device;
  slot.owner = owner;
  slots_.push_back(slot);
  return slot_id;
}

// Of a version in a donated argument's memory, or in that of the result which has the same: that
// argument; -1 of others. What a copy writes to a result is not one: kernels cannot read it where
// the place is not aligned (PlaceSlot), whatever the argument is.
int32_t PlanBackend::DonatedArgumentOf(int32_t version_id) const {
  const Space space = plan_->space(version_id);
  const int32_t writer = plan_->writer(version_id);
  const bool is_argument = space == Space::kArgument && writer < 0;
  const bool is_result = space == Space::kResult && writer >= 0 && IsKernel(plan_->kind(writer));
  if (!is_argument && !is_result) return -1;
  const std::vector<int32_t>& donated = plan_->donated();
  for (size_t i = 0; i < donated.size(); i += 2) {
    if (donated[is_argument ? i : i + 1] == plan_->index(version_id)) return donated[i];
  }
  return -1;
}

void PlanBackend::CheckPlace(int32_t version_id, int32_t device) const {
  const auto entry = [version_id](const char* name, int64_t value) {
    return std::string(name) + "[" + std::to_string(version_id) + "]=" + std::to_string(value);
  };
  int64_t bytes = ItemBytes(plan_->dtype(version_id));
  if (bytes == 0) Refuse(entry("dtype", plan_->dtype(version_id)) + " has no whole bytes");
  bool fits = true;
  for (int64_t d = 0; d < plan_->num_dims(version_id); ++d) {
    fits = fits && !__builtin_mul_overflow(bytes, plan_->dims(version_id)[d], &bytes);
  }
  if (!fits) {
    Refuse(entry("bytes", plan_->bytes(version_id)) + ", but its shape has 2^63 or more");
  }
  if (bytes != plan_->bytes(version_id)) {
    Refuse(entry("bytes", plan_->bytes(version_id)) + ", but its shape has " +
           std::to_string(bytes));
  }
  const Space space = plan_->space(version_id);
  const bool on_host = device == host_device();
  const bool in_arena = space == Space::kDevice && plan_->index(version_id) == device && !on_host;
  const bool in_host_tier = space == Space::kHost && on_host;
  if (!in_arena && !in_host_tier && space != Space::kArgument && space != Space::kResult) {
    Refuse(entry("space", static_cast<int>(space)) + " and " +
           entry("index", plan_->index(version_id)) + ", but a kernel of " +
           (on_host ? "the host" : "device " + std::to_string(device)) + " uses it");
  }
  if ((in_arena || in_host_tier) && plan_->offset(version_id) % kAlignment != 0) {
    Refuse(entry("offset", plan_->offset(version_id)) + " is not a multiple of 64");
  }
}

// What the host's cores write and a device reads, or the other way round, passes by its place.
bool PlanBackend::IsForBoth(int32_t version_id) const {
  return slot_of_version_[version_id] >= 0 && host_slot_of_version_[version_id] >= 0;
}

bool PlanBackend::MayBeKept(const Slot& slot) const {
  constexpr int64_t kSmall = 1024;
  const int32_t writer = plan_->writer(slot.version);
  if (writer >= 0 && IsForBoth(slot.version)) return false;
  return slot.owner == Owner::kCaller && platform_.window() == 0 && !plan_->is_alone() &&
         DonatedArgumentOf(slot.version) < 0 && (writer < 0 || IsKernel(plan_->kind(writer))) &&
         plan_->bytes(slot.version) > 0 && plan_->bytes(slot.version) <= kSmall;
}

// Once all slots are made.
void PlanBackend::KeepSmallSlots() {
  size_t bytes = kAlignment;
  for (size_t slot_id = 0; slot_id < slots_.size(); ++slot_id) {
    Slot& slot = slots_[slot_id];
    if (slot.owner != Owner::kCaller) continue;
    slot.is_kept = MayBeKept(slot);
    if (!slot.is_kept) {
      movable_slots_.push_back(static_cast<int32_t>(slot_id));
      continue;
    }
    const bool is_argument = plan_->space(slot.version) == Space::kArgument;
    if (is_argument) kept_arguments_.push_back(static_cast<int32_t>(slot_id));
    bytes += (plan_->bytes(slot.version) + kAlignment - 1) / kAlignment * kAlignment;
  }
  if (bytes == kAlignment) return;
  kept_.reset(new char[bytes]);
  char* place = kept_.get();
  while (!IsAligned(place)) ++place;
  for (Slot& slot : slots_) {
    if (!slot.is_kept) continue;
    slot.address = place;
    place += (plan_->bytes(slot.version) + kAlignment - 1) / kAlignment * kAlignment;
  }
}

char* PlanBackend::PlaceOf(const Slot& slot, const RunContext& context) const {
  const std::vector<char*>& bases =
      plan_->space(slot.version) == Space::kArgument ? context.arguments : context.results;
  return bases[plan_->index(slot.version)] + plan_->offset(slot.version);
}

void PlanBackend::FillKept(RunContext& context) {
  for (const int32_t slot_id : kept_arguments_) {
    const Slot& slot = slots_[slot_id];
    const char* const place = PlaceOf(slot, context);
    const int64_t bytes = plan_->bytes(slot.version);
    std::memcpy(slot.address, place, bytes);
    if (!IsAligned(place)) {
      context.realigned_bytes.fetch_add(bytes, std::memory_order_relaxed);
    }
  }
}

void PlanBackend::TakeFromKept(int64_t output, RunContext& context) {
  const Slot& slot = slots_[output_slot_[output]];
  char* const place = context.address[output_version_[output]];
  std::memcpy(place, slot.address, plan_->bytes(slot.version));
  if (!IsAligned(place)) context.copied_outputs.fetch_add(1, std::memory_order_relaxed);
}

PJRT_Error* PlanBackend::Import(Slot& slot) {
  Client& client = client_of(slot.device);
  const int32_t device = slot.device == host_device() ? client.num_devices() : slot.device;
  return client.platform().Import(
      {slot.address, static_cast<PJRT_Buffer_Type>(plan_->dtype(slot.version)),
       plan_->dims(slot.version), static_cast<size_t>(plan_->num_dims(slot.version)), device},
      &slot.buffer);
}

void PlanBackend::Drop(Slot& slot) {
  if (slot.buffer == nullptr) return;
  DestroyBuffer(client_of(slot.device).api(), slot.buffer);
  slot.buffer = nullptr;
}

// The arenas' starts may have changed since the last run.
void PlanBackend::BindArenas() {
  platform_.Prepare();
  for (Slot& slot : slots_) {
    if (slot.owner == Owner::kArena) MoveTo(slot, DeviceBase(slot.device));
  }
}

// The same of what begins `offset` bytes after a base.
void PlanBackend::MoveTo(Slot& slot, char* base) {
  char* const address = plan_->bytes(slot.version) == 0 && slot.owner == Owner::kHostTier
                            ? nowhere_
                            : base + plan_->offset(slot.version);
  if (slot.address != address) Drop(slot);
  slot.address = address;
}

void PlanBackend::PlaceSlot(Slot& slot, char* place, RunContext& context) {
  const int64_t bytes = plan_->bytes(slot.version);
  char* address = place;
  if (bytes == 0) {
    // Never read or written; a caller's empty array may have no address.
    address = slot.device == host_device() ? nowhere_ : DeviceBase(slot.device);
  } else if (!IsAligned(place)) {
    if (platform_.window() > 0 && slot.device != host_device()) {
      throw std::runtime_error(
          "an array on the device begins at an address that is not a multiple of 64, where a "
          "kernel uses it. Pass whole arrays, not parts of others.");
    }
    const int32_t writer = plan_->writer(slot.version);
    if (writer >= 0 && (!IsKernel(plan_->kind(writer)) || IsForBoth(slot.version))) {
      throw std::runtime_error(plan_->Describe(writer) +
                               " writes to an address that is not a multiple of 64, where a kernel "
                               "reads. Pass results that are aligned to 64 bytes.");
    }
    address = HostBlock::Global().Allocate(bytes);
    slot.is_scratch = true;
    if (writer < 0) {
      CopyBytes(address, place, bytes, context.abort);
      context.realigned_bytes.fetch_add(bytes, std::memory_order_relaxed);
    }
  }
  if (slot.address != address) Drop(slot);
  slot.address = address;
}

}  // namespace jaxoffload

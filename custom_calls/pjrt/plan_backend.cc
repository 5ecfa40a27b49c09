#include "pjrt/plan_backend.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "pjrt/item_bytes.h"
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

PlanBackend::PlanBackend(std::shared_ptr<Client> client, std::shared_ptr<const LoadedPlan> plan,
                         std::vector<std::shared_ptr<Executable>> executables,
                         std::shared_ptr<DiskExtent> disk)
    : client_(std::move(client)),
      platform_(client_->platform()),
      api_(client_->api()),
      plan_(std::move(plan)),
      executables_(std::move(executables)),
      disk_(std::move(disk)),
      residents_(plan_, platform_),
      slot_of_version_(plan_->num_versions(), -1),
      host_slot_of_version_(plan_->num_versions(), -1),
      calls_(plan_->num_vertices()),
      kernel_end_(plan_->lanes().size()),
      complete_(platform_.window() > 0 ? plan_->num_vertices() : 0) {
  const int64_t disk_bytes = disk_ == nullptr ? 0 : disk_->bytes();
  if (disk_bytes < plan_->disk_bytes()) {
    Refuse("disk has " + std::to_string(disk_bytes) + " bytes, the plan needs " +
           std::to_string(plan_->disk_bytes()));
  }
  std::memset(&execute_options_, 0, sizeof(execute_options_));
  execute_options_.struct_size = PJRT_ExecuteOptions_STRUCT_SIZE;
  for (int32_t v = 0; v < plan_->num_vertices(); ++v) {
    if (IsKernel(plan_->kind(v))) AddCall(v);
    if (plan_->kind(v) == Kind::kLoad || plan_->kind(v) == Kind::kStore) uses_disk_ = true;
  }
  slot_of_place_.clear();
  parameters_.resize(parameter_slot_.size());
  outputs_.resize(output_slot_.size());
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].owner == Owner::kCaller) movable_slots_.push_back(static_cast<int32_t>(slot));
  }
  int32_t device = 0;
  const std::vector<int64_t>& arena_bytes = plan_->arena_bytes();
  try {
    for (; device < static_cast<int32_t>(arena_bytes.size()); ++device) {
      platform_.Acquire(device, arena_bytes[device]);
    }
  } catch (...) {
    while (device-- > 0) platform_.Release(device, arena_bytes[device]);
    throw;
  }
  HostBlock::Global().Expect(plan_->host_bytes());
}

PlanBackend::~PlanBackend() {
  HostBlock::Global().Forget(plan_->host_bytes());
  if (client_->IsForked()) return;
  for (Slot& slot : slots_) Drop(slot);
  const std::vector<int64_t>& arena_bytes = plan_->arena_bytes();
  for (size_t device = 0; device < arena_bytes.size(); ++device) {
    platform_.Release(static_cast<int32_t>(device), arena_bytes[device]);
  }
}

void PlanBackend::Release() {
  residents_.Forget();
  if (platform_.residents().empty()) client_->Trim();
}

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
  if (on_host && !client_->has_host_device()) {
    Refuse(plan_->Describe(vertex_id) + " is for the host's cores, which this client cannot use");
  }
  const int32_t device = on_host ? host_device() : plan_->device(vertex_id);
  Call& call = calls_[vertex_id];
  call.executable = executable->get();
  if (executable->device() != client_->device(device)) call.device = client_->device(device);

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
  const bool has_place = owner != Owner::kCaller && plan_->bytes(version_id) > 0;
  if (has_place) {  // empty ones take none, so do not share one
    const int64_t* const dims = plan_->dims(version_id);
    const auto place =
        std::make_tuple(device, plan_->offset(version_id), plan_->dtype(version_id),
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

PJRT_Error* PlanBackend::Import(Slot& slot) {
  return platform_.Import(
      {slot.address, static_cast<PJRT_Buffer_Type>(plan_->dtype(slot.version)),
       plan_->dims(slot.version), static_cast<size_t>(plan_->num_dims(slot.version)), slot.device},
      &slot.buffer);
}

void PlanBackend::Drop(Slot& slot) {
  if (slot.buffer == nullptr) return;
  DestroyBuffer(api_, slot.buffer);
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

void PlanBackend::Begin(RunContext& context) {
  BindArenas();
  residents_.Find(context);
  const int64_t host_bytes = plan_->host_bytes();
  if (host_bytes > 0) {
    try {
      host_ = HostBlock::Global().Allocate(host_bytes);
    } catch (const std::bad_alloc&) {
      throw std::runtime_error("no " + std::to_string(host_bytes) +
                               " bytes of host memory are left for what the device cannot hold. "
                               "Pass host_memory=, and disk= to go on from there.");
    }
    if (uses_disk_) fixed_ = std::make_unique<FixedMemory>(host_, host_bytes);
  }
  for (Slot& slot : slots_) {
    if (slot.owner == Owner::kHostTier) MoveTo(slot, host_);
  }
  if (plan_->is_alone()) {
    // Results and the host tier have their places by now.
    HostBlock::Global().ReleaseFree();
    const std::vector<int64_t>& arena_bytes = plan_->arena_bytes();
    for (size_t device = 0; device < arena_bytes.size(); ++device) {
      platform_.TrimBeyond(static_cast<int32_t>(device), arena_bytes[device]);
    }
  }
  const std::vector<int32_t>& donated = plan_->donated();
  for (size_t i = 0; i < donated.size(); i += 2) {
    // The plan takes both for one range. Where the caller could not make them one (XLA copies a
    // donated argument that is still needed), the result's bytes start as the argument's.
    char*& argument = context.arguments[donated[i]];
    char* const result = context.results[donated[i + 1]];
    const int64_t bytes = plan_->argument_bytes()[donated[i]];
    if (argument == result || bytes == 0) continue;
    if (plan_->argument_on_disk(donated[i])) {
      throw std::runtime_error("argument " + std::to_string(donated[i]) + " and result " +
                               std::to_string(donated[i + 1]) +
                               " are one range in the plan, but not the same extent on disk");
    }
    platform_.CopyNow(result, argument, bytes, context.abort);
    context.realigned_bytes.fetch_add(bytes, std::memory_order_relaxed);
    argument = result;
  }
  for (int32_t slot_id : movable_slots_) {
    Slot& slot = slots_[slot_id];
    const std::vector<char*>& bases =
        plan_->space(slot.version) == Space::kArgument ? context.arguments : context.results;
    PlaceSlot(slot, bases[plan_->index(slot.version)] + plan_->offset(slot.version), context);
  }
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
    if (writer >= 0 && !IsKernel(plan_->kind(writer))) {
      throw std::runtime_error(plan_->Describe(writer) +
                               " copies to an address that is not a multiple of 64, where a kernel "
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

void PlanBackend::End(RunContext& context) {
  residents_.Leave(context);
  if (has_bad_slots_.exchange(false)) {
    for (Slot& slot : slots_) Drop(slot);
  }
  fixed_.reset();
  if (host_ != nullptr) HostBlock::Global().Free(host_);
  host_ = nullptr;
  for (int32_t slot_id : movable_slots_) {
    Slot& slot = slots_[slot_id];
    if (!slot.is_scratch) continue;
    Drop(slot);
    HostBlock::Global().Free(slot.address);
    slot.address = nullptr;
    slot.is_scratch = false;
  }
}

bool PlanBackend::Execute(int32_t vertex_id, RunContext& context, std::string* error) {
  if (context.is_idle[vertex_id]) return !context.check || IsThere(vertex_id, context, error);
  if (IsKernel(plan_->kind(vertex_id))) return ExecuteKernel(vertex_id, context, error);
  const int32_t from = plan_->input(plan_->inputs(vertex_id).begin);
  const int32_t to = plan_->output(plan_->outputs(vertex_id).begin);
  if (plan_->kind(vertex_id) == Kind::kLoad) return ExecuteLoad(from, to, context, error);
  if (plan_->kind(vertex_id) == Kind::kStore) return ExecuteStore(from, to, context, error);
  const auto device = [this](int32_t version) {
    return plan_->space(version) == Space::kDevice ? plan_->index(version) : -1;
  };
  return platform_.Copy(
      plan_->lane(vertex_id),
      {context.address[to], context.address[from], plan_->bytes(to), device(to), device(from)},
      context.abort, error);
}

bool PlanBackend::IsQuick(int32_t vertex_id) const {
  switch (plan_->kind(vertex_id)) {
    case Kind::kOffload:
    case Kind::kReload:
    case Kind::kTransfer:
      return plan_->bytes(plan_->output(plan_->outputs(vertex_id).begin)) <=
             platform_.quick_bytes();
    default:
      return false;
  }
}

bool PlanBackend::IsThere(int32_t vertex_id, const RunContext& context, std::string* error) const {
  const int32_t from = plan_->input(plan_->inputs(vertex_id).begin);
  const int32_t to = plan_->output(plan_->outputs(vertex_id).begin);
  const bool is_seen = context.is_idle[vertex_id] == PlanResidents::kSeen &&
                       plan_->space(from) == Space::kArgument && platform_.window() == 0;
  if (!is_seen || std::memcmp(context.address[from], context.address[to], plan_->bytes(to)) == 0) {
    return true;
  }
  *error = plan_->Describe(vertex_id) + " was left out, but its bytes are not there";
  return false;
}

bool PlanBackend::Await(int32_t vertex_id, RunContext& context, std::string* error) {
  if (context.is_idle[vertex_id]) return true;
  switch (plan_->kind(vertex_id)) {
    case Kind::kLoad:
    case Kind::kStore:
    case Kind::kHostKernel:
      return true;  // they ended in Execute
    case Kind::kKernel:
      break;
    default:
      return platform_.Await(plan_->lane(vertex_id), error);
  }
  PJRT_Event* const complete = complete_[vertex_id];
  complete_[vertex_id] = nullptr;
  if (complete == nullptr) return true;
  PJRT_Error* const failure = AwaitAndDestroy(api_, complete);
  if (failure == nullptr) return true;
  *error = TakeMessage(api_, failure);
  has_bad_slots_ = true;
  return false;
}

bool PlanBackend::IsInOrder(int32_t lane) const {
  // Kernels share a stream; loads, stores and what the host's cores do end before they return.
  const Lanes& lanes = plan_->lanes();
  return lanes.IsDisk(lane) || lanes.IsHost(lane) || lanes.IsCompute(lane);
}

bool PlanBackend::ExecuteLoad(int32_t from, int32_t to, RunContext& context, std::string* error) {
  const DiskSource& source =
      plan_->space(from) == Space::kDisk ? *disk_ : *context.argument_sources[plan_->index(from)];
  return source.Read(plan_->offset(from), context.address[to], plan_->bytes(to), context.abort,
                     error);
}

bool PlanBackend::ExecuteStore(int32_t from, int32_t to, RunContext& context, std::string* error) {
  DiskExtent& extent =
      plan_->space(to) == Space::kDisk ? *disk_ : *context.result_extents[plan_->index(to)];
  return extent.Write(plan_->offset(to), context.address[from], plan_->bytes(to), context.abort,
                      error);
}

bool PlanBackend::ExecuteKernel(int32_t vertex_id, RunContext& context, std::string* error) {
  Call& call = calls_[vertex_id];
  for (int64_t p = call.parameters.begin; p < call.parameters.end; ++p) {
    Slot& slot = slots_[parameter_slot_[p]];
    if (slot.buffer == nullptr) {
      if (PJRT_Error* const failure = Import(slot)) {
        *error = TakeMessage(api_, failure);
        return false;
      }
    }
    parameters_[p] = slot.buffer;
  }
  PJRT_Buffer* const* const parameters = parameters_.data() + call.parameters.begin;
  PJRT_Buffer** const outputs = outputs_.data() + call.outputs.begin;
  PJRT_Event* complete = nullptr;
  JO_PJRT_ARGS(PJRT_LoadedExecutable_Execute, args);
  args.executable = call.executable;
  args.options = &execute_options_;
  args.argument_lists = &parameters;
  args.num_devices = 1;
  args.num_args = call.parameters.size();
  args.output_lists = &outputs;
  args.device_complete_events = &complete;
  args.execute_device = call.device;
  if (PJRT_Error* const failure = api_->PJRT_LoadedExecutable_Execute(&args)) {
    *error = TakeMessage(api_, failure);
    DropDonated(call);
    return false;
  }
  if (platform_.window() > 0 && plan_->kind(vertex_id) == Kind::kKernel) {
    if (!TakeOutputs(call, &complete, context, error)) return false;
    complete_[vertex_id] = complete;
    return true;
  }
  if (PJRT_Error* const failure = AwaitKernel(call, plan_->lane(vertex_id), complete)) {
    *error = TakeMessage(api_, failure);
    for (int64_t o = 0; o < call.outputs.size(); ++o) DestroyBuffer(api_, outputs[o]);
    DropDonated(call);
    return false;
  }
  complete = nullptr;
  return TakeOutputs(call, &complete, context, error);
}

PJRT_Error* PlanBackend::AwaitKernel(Call& call, int32_t lane, PJRT_Event* complete) {
  const auto is_over = [&] {
    JO_PJRT_ARGS(PJRT_Event_IsReady, args);
    args.event = complete;
    if (PJRT_Error* const error = api_->PJRT_Event_IsReady(&args)) {
      TakeMessage(api_, error);  // whoever awaits it is told
      return true;
    }
    return args.is_ready;
  };
  PJRT_Error* failure = nullptr;
  const auto sleep = [&] { failure = AwaitAndDestroy(api_, std::exchange(complete, nullptr)); };
  // XLA's thread looks for its next kernel for a while, too. After that it has to be woken, which
  // is soonest where this thread leaves its core to it.
  constexpr auto kAwake = std::chrono::microseconds(100);
  std::chrono::steady_clock::time_point& last = kernel_end_[lane];
  if (std::chrono::steady_clock::now() - last < kAwake) {
    call.patience.Await(is_over, sleep);
  } else {
    sleep();
  }
  if (complete != nullptr) failure = AwaitAndDestroy(api_, complete);
  last = std::chrono::steady_clock::now();
  return failure;
}

bool PlanBackend::TakeOutputs(const Call& call, PJRT_Event** complete, RunContext& context,
                              std::string* error) {
  const auto fail = [&] {
    for (int64_t o = call.outputs.begin; o < call.outputs.end; ++o) {
      DestroyBuffer(api_, outputs_[o]);
    }
    DropDonated(call);
    return false;
  };
  std::vector<char*> found;  // only filled if an output is not in place: no allocation otherwise
  for (int64_t o = call.outputs.begin; o < call.outputs.end; ++o) {
    JO_PJRT_ARGS(PJRT_Buffer_UnsafePointer, pointer);
    pointer.buffer = outputs_[o];
    if (PJRT_Error* const failure = api_->PJRT_Buffer_UnsafePointer(&pointer)) {
      *error = TakeMessage(api_, failure);
      if (*complete != nullptr) {
        if (PJRT_Error* const late = AwaitAndDestroy(api_, *complete)) TakeMessage(api_, late);
      }
      return fail();
    }
    const int32_t version = output_version_[o];
    char* const where = reinterpret_cast<char*>(pointer.buffer_pointer);
    const bool in_place = where == context.address[version] || plan_->bytes(version) == 0;
    if (in_place && found.empty()) continue;
    if (found.empty()) {
      found.resize(call.outputs.size(), nullptr);
      o = call.outputs.begin - 1;  // once more, this time taking notes
      continue;
    }
    if (!in_place) found[o - call.outputs.begin] = where;
  }
  if (!found.empty()) {
    PJRT_Error* const failure =
        *complete == nullptr ? nullptr : AwaitAndDestroy(api_, std::exchange(*complete, nullptr));
    if (failure != nullptr) {
      *error = TakeMessage(api_, failure);
      return fail();
    }
    try {
      CopyMisplaced(call, found, context);
    } catch (const std::exception& e) {
      *error = e.what();
      return fail();
    }
  }
  for (int64_t o = call.outputs.begin; o < call.outputs.end; ++o) {
    Drop(slots_[donor_slot_[o]]);
    Slot& slot = slots_[output_slot_[o]];
    Drop(slot);
    if (found.empty() || found[o - call.outputs.begin] == nullptr) {
      slot.buffer = outputs_[o];
    } else {
      DestroyBuffer(api_, outputs_[o]);
    }
  }
  return true;
}

// Outputs may lie in each other's places, so everything is taken aside first.
void PlanBackend::CopyMisplaced(const Call& call, const std::vector<char*>& found,
                                RunContext& context) {
  std::vector<std::vector<char>> aside(found.size());
  for (size_t o = 0; o < found.size(); ++o) {
    if (found[o] == nullptr) continue;
    const int64_t bytes = plan_->bytes(output_version_[call.outputs.begin + o]);
    aside[o].resize(bytes);
    platform_.CopyNow(aside[o].data(), found[o], bytes, context.abort);
  }
  for (size_t o = 0; o < found.size(); ++o) {
    if (found[o] == nullptr) continue;
    const int64_t entry = call.outputs.begin + static_cast<int64_t>(o);
    const Slot& slot = slots_[output_slot_[entry]];
    const int64_t bytes = static_cast<int64_t>(aside[o].size());
    platform_.CopyNow(context.address[output_version_[entry]], aside[o].data(), bytes,
                      context.abort);
    if (slot.is_scratch) platform_.CopyNow(slot.address, aside[o].data(), bytes, context.abort);
    context.copied_outputs.fetch_add(1, std::memory_order_relaxed);
  }
}

void PlanBackend::DropDonated(const Call& call) {
  for (int64_t o = call.outputs.begin; o < call.outputs.end; ++o) {
    Drop(slots_[donor_slot_[o]]);
  }
}

}  // namespace jaxoffload

#include "pjrt/plan_backend.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "tiers/disk_gather.h"
#include "tiers/host_block.h"

namespace jaxoffload {

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
    throw std::invalid_argument("Plan: disk has " + std::to_string(disk_bytes) +
                                " bytes, the plan needs " + std::to_string(plan_->disk_bytes()));
  }
  std::memset(&execute_options_, 0, sizeof(execute_options_));
  execute_options_.struct_size = PJRT_ExecuteOptions_STRUCT_SIZE;
  for (int32_t v = 0; v < plan_->num_vertices(); ++v) {
    if (IsKernel(plan_->kind(v))) AddCall(v);
    if (plan_->lanes().IsDisk(plan_->lane(v))) uses_disk_ = true;
  }
  slot_of_place_.clear();
  parameters_.resize(parameter_slot_.size());
  outputs_.resize(output_slot_.size());
  KeepSmallSlots();
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
    PlaceSlot(slot, PlaceOf(slot, context), context);
  }
  FillKept(context);
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
  if (MovesRows(plan_->kind(vertex_id))) return MoveRows(vertex_id, context, error);
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
    case Kind::kPeerReload:
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
    case Kind::kLoadRows:
    case Kind::kStore:
    case Kind::kStoreRows:
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

const DiskSource& PlanBackend::SourceOf(int32_t version, const RunContext& context) const {
  return plan_->space(version) == Space::kDisk ? *disk_
                                               : *context.argument_sources[plan_->index(version)];
}

bool PlanBackend::MoveRows(int32_t vertex_id, RunContext& context, std::string* error) {
  const bool is_load = plan_->kind(vertex_id) == Kind::kLoadRows;
  const Range read = plan_->inputs(vertex_id);
  const int32_t table = plan_->input(read.begin), numbers = plan_->input(read.begin + 1);
  const int32_t made = plan_->output(plan_->outputs(vertex_id).begin);
  const int32_t rows = is_load ? made : plan_->input(read.begin + 2);
  const int64_t count = plan_->bytes(numbers) / static_cast<int64_t>(sizeof(int32_t));
  const int64_t row_bytes = plan_->bytes(rows) / std::max<int64_t>(count, 1);
  const Gather moved{reinterpret_cast<const int32_t*>(context.address[numbers]), count, row_bytes,
                     plan_->offset(table) / std::max<int64_t>(row_bytes, 1)};
  int64_t found = -1;
  try {
    found = is_load ? GatherFromDisk(SourceOf(table, context), moved, context.address[rows],
                                     context.abort, error)
                    : ScatterToDisk(*context.result_extents[plan_->index(made)], moved,
                                    context.address[rows], context.abort, error);
  } catch (const std::bad_alloc&) {
    *error = "no memory is left to put " + std::to_string(count) + " row numbers in order";
  }
  if (found < 0) return false;
  constexpr auto kRelaxed = std::memory_order_relaxed;
  (is_load ? context.rows_loaded : context.rows_stored).fetch_add(found, kRelaxed);
  const int64_t bytes = found * row_bytes;
  (is_load ? context.row_bytes_loaded : context.row_bytes_stored).fetch_add(bytes, kRelaxed);
  return true;
}

bool PlanBackend::ExecuteLoad(int32_t from, int32_t to, RunContext& context, std::string* error) {
  const DiskSource& source = SourceOf(from, context);
  return source.Read(plan_->offset(from), context.address[to], plan_->bytes(to), context.abort,
                     error);
}

bool PlanBackend::ExecuteStore(int32_t from, int32_t to, RunContext& context, std::string* error) {
  DiskExtent& extent =
      plan_->space(to) == Space::kDisk ? *disk_ : *context.result_extents[plan_->index(to)];
  return extent.Write(plan_->offset(to), context.address[from], plan_->bytes(to), context.abort,
                      error);
}

}  // namespace jaxoffload

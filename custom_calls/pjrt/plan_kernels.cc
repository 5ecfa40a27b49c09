// How a kernel is executed: its buffers handed to XLA, its end awaited, its outputs taken back.

#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "pjrt/plan_backend.h"

namespace jaxoffload {

bool PlanBackend::ExecuteKernel(int32_t vertex_id, RunContext& context, std::string* error) {
  Call& call = calls_[vertex_id];
  const PJRT_Api* const api = call.client->api();
  for (int64_t p = call.parameters.begin; p < call.parameters.end; ++p) {
    Slot& slot = slots_[parameter_slot_[p]];
    if (slot.buffer == nullptr) {
      if (PJRT_Error* const failure = Import(slot)) {
        *error = TakeMessage(api, failure);
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
  if (PJRT_Error* const failure = api->PJRT_LoadedExecutable_Execute(&args)) {
    *error = TakeMessage(api, failure);
    DropDonated(call);
    return false;
  }
  if (platform_.window() > 0 && plan_->kind(vertex_id) == Kind::kKernel) {
    if (!TakeOutputs(call, &complete, context, error)) return false;
    complete_[vertex_id] = complete;
    return true;
  }
  std::chrono::steady_clock::time_point& last = kernel_end_[plan_->lane(vertex_id)];
  if (PJRT_Error* const failure = AwaitKernel(call, last, complete)) {
    *error = TakeMessage(api, failure);
    for (int64_t o = 0; o < call.outputs.size(); ++o) DestroyBuffer(api, outputs[o]);
    DropDonated(call);
    return false;
  }
  complete = nullptr;
  return TakeOutputs(call, &complete, context, error);
}

PJRT_Error* PlanBackend::AwaitKernel(Call& call, std::chrono::steady_clock::time_point& last,
                                     PJRT_Event* complete) {
  const PJRT_Api* const api = call.client->api();
  const auto is_over = [&] {
    JO_PJRT_ARGS(PJRT_Event_IsReady, args);
    args.event = complete;
    if (PJRT_Error* const error = api->PJRT_Event_IsReady(&args)) {
      TakeMessage(api, error);  // whoever awaits it is told
      return true;
    }
    return args.is_ready;
  };
  PJRT_Error* failure = nullptr;
  const auto sleep = [&] { failure = AwaitAndDestroy(api, std::exchange(complete, nullptr)); };
  // XLA's thread looks for its next kernel for a while, too. After that it has to be woken, which
  // is soonest where this thread leaves its core to it.
  constexpr auto kAwake = std::chrono::microseconds(100);
  if (std::chrono::steady_clock::now() - last < kAwake) {
    call.patience.Await(is_over, sleep);
  } else {
    sleep();
  }
  if (complete != nullptr) failure = AwaitAndDestroy(api, complete);
  last = std::chrono::steady_clock::now();
  return failure;
}

bool PlanBackend::TakeOutputs(const Call& call, PJRT_Event** complete, RunContext& context,
                              std::string* error) {
  const PJRT_Api* const api = call.client->api();
  const auto fail = [&] {
    for (int64_t o = call.outputs.begin; o < call.outputs.end; ++o) {
      DestroyBuffer(api, outputs_[o]);
    }
    DropDonated(call);
    return false;
  };
  std::vector<char*> found;  // only filled if an output is not in place: no allocation otherwise
  for (int64_t o = call.outputs.begin; o < call.outputs.end; ++o) {
    JO_PJRT_ARGS(PJRT_Buffer_UnsafePointer, pointer);
    pointer.buffer = outputs_[o];
    if (PJRT_Error* const failure = api->PJRT_Buffer_UnsafePointer(&pointer)) {
      *error = TakeMessage(api, failure);
      if (*complete != nullptr) {
        if (PJRT_Error* const late = AwaitAndDestroy(api, *complete)) TakeMessage(api, late);
      }
      return fail();
    }
    const int32_t version = output_version_[o];
    char* const where = reinterpret_cast<char*>(pointer.buffer_pointer);
    const Slot& slot = slots_[output_slot_[o]];
    const char* const expected = slot.is_kept ? slot.address : context.address[version];
    const bool in_place = where == expected || plan_->bytes(version) == 0;
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
        *complete == nullptr ? nullptr : AwaitAndDestroy(api, std::exchange(*complete, nullptr));
    if (failure != nullptr) {
      *error = TakeMessage(api, failure);
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
      if (slot.is_kept) TakeFromKept(o, context);
      slot.buffer = outputs_[o];
    } else {
      DestroyBuffer(api, outputs_[o]);
    }
  }
  return true;
}

// Outputs may lie in each other's places, so everything is taken aside first.
void PlanBackend::CopyMisplaced(const Call& call, const std::vector<char*>& found,
                                RunContext& context) {
  Platform& platform = call.client->platform();
  std::vector<std::vector<char>> aside(found.size());
  for (size_t o = 0; o < found.size(); ++o) {
    if (found[o] == nullptr) continue;
    const int64_t bytes = plan_->bytes(output_version_[call.outputs.begin + o]);
    aside[o].resize(bytes);
    platform.CopyNow(aside[o].data(), found[o], bytes, context.abort);
  }
  for (size_t o = 0; o < found.size(); ++o) {
    if (found[o] == nullptr) continue;
    const int64_t entry = call.outputs.begin + static_cast<int64_t>(o);
    const Slot& slot = slots_[output_slot_[entry]];
    const int64_t bytes = static_cast<int64_t>(aside[o].size());
    platform.CopyNow(context.address[output_version_[entry]], aside[o].data(), bytes,
                     context.abort);
    if (slot.is_scratch || slot.is_kept)
      platform.CopyNow(slot.address, aside[o].data(), bytes, context.abort);
    context.copied_outputs.fetch_add(1, std::memory_order_relaxed);
  }
}

void PlanBackend::DropDonated(const Call& call) {
  for (int64_t o = call.outputs.begin; o < call.outputs.end; ++o) {
    Drop(slots_[donor_slot_[o]]);
  }
}

}  // namespace jaxoffload

// "jaxoffload_run": a whole plan as one custom call of an outer XLA program.
//
// The call's instantiation finds the plan by its key, once, and XLA keeps what it found for as long
// as the program lives: no look-up in a run, and no plan outlives what calls it.
//
// Results are the plan's, and one of no bytes that nobody reads: why is said where calls are made.
//
// On CPU the handler queues the run and returns a Future, so no thread of XLA's waits in it, and
// the outer program goes on from a callback thread, never from a lane. On CUDA it waits: see
// RunOnCuda.

#include "ffi.h"

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/stamp.h"
#include "cuda/driver.h"
#include "launch_attribute.h"
#include "launcher/callback_threads.h"
#include "pjrt/plan.h"
#include "xla/ffi/api/ffi.h"

namespace jaxoffload {
namespace {

namespace ffi = xla::ffi;

ffi::Future Failed(const std::string& message) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ffi::Error::InvalidArgument(message));
  return future;
}

template <typename Buffers>
std::vector<char*> Addresses(const Buffers& buffers, const char* name,
                             const std::vector<int64_t>& planned) {
  if (buffers.size() != planned.size()) {
    throw std::invalid_argument("jaxoffload_run: " + std::to_string(buffers.size()) + " " + name +
                                ", the plan has " + std::to_string(planned.size()));
  }
  std::vector<char*> addresses;
  addresses.reserve(buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    ffi::AnyBuffer buffer = [&] {
      if constexpr (std::is_same_v<Buffers, ffi::RemainingArgs>) {
        return buffers.template get<ffi::AnyBuffer>(i).value();
      } else {
        return *buffers.template get<ffi::AnyBuffer>(i).value();
      }
    }();
    if (static_cast<int64_t>(buffer.size_bytes()) != planned[i]) {
      throw std::invalid_argument("jaxoffload_run: " + std::string(name) + "[" + std::to_string(i) +
                                  "] has " + std::to_string(buffer.size_bytes()) +
                                  " bytes, the plan has " + std::to_string(planned[i]));
    }
    addresses.push_back(static_cast<char*>(buffer.untyped_data()));
  }
  return addresses;
}

// A plan, and what is the same in all its runs by one call.
struct Callee {
  explicit Callee(BoundPlan found) : bound(std::move(found)) {
    if (bound.plan == nullptr) return;
    const LoadedPlan& loaded = bound.plan->loaded();
    for (size_t i = 0; i < loaded.argument_bytes().size(); ++i) {
      if (IsBound(i)) continue;
      operand_index.push_back(i);
      operand_bytes.push_back(loaded.argument_bytes()[i]);
    }
    if (!bound.fixed.empty()) operand_bytes.push_back(sizeof(uint64_t));
    result_bytes = loaded.result_bytes();
    result_bytes.push_back(0);  // one that nobody reads
  }
  bool IsBound(size_t argument) const {
    return argument < bound.arguments.size() && bound.arguments[argument].is_bound;
  }

  BoundPlan bound;
  std::vector<size_t> operand_index;   // arguments that operands bring
  std::vector<int64_t> operand_bytes;  // of those, and of the stamp behind them
  std::vector<int64_t> result_bytes;
};

// What a call holds of its plan, from its instantiation until XLA destroys the program; by
// platform, for each numbers its types by itself.
struct CpuCall {
  static ffi::TypeId id;
  Callee callee;
};
struct CudaCall {
  static ffi::TypeId id;
  Callee callee;
};
ffi::TypeId CpuCall::id = {};
ffi::TypeId CudaCall::id = {};
const ffi::TypeInfo kCpuCallInfo = ffi::MakeTypeInfo<CpuCall>();
const ffi::TypeInfo kCudaCallInfo = ffi::MakeTypeInfo<CudaCall>();

template <typename Call>
ffi::ErrorOr<std::unique_ptr<Call>> Instantiate(std::string_view key, LaunchAttribute) {
  try {
    auto call = std::make_unique<Call>(Call{Callee(FindPlan(std::string(key)))});
    if (call->callee.bound.plan != nullptr) return call;
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "jaxoffload_run: no plan has the key " + std::string(key) +
        ". This program was compiled in another process; compile it in this one."));
  } catch (const std::exception& e) {
    return ffi::Unexpected(ffi::Error::Internal(e.what()));
  }
}

using Done = std::function<void(const RunReport&, const Plan&)>;

// Queues the run of a plan. Operands are the plan's arguments but for those that were bound when
// it was registered. Without `done` the caller waits for the end. Throws std::exception.
std::shared_ptr<Run> Submit(const Callee& callee, ffi::RemainingArgs operands,
                            ffi::RemainingRets results, const RunOptions& options, Done done) {
  const BoundPlan& bound = callee.bound;
  const std::shared_ptr<Plan>& plan = bound.plan;
  const LoadedPlan& loaded = plan->loaded();
  std::vector<char*> arguments(loaded.argument_bytes().size(), nullptr);
  std::vector<std::shared_ptr<DiskSource>> sources;
  std::vector<std::shared_ptr<void>> owners;
  Contents contents;
  if (!bound.arguments.empty() || !bound.fixed.empty()) {
    contents.argument_stamps.assign(arguments.size(), kNoStamp);
  }
  if (!bound.arguments.empty()) sources.resize(arguments.size());
  for (size_t i = 0; i < bound.arguments.size(); ++i) {
    if (!callee.IsBound(i)) continue;
    arguments[i] = bound.arguments[i].address;
    sources[i] = bound.arguments[i].source;
    owners.push_back(bound.arguments[i].owner);
    if (bound.arguments[i].stamp) {
      contents.argument_stamps[i] = bound.arguments[i].stamp->value();
    }
  }
  const std::vector<char*> given = Addresses(operands, "arguments", callee.operand_bytes);
  const std::vector<size_t>& index = callee.operand_index;
  for (size_t i = 0; i < index.size(); ++i) arguments[index[i]] = given[i];
  if (!bound.fixed.empty()) {
    uint64_t first = kNoStamp;
    std::memcpy(&first, given.back(), sizeof(first));
    for (const FixedArgument& each : bound.fixed) {
      contents.argument_stamps[each.argument] = first + each.number;
    }
  }
  std::vector<char*> places = Addresses(results, "results", callee.result_bytes);
  places.pop_back();
  const bool waits = done == nullptr;
  std::function<void(const std::shared_ptr<const RunReport>&)> noted;
  if (!waits) {
    noted = [plan, done = std::move(done)](const std::shared_ptr<const RunReport>& report) {
      plan->set_last_report(report);
      done(*report, *plan);
    };
  }
  const std::shared_ptr<Run> run =
      plan->Submit(std::move(arguments), std::move(places), options, std::move(noted),
                   std::move(sources), {}, std::move(owners), std::move(contents), waits);
  if (waits) {
    constexpr std::chrono::seconds kLong(60);
    run->WaitTelling(kLong, [&loaded, &plan] {
      const char* const why =
          plan->client()->driver() == nullptr
              ? ""
              : " If another thread compiles for the GPU, XLA has each wait for the other: compile "
                "before the run, or call the offloaded function outside of jax.jit.";
      std::fprintf(stderr, "jaxoffload: of a run of %d vertices none has ended for a minute.%s\n",
                   loaded.num_vertices(), why);
    });
    plan->set_last_report(run->report());
  }
  return run;
}

bool (*is_callers_thread)() = [] { return false; };

std::string Failure(const RunReport& report, const Plan& plan) {
  std::string where;
  if (report.error_vertex >= 0) where = " in " + plan.loaded().Describe(report.error_vertex);
  return "the run stopped" + where + ": " + report.error_message;
}

ffi::Future RunOnCpu(CpuCall* call, ffi::RemainingArgs operands, ffi::RemainingRets results,
                     std::string_view, LaunchAttribute launch) {
  try {
    ffi::Promise promise;
    ffi::Future future(promise);
    auto done = [promise](const RunReport& report, const Plan& plan) mutable {
      if (report.error_message.empty()) {
        promise.SetAvailable();
      } else {
        promise.SetError(ffi::Error::Internal(Failure(report, plan)));
      }
    };
    const std::shared_ptr<Plan>& plan = call->callee.bound.plan;
    const RunOptions options = launch.Options();
    // A loop's next iteration comes here on the thread that was told of the last one's end, which
    // is ours; what XLA takes to be quick, on the caller's, which waits for the end in any case.
    // XLA's own threads may not block, for programs that a vertex calls need them.
    if (plan->IsShort() && (CallbackThreads::IsOneOfThem() || is_callers_thread())) {
      done(*Submit(call->callee, operands, results, options, nullptr)->report(), *plan);
    } else {
      Submit(call->callee, operands, results, options, done);
    }
    return future;
  } catch (const std::exception& e) {
    return Failed(e.what());
  }
}

// On a GPU the handler is called while XLA puts the outer program on its stream, by a thread that
// may wait: what is ahead on the stream comes first, then the run, then what is behind it.
ffi::Error RunOnCuda(void* stream, CudaCall* call, ffi::RemainingArgs operands,
                     ffi::RemainingRets results, std::string_view, LaunchAttribute launch) {
  try {
    const std::shared_ptr<Plan>& plan = call->callee.bound.plan;
    if (plan->client()->driver() != nullptr) {
      const CudaDriver& driver = *plan->client()->driver();
      const int code = driver.AwaitStream(stream);
      if (code != 0) return ffi::Error::Internal(driver.Describe(code, "waiting for operands"));
    }
    const auto report =
        Submit(call->callee, operands, results, launch.Options(), nullptr)->report();
    if (report->error_message.empty()) return ffi::Error::Success();
    return ffi::Error::Internal(Failure(*report, *plan));
  } catch (const std::exception& e) {
    return ffi::Error::InvalidArgument(e.what());
  }
}

template <typename Binding>
auto WithAttributes(Binding binding) {
  return std::move(binding).template Attr<std::string_view>("key").template Attr<LaunchAttribute>(
      "launch");
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(kHoldOnCpu, Instantiate<CpuCall>,
                              WithAttributes(ffi::Ffi::BindInstantiate()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(kHoldOnCuda, Instantiate<CudaCall>,
                              WithAttributes(ffi::Ffi::BindInstantiate()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kRunOnCpu, RunOnCpu,
    WithAttributes(ffi::Ffi::Bind().Ctx<ffi::State<CpuCall>>().RemainingArgs().RemainingRets()));

// Without the trait that would let XLA record it in a command buffer.
XLA_FFI_DEFINE_HANDLER_SYMBOL(kRunOnCuda, RunOnCuda,
                              WithAttributes(ffi::Ffi::Bind()
                                                 .Ctx<ffi::PlatformStream<void*>>()
                                                 .Ctx<ffi::State<CudaCall>>()
                                                 .RemainingArgs()
                                                 .RemainingRets()));

ffi::Error NewStamps(ffi::RemainingArgs operands,
                     ffi::Result<ffi::BufferR1<ffi::DataType::U32>> result) {
  if (result->size_bytes() != sizeof(uint64_t)) {
    return ffi::Error::InvalidArgument("jaxoffload_stamps: the result has " +
                                       std::to_string(result->size_bytes()) + " bytes, not 8");
  }
  const uint64_t first = Stamp::Next(operands.size());
  std::memcpy(result->untyped_data(), &first, sizeof(first));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kNewStamps, NewStamps,
    ffi::Ffi::Bind().RemainingArgs().Ret<ffi::BufferR1<ffi::DataType::U32>>());

}  // namespace

void SetIsCallersThread(bool (*is_callers)()) { is_callers_thread = is_callers; }

void* StampsHandler() { return reinterpret_cast<void*>(&kNewStamps); }

std::vector<FfiTarget> FfiTargets() {
  return {{"cpu", reinterpret_cast<void*>(&kHoldOnCpu), reinterpret_cast<void*>(&kRunOnCpu),
           &CpuCall::id, &kCpuCallInfo},
          {"CUDA", reinterpret_cast<void*>(&kHoldOnCuda), reinterpret_cast<void*>(&kRunOnCuda),
           &CudaCall::id, &kCudaCallInfo}};
}

std::pair<int, int> FfiApiVersion() { return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}; }

}  // namespace jaxoffload

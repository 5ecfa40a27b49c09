// "jaxoffload_run": a whole plan as one custom call of an outer XLA program, on CPU.
//
// The handler queues the run and returns a Future, so no thread of XLA's waits in it. The outer
// program goes on from a callback thread, never from a lane.

#include "ffi.h"

#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

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

ffi::Future StartRun(ffi::RemainingArgs arguments, ffi::RemainingRets results, std::string_view key,
                     int64_t policy, int64_t seed, int64_t max_delay_us, int64_t check) {
  const std::shared_ptr<Plan> plan = FindPlan(std::string(key));
  if (plan == nullptr) {
    return Failed("jaxoffload_run: no plan has the key " + std::string(key) +
                  ". It has been dropped, or this program was compiled in another process.");
  }
  if (policy < 0 || policy > 2) {
    return Failed("jaxoffload_run: policy=" + std::to_string(policy) + " is unknown");
  }
  RunOptions options;
  options.policy = static_cast<Policy>(policy);
  options.seed = static_cast<uint64_t>(seed);
  options.max_delay_us = max_delay_us;
  options.check = check != 0;
  const LoadedPlan& loaded = plan->loaded();
  for (size_t i = 0; i < loaded.argument_bytes().size(); ++i) {
    if (loaded.argument_on_disk(static_cast<int32_t>(i))) {
      return Failed("jaxoffload_run: argument " + std::to_string(i) +
                    " is on disk, which only a call outside jax.jit can use.");
    }
  }
  ffi::Promise promise;
  ffi::Future future(promise);
  plan->Submit(Addresses(arguments, "arguments", plan->loaded().argument_bytes()),
               Addresses(results, "results", plan->loaded().result_bytes()), options,
               [plan, promise](const std::shared_ptr<const RunReport>& report) mutable {
                 plan->set_last_report(report);
                 if (report->error_message.empty()) {
                   promise.SetAvailable();
                   return;
                 }
                 std::string where;
                 if (report->error_vertex >= 0) {
                   where = " in " + plan->loaded().Describe(report->error_vertex);
                 }
                 promise.SetError(ffi::Error::Internal("the run stopped" + where + ": " +
                                                       report->error_message));
               });
  return future;
}

ffi::Future StartRunSafely(ffi::RemainingArgs arguments, ffi::RemainingRets results,
                           std::string_view key, int64_t policy, int64_t seed, int64_t max_delay_us,
                           int64_t check) {
  try {
    return StartRun(arguments, results, key, policy, seed, max_delay_us, check);
  } catch (const std::exception& e) {
    return Failed(e.what());
  }
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(kRun, StartRunSafely,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("key")
                                  .Attr<int64_t>("policy")
                                  .Attr<int64_t>("seed")
                                  .Attr<int64_t>("max_delay_us")
                                  .Attr<int64_t>("check"));

}  // namespace

std::vector<std::pair<std::string, void*>> FfiHandlers() {
  return {{"jaxoffload_run", reinterpret_cast<void*>(&kRun)}};
}

std::pair<int, int> FfiApiVersion() { return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}; }

}  // namespace jaxoffload

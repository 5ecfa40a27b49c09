// "jaxoffload_run_devices": in the SPMD program of several CPU devices each device's execution of
// one call brings what that device has of arguments and results. The last one that comes starts the
// run of all; its end is the end of every call.
//
// A call returns a Future at once, so that no thread of XLA's waits for another device. Calls of
// one execution of the program find each other by XLA's RunId; those of one place in the program
// are one object, for the devices of a client have one executable together. A loop comes there
// again only after all of them have ended.

#include "ffi_devices.h"

#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "pjrt/plan.h"
#include "xla/ffi/api/ffi.h"

namespace jaxoffload {
namespace {

namespace ffi = xla::ffi;

constexpr const char* kName = "jaxoffload_run_devices: ";

// What has come so far of one run.
struct Meeting {
  std::vector<char*> arguments;
  std::vector<char*> results;
  std::vector<bool> has_come;
  std::vector<ffi::Promise> promises;
};

void SetAll(std::vector<ffi::Promise>& promises, const std::string& error) {
  for (ffi::Promise& promise : promises) {
    if (error.empty()) {
      promise.SetAvailable();
    } else {
      promise.SetError(ffi::Error::Internal(error));
    }
  }
}

struct DevicesCall {
  static ffi::TypeId id;

  explicit DevicesCall(std::shared_ptr<Plan> of) : plan(std::move(of)) {}

  const std::shared_ptr<Plan> plan;
  Mutex mutex;
  std::map<int64_t, Meeting> meetings GUARDED_BY(mutex);  // by RunId
};
ffi::TypeId DevicesCall::id = {};
const ffi::TypeInfo kDevicesCallInfo = ffi::MakeTypeInfo<DevicesCall>();

ffi::ErrorOr<std::unique_ptr<DevicesCall>> Instantiate(std::string_view key, int64_t, int64_t,
                                                       int64_t, int64_t, int64_t) {
  try {
    std::shared_ptr<Plan> plan = FindPlan(std::string(key)).plan;
    if (plan != nullptr) return std::make_unique<DevicesCall>(std::move(plan));
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        kName + ("no plan has the key " + std::string(key)) +
        ". This program was compiled in another process; compile it in this one."));
  } catch (const std::exception& e) {
    return ffi::Unexpected(ffi::Error::Internal(e.what()));
  }
}

// Puts what a device brings among what all bring: `i` of device `rank` is `i * devices + rank`.
void Place(const std::vector<ffi::AnyBuffer>& given, int64_t rank, int64_t devices,
           const std::vector<int64_t>& planned, const char* what, std::vector<char*>& all) {
  if (static_cast<int64_t>(given.size()) * devices != static_cast<int64_t>(planned.size())) {
    throw std::invalid_argument(kName + std::to_string(given.size()) + " " + what + " on " +
                                std::to_string(devices) + " devices, the plan has " +
                                std::to_string(planned.size()) + " on all");
  }
  all.resize(planned.size());
  for (size_t i = 0; i < given.size(); ++i) {
    const size_t at = i * devices + rank;
    if (static_cast<int64_t>(given[i].size_bytes()) != planned[at]) {
      throw std::invalid_argument(kName + std::string(what) + "[" + std::to_string(i) + "] has " +
                                  std::to_string(given[i].size_bytes()) + " bytes, the plan has " +
                                  std::to_string(planned[at]));
    }
    all[at] = static_cast<char*>(given[i].untyped_data());
  }
}

void Start(const std::shared_ptr<Plan>& plan, Meeting meeting, const RunOptions& options) {
  auto promises = std::make_shared<std::vector<ffi::Promise>>(std::move(meeting.promises));
  auto done = [plan, promises](const std::shared_ptr<const RunReport>& report) {
    plan->set_last_report(report);
    std::string error = report->error_message;
    if (!error.empty() && report->error_vertex >= 0) {
      error = " in " + plan->loaded().Describe(report->error_vertex) + ": " + error;
    }
    SetAll(*promises, error.empty() ? error : "the run stopped" + error);
  };
  try {
    plan->Submit(std::move(meeting.arguments), std::move(meeting.results), options, done);
  } catch (const std::exception& e) {
    SetAll(*promises, e.what());
  }
}

// One device's: the first operand is its number, the last result has no bytes and no reader.
ffi::Future RunOnDevices(ffi::RunId run, DevicesCall* call, ffi::RemainingArgs operands,
                         ffi::RemainingRets results, std::string_view, int64_t devices,
                         int64_t policy, int64_t seed, int64_t max_delay_us, int64_t check) {
  ffi::Promise promise;
  ffi::Future future(promise);
  try {
    std::vector<ffi::AnyBuffer> given, made;
    for (size_t i = 0; i < operands.size(); ++i) {
      given.push_back(operands.get<ffi::AnyBuffer>(i).value());
    }
    for (size_t i = 0; i + 1 < results.size(); ++i) {
      made.push_back(*results.get<ffi::AnyBuffer>(i).value());
    }
    int32_t rank = -1;
    if (!given.empty() && given[0].size_bytes() == sizeof(rank)) {
      std::memcpy(&rank, given[0].untyped_data(), sizeof(rank));
    }
    if (rank < 0 || rank >= devices) {
      throw std::invalid_argument(
          kName + ("device " + std::to_string(rank) + " of " + std::to_string(devices)));
    }
    given.erase(given.begin());
    RunOptions options;
    options.policy = PolicyOf(policy);
    options.seed = static_cast<uint64_t>(seed);
    options.max_delay_us = max_delay_us;
    options.check = check != 0;
    const LoadedPlan& loaded = call->plan->loaded();
    Meeting whole;
    {
      MutexLock lock(call->mutex);
      Meeting& meeting = call->meetings[run.run_id];
      meeting.has_come.resize(devices);
      if (meeting.has_come[rank]) {
        throw std::runtime_error(kName + ("device " + std::to_string(rank) + " has come twice"));
      }
      Place(given, rank, devices, loaded.argument_bytes(), "arguments", meeting.arguments);
      Place(made, rank, devices, loaded.result_bytes(), "results", meeting.results);
      meeting.has_come[rank] = true;
      meeting.promises.push_back(promise);
      if (static_cast<int64_t>(meeting.promises.size()) < devices) return future;
      whole = std::move(meeting);
      call->meetings.erase(run.run_id);
    }
    Start(call->plan, std::move(whole), options);
  } catch (const std::exception& e) {
    std::vector<ffi::Promise> failed{promise};
    MutexLock lock(call->mutex);
    if (const auto found = call->meetings.find(run.run_id); found != call->meetings.end()) {
      for (ffi::Promise& other : found->second.promises) failed.push_back(other);
      call->meetings.erase(found);
    }
    SetAll(failed, e.what());
  }
  return future;
}

template <typename Binding>
auto WithAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<std::string_view>("key")
      .template Attr<int64_t>("devices")
      .template Attr<int64_t>("policy")
      .template Attr<int64_t>("seed")
      .template Attr<int64_t>("max_delay_us")
      .template Attr<int64_t>("check");
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(kHold, Instantiate, WithAttributes(ffi::Ffi::BindInstantiate()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(kRun, RunOnDevices,
                              WithAttributes(ffi::Ffi::Bind()
                                                 .Ctx<ffi::RunId>()
                                                 .Ctx<ffi::State<DevicesCall>>()
                                                 .RemainingArgs()
                                                 .RemainingRets()));

}  // namespace

FfiTarget DevicesTarget() {
  return {"cpu", reinterpret_cast<void*>(&kHold), reinterpret_cast<void*>(&kRun), &DevicesCall::id,
          &kDevicesCallInfo};
}

}  // namespace jaxoffload

// "jaxoffload_run_devices": in the SPMD program of several CPU devices each device's execution of
// one call brings what that device has of arguments and results. The last one that comes starts the
// run of all; its end is the end of every call.
//
// A call returns a Future at once, so that no thread of XLA's waits for another device. Calls of
// one execution of the program find each other (launcher/meetings.h) by XLA's RunId; those of one
// place in the program are one object, for the devices of a client have one executable together. A
// loop comes there again only after all of them have ended.

#include "ffi_devices.h"

#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "launch_attribute.h"
#include "launcher/callback_threads.h"
#include "launcher/meetings.h"
#include "pjrt/plan.h"
#include "xla/ffi/api/ffi.h"

namespace jaxoffload {
namespace {

namespace ffi = xla::ffi;

constexpr const char* kName = "jaxoffload_run_devices: ";

int64_t SizeOf(const ffi::AnyBuffer& buffer) { return static_cast<int64_t>(buffer.size_bytes()); }

struct DevicesCall {
  static ffi::TypeId id;

  DevicesCall(std::shared_ptr<Plan> of, int64_t devices, int64_t patience_s)
      : plan(std::move(of)),
        meetings(Meetings::Make(static_cast<int32_t>(devices), plan->loaded().argument_bytes(),
                                plan->loaded().result_bytes(), patience_s * 1000)) {}

  const std::shared_ptr<Plan> plan;
  const std::shared_ptr<Meetings> meetings;
};
ffi::TypeId DevicesCall::id = {};
const ffi::TypeInfo kDevicesCallInfo = ffi::MakeTypeInfo<DevicesCall>();

ffi::ErrorOr<std::unique_ptr<DevicesCall>> InstantiateOnDevices(std::string_view key,
                                                                int64_t devices, int64_t patience_s,
                                                                LaunchAttribute) {
  try {
    std::shared_ptr<Plan> plan = FindPlan(std::string(key)).plan;
    if (plan != nullptr) return std::make_unique<DevicesCall>(std::move(plan), devices, patience_s);
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        kName + ("no plan has the key " + std::string(key)) +
        ". This program was compiled in another process; compile it in this one."));
  } catch (const std::exception& e) {
    return ffi::Unexpected(ffi::Error::Internal(e.what()));
  }
}

// The ends of one call. XLA may go on with a device's program on the thread that is told of its
// end, and wait there for the other devices in a collective: each has a thread.
class Ends {
 public:
  // Throws std::runtime_error: no thread can be started.
  explicit Ends(std::vector<Meetings::End> ends) : first_(ends.front()) {
    for (size_t i = 1; i < ends.size(); ++i) {
      others_.push_back(CallbackThreads::Global().Prepare(
          [end = std::move(ends[i]), error = error_] { end(*error); }));
    }
  }

  // Once, on a thread where this may block. Does not throw.
  void Tell(const std::string& error) {
    *error_ = error;
    for (auto& other : others_) CallbackThreads::Global().Post(std::move(other));
    first_(error);
  }

 private:
  const std::shared_ptr<std::string> error_ = std::make_shared<std::string>();
  const Meetings::End first_;
  std::vector<std::unique_ptr<CallbackThreads::Task>> others_;
};

void Start(const std::shared_ptr<Plan>& plan, Meetings::Whole whole, const RunOptions& options) {
  std::shared_ptr<Ends> ends;
  try {
    ends = std::make_shared<Ends>(whole.ends);
  } catch (const std::exception& e) {
    for (const Meetings::End& end : whole.ends) end(e.what());
    return;
  }
  auto tell = [ends](const std::string& error) { ends->Tell(error); };
  auto done = [plan, tell](const std::shared_ptr<const RunReport>& report) {
    plan->set_last_report(report);
    std::string error = report->error_message;
    if (!error.empty() && report->error_vertex >= 0) {
      error = " in " + plan->loaded().Describe(report->error_vertex) + ": " + error;
    }
    tell(error.empty() ? error : "the run stopped" + error);
  };
  try {
    plan->Submit(std::move(whole.arguments), std::move(whole.results), options, done);
  } catch (const std::exception& e) {
    tell(e.what());
  }
}

// One device's: the first operand is its number, the last result has no bytes and no reader.
ffi::Future RunOnDevices(ffi::RunId run, DevicesCall* call, ffi::RemainingArgs operands,
                         ffi::RemainingRets results, std::string_view, int64_t, int64_t,
                         LaunchAttribute launch) {
  ffi::Promise promise;
  ffi::Future future(promise);
  auto end = [promise](const std::string& error) mutable {
    if (error.empty()) {
      promise.SetAvailable();
    } else {
      promise.SetError(ffi::Error::Internal(kName + error));
    }
  };
  try {
    std::vector<Meetings::Part> given, made;
    for (size_t i = 1; i < operands.size(); ++i) {
      const ffi::AnyBuffer buffer = operands.get<ffi::AnyBuffer>(i).value();
      given.push_back({static_cast<char*>(buffer.untyped_data()), SizeOf(buffer)});
    }
    for (size_t i = 0; i + 1 < results.size(); ++i) {
      const ffi::AnyBuffer buffer = *results.get<ffi::AnyBuffer>(i).value();
      made.push_back({static_cast<char*>(buffer.untyped_data()), SizeOf(buffer)});
    }
    int32_t rank = -1;
    std::memcpy(&rank, operands.get<ffi::AnyBuffer>(0).value().untyped_data(), sizeof(rank));
    const RunOptions options = launch.Options();
    std::optional<Meetings::Whole> whole = call->meetings->Come(run.run_id, rank, given, made, end);
    if (whole.has_value()) Start(call->plan, *std::move(whole), options);
  } catch (const std::exception& e) {
    end(e.what());
  }
  return future;
}

template <typename Binding>
auto WithDevicesAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<std::string_view>("key")
      .template Attr<int64_t>("devices")
      .template Attr<int64_t>("patience_s")
      .template Attr<LaunchAttribute>("launch");
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(kHold, InstantiateOnDevices,
                              WithDevicesAttributes(ffi::Ffi::BindInstantiate()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(kRun, RunOnDevices,
                              WithDevicesAttributes(ffi::Ffi::Bind()
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

#include "host_callback.h"

#include <exception>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jaxoffload {
namespace {

namespace ffi = xla::ffi;

HostCallback& Callback() {
  static auto* const callback = new HostCallback();
  return *callback;
}

ffi::Error Call(ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t number) {
  try {
    std::vector<HostView> given, made;
    for (size_t i = 0; i < operands.size(); ++i) {
      const ffi::AnyBuffer buffer = operands.get<ffi::AnyBuffer>(i).value();
      given.push_back(
          {static_cast<char*>(buffer.untyped_data()), static_cast<int64_t>(buffer.size_bytes())});
    }
    for (size_t i = 0; i < results.size(); ++i) {
      const ffi::AnyBuffer buffer = *results.get<ffi::AnyBuffer>(i).value();
      made.push_back(
          {static_cast<char*>(buffer.untyped_data()), static_cast<int64_t>(buffer.size_bytes())});
    }
    const std::string error = Callback()(number, given, made);
    return error.empty() ? ffi::Error::Success() : ffi::Error::Internal(error);
  } catch (const std::exception& e) {
    return ffi::Error::Internal(e.what());
  }
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kCall, Call, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<int64_t>("number"));

}  // namespace

void SetHostCallback(HostCallback callback) { Callback() = std::move(callback); }

void* HostCallbackHandler() { return reinterpret_cast<void*>(&kCall); }

}  // namespace jaxoffload

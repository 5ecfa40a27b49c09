#include "pjrt/ffi_trampolines.h"

#include <array>
#include <map>
#include <stdexcept>
#include <utility>

#include "base/mutex.h"
#include "xla/ffi/api/c_api.h"

namespace jaxoffload {
namespace {

// The oldest minor version that XLA accepts (xla/ffi/ffi_registry.cc: (0,1) <= version).
constexpr int kLoweredMinor = 1;

// The handler behind each trampoline. Written before its trampoline is registered, never after.
XLA_FFI_Handler* handlers[kNumTrampolines];

template <size_t kIndex>
XLA_FFI_Error* Trampoline(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Error* const error = handlers[kIndex](frame);
  if (error != nullptr) return error;
  auto* const extension = frame->extension_start;
  if (extension != nullptr && extension->type == XLA_FFI_Extension_Metadata) {
    auto* const metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(extension)->metadata;
    if (metadata->api_version.minor_version > kLoweredMinor) {
      metadata->api_version.minor_version = kLoweredMinor;
    }
  }
  return nullptr;
}

template <size_t... kIndices>
constexpr std::array<XLA_FFI_Handler*, sizeof...(kIndices)> MakeTable(
    std::index_sequence<kIndices...>) {
  return {{&Trampoline<kIndices>...}};
}

constexpr auto kTable = MakeTable(std::make_index_sequence<kNumTrampolines>());

// xla/pjrt/c/pjrt_c_api_ffi_extension.h, which the plugin's package does not ship.
struct RegisterHandlerArgs {
  size_t struct_size;
  const char* target_name;
  size_t target_name_size;
  void* handler;
  const char* platform_name;
  size_t platform_name_size;
  int traits;
};
struct FfiExtension {
  PJRT_Extension_Base base;
  void* type_register;
  void* user_data_add;
  PJRT_Error* (*register_handler)(RegisterHandlerArgs* args);
};

const FfiExtension* FindExtension(const PJRT_Api* api) {
  for (PJRT_Extension_Base* e = api->extension_start; e != nullptr; e = e->next) {
    if (e->type == PJRT_Extension_Type_FFI) return reinterpret_cast<const FfiExtension*>(e);
  }
  throw std::runtime_error("register_ffi_handlers: the plugin has no FFI extension");
}

}  // namespace

void RegisterFfiHandler(const PJRT_Api* api, const std::string& name, void* handler) {
  static Mutex mutex;
  static auto* const known = new std::map<std::pair<const PJRT_Api*, std::string>, int>();
  static int used = 0;
  const FfiExtension* const extension = FindExtension(api);
  MutexLock lock(mutex);
  const auto key = std::make_pair(api, name);
  if (known->count(key) > 0) return;
  if (used == kNumTrampolines) {
    throw std::runtime_error("register_ffi_handlers: no room for " + name + ", the table holds " +
                             std::to_string(kNumTrampolines));
  }
  handlers[used] = reinterpret_cast<XLA_FFI_Handler*>(handler);
  static const char kPlatform[] = "Host";
  RegisterHandlerArgs args = {};
  args.struct_size = sizeof(args);
  args.target_name = name.data();
  args.target_name_size = name.size();
  args.handler = reinterpret_cast<void*>(kTable[used]);
  args.platform_name = kPlatform;
  args.platform_name_size = sizeof(kPlatform) - 1;
  Check(api, extension->register_handler(&args), ("registering FFI handler " + name).c_str());
  known->emplace(key, used++);
}

}  // namespace jaxoffload

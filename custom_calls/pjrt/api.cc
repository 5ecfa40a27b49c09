#include "pjrt/api.h"

#include <dlfcn.h>

#include <map>
#include <stdexcept>

#include "base/mutex.h"

namespace jaxoffload {
namespace {

std::string VersionText(const PJRT_Api_Version& version) {
  return std::to_string(version.major_version) + "." + std::to_string(version.minor_version);
}

// Functions are only ever added at the end of the table, so a table that reaches to the newest one
// that we call has them all.
constexpr size_t kNeededSize = PJRT_STRUCT_SIZE(PJRT_Api, PJRT_Executable_GetCompiledMemoryStats);
constexpr size_t kNeededCudaSize =
    PJRT_STRUCT_SIZE(PJRT_Api, PJRT_Client_CreateUninitializedBuffer);

void CheckVersion(const PJRT_Api* api, const std::string& path, size_t needed) {
  const PJRT_Api_Version& version = api->pjrt_api_version;
  if (version.major_version != PJRT_API_MAJOR || api->struct_size < needed) {
    throw std::runtime_error("Client: plugin_path=" + path + " has PJRT C API " +
                             VersionText(version) + ", which does not fit the " +
                             std::to_string(PJRT_API_MAJOR) + "." + std::to_string(PJRT_API_MINOR) +
                             " that jaxoffload was built with. Install another plugin package.");
  }
}

const PJRT_Api* Open(const std::string& path, size_t needed) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw std::runtime_error("Client: plugin_path=" + path + " cannot be loaded: " + dlerror());
  }
  const auto get_api = reinterpret_cast<const PJRT_Api* (*)()>(dlsym(library, "GetPjrtApi"));
  if (get_api == nullptr) {
    throw std::runtime_error("Client: plugin_path=" + path +
                             " is not a PJRT plugin: it has no GetPjrtApi");
  }
  const PJRT_Api* const api = get_api();
  if (api == nullptr) throw std::runtime_error("Client: plugin_path=" + path + " gave no API");
  CheckVersion(api, path, needed);
  return api;
}

}  // namespace

const PJRT_Api* FindPlugin(const std::string& path) { return Open(path, kNeededCudaSize); }

const PJRT_Api* LoadPlugin(const std::string& path) {
  static Mutex mutex;
  static auto* const loaded = new std::map<std::string, const PJRT_Api*>();
  MutexLock lock(mutex);
  const auto found = loaded->find(path);
  if (found != loaded->end()) return found->second;
  const PJRT_Api* const api = Open(path, kNeededSize);
  JO_PJRT_ARGS(PJRT_Plugin_Initialize, args);
  Check(api, api->PJRT_Plugin_Initialize(&args), "initializing the plugin");
  loaded->emplace(path, api);
  return api;
}

std::string TakeMessage(const PJRT_Api* api, PJRT_Error* error) {
  JO_PJRT_ARGS(PJRT_Error_Message, message);
  message.error = error;
  api->PJRT_Error_Message(&message);
  std::string text(message.message, message.message_size);
  JO_PJRT_ARGS(PJRT_Error_Destroy, destroy);
  destroy.error = error;
  api->PJRT_Error_Destroy(&destroy);
  return text;
}

void Check(const PJRT_Api* api, PJRT_Error* error, const char* doing) {
  if (error != nullptr) {
    throw std::runtime_error(std::string(doing) + ": " + TakeMessage(api, error));
  }
}

PJRT_Error* AwaitAndDestroy(const PJRT_Api* api, PJRT_Event* event) {
  JO_PJRT_ARGS(PJRT_Event_Await, await);
  await.event = event;
  PJRT_Error* const error = api->PJRT_Event_Await(&await);
  JO_PJRT_ARGS(PJRT_Event_Destroy, destroy);
  destroy.event = event;
  api->PJRT_Event_Destroy(&destroy);
  return error;
}

void DestroyBuffer(const PJRT_Api* api, PJRT_Buffer* buffer) {
  JO_PJRT_ARGS(PJRT_Buffer_Destroy, args);
  args.buffer = buffer;
  PJRT_Error* const error = api->PJRT_Buffer_Destroy(&args);
  if (error != nullptr) TakeMessage(api, error);  // nothing that a caller could do about it
}

}  // namespace jaxoffload

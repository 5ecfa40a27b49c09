// A PJRT plugin for the fake driver: XLA's CPU plugin behind an interface that behaves as CUDA's.
// Buffers are device addresses, executions happen late on the device's compute stream, and outputs
// are in place where XLA aliases them. It finds the CPU plugin in FAKE_CUDA_PLUGIN.

#include "fake_plugin.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <utility>

#include "../pjrt/item_bytes.h"
#include "fake_cuda.h"

namespace fake_plugin {

using fake_cuda::Setting;
using fake_cuda::Shadow;

const PJRT_Api* real = nullptr;
PJRT_Client* client = nullptr;
std::vector<PJRT_Device*> devices;

int IndexOf(const PJRT_Device* device) {
  return static_cast<int>(std::find(devices.begin(), devices.end(), device) - devices.begin());
}

namespace {

struct Error {
  std::string text;
  PJRT_Error_Code code;
};

struct Handles {
  std::mutex mutex;
  std::set<void*> buffers;
  std::set<void*> events;
};

Handles& All() {
  static auto* const handles = new Handles;
  return *handles;
}

// Takes a handle out of those that are alive.
bool Remove(std::set<void*> Handles::* kind, void* handle) {
  Handles& handles = All();
  const std::lock_guard<std::mutex> lock(handles.mutex);
  return (handles.*kind).erase(handle) != 0;
}

template <typename T>
void* Add(std::set<void*> Handles::* kind, T value) {
  auto* const made = new T(std::move(value));
  Handles& handles = All();
  const std::lock_guard<std::mutex> lock(handles.mutex);
  (handles.*kind).insert(made);
  return made;
}

}  // namespace

PJRT_Error* NewError(std::string text, PJRT_Error_Code code) {
  return reinterpret_cast<PJRT_Error*>(new Error{std::move(text), code});
}

std::string TakeText(PJRT_Error* error) {
  REAL_ARGS(PJRT_Error_Message, message);
  message.error = error;
  real->PJRT_Error_Message(&message);
  std::string text(message.message, message.message_size);
  REAL_ARGS(PJRT_Error_Destroy, destroy);
  destroy.error = error;
  real->PJRT_Error_Destroy(&destroy);
  return text;
}

PJRT_Error* Translate(PJRT_Error* error) {
  return error == nullptr ? nullptr : NewError(TakeText(error), PJRT_Error_Code_INTERNAL);
}

PJRT_Error* RefuseCall(const std::string& what) {
  fake_cuda::Refuse(fake_cuda::kInvalidValue, what);
  return NewError("INVALID_ARGUMENT: " + what, PJRT_Error_Code_INVALID_ARGUMENT);
}

void End::Set(std::string text) {
  const std::lock_guard<std::mutex> lock(mutex);
  failure = std::move(text);
  is_set = true;
  changed.notify_all();
}

PJRT_Event* NewEvent(std::shared_ptr<End> end) {
  return static_cast<PJRT_Event*>(Add(&Handles::events, std::move(end)));
}

size_t Bytes(PJRT_Buffer_Type type, const std::vector<int64_t>& dims) {
  auto bytes = static_cast<size_t>(jaxoffload::ItemBytes(type));
  for (const int64_t d : dims) bytes *= static_cast<size_t>(d);
  return bytes;
}

bool TakeMemory(Buffer* buffer) {
  buffer->address = fake_cuda::Allocate(buffer->device, Bytes(buffer->type, buffer->dims));
  if (buffer->address == nullptr) return false;
  buffer->memory = std::shared_ptr<char>(buffer->address, &fake_cuda::Free);
  return true;
}

PJRT_Buffer* NewBuffer(Buffer buffer) {
  return static_cast<PJRT_Buffer*>(Add(&Handles::buffers, std::move(buffer)));
}

Buffer* FindBuffer(PJRT_Buffer* buffer) {
  Handles& handles = All();
  const std::lock_guard<std::mutex> lock(handles.mutex);
  return handles.buffers.count(buffer) == 0 ? nullptr : reinterpret_cast<Buffer*>(buffer);
}

namespace {

void ErrorMessage(PJRT_Error_Message_Args* args) {
  const auto* const error = reinterpret_cast<const Error*>(args->error);
  args->message = error->text.data();
  args->message_size = error->text.size();
}
void ErrorDestroy(PJRT_Error_Destroy_Args* args) { delete reinterpret_cast<Error*>(args->error); }
PJRT_Error* ErrorGetCode(PJRT_Error_GetCode_Args* args) {
  args->code = reinterpret_cast<const Error*>(args->error)->code;
  return nullptr;
}

PJRT_Error* EventAwait(PJRT_Event_Await_Args* args) {
  std::shared_ptr<End> end;
  {
    Handles& handles = All();
    const std::lock_guard<std::mutex> lock(handles.mutex);
    if (handles.events.count(args->event) == 0) return RefuseCall("waiting for what is no event");
    end = *reinterpret_cast<std::shared_ptr<End>*>(args->event);
  }
  fake_cuda::AwaitCompute(end->device, end->number);
  std::unique_lock<std::mutex> lock(end->mutex);
  end->changed.wait(lock, [&] { return end->is_set; });
  return end->failure.empty() ? nullptr : NewError(end->failure, PJRT_Error_Code_INTERNAL);
}
PJRT_Error* EventDestroy(PJRT_Event_Destroy_Args* args) {
  if (!Remove(&Handles::events, args->event)) return RefuseCall("destroying what is no event");
  delete reinterpret_cast<std::shared_ptr<End>*>(args->event);
  return nullptr;
}

PJRT_Error* CreateUninitialized(PJRT_Client_CreateUninitializedBuffer_Args* args) {
  Buffer buffer;
  buffer.type = args->shape_element_type;
  buffer.dims.assign(args->shape_dims, args->shape_dims + args->shape_num_dims);
  buffer.device = IndexOf(args->device);
  if (!TakeMemory(&buffer)) {
    return NewError("RESOURCE_EXHAUSTED: the fake GPU is full", PJRT_Error_Code_RESOURCE_EXHAUSTED);
  }
  fake_cuda::LeaveCurrent(buffer.device);
  args->buffer = NewBuffer(std::move(buffer));
  return nullptr;
}

PJRT_Error* CreateView(PJRT_Client_CreateViewOfDeviceBuffer_Args* args) {
  Buffer buffer;
  buffer.address = static_cast<char*>(args->device_buffer_ptr);
  buffer.type = args->element_type;
  buffer.dims.assign(args->dims, args->dims + args->num_dims);
  buffer.device = IndexOf(args->device);
  const size_t bytes = Bytes(buffer.type, buffer.dims);
  const int device = fake_cuda::DeviceOf(buffer.address);
  if (device < 0 && bytes > 0 && !fake_cuda::IsPinned(buffer.address, bytes)) {
    return RefuseCall("a view of memory that is not the device's");
  }
  if (device >= 0 && device != buffer.device)
    return RefuseCall("a view of another device's memory");
  if (device >= 0 && bytes > 0 && !fake_cuda::IsTaken(buffer.address, bytes)) {
    return RefuseCall("a view beyond an allocation");
  }
  args->buffer = NewBuffer(std::move(buffer));
  return nullptr;
}

PJRT_Error* BufferDestroy(PJRT_Buffer_Destroy_Args* args) {
  if (!Remove(&Handles::buffers, args->buffer)) return RefuseCall("destroying what is no buffer");
  delete reinterpret_cast<Buffer*>(args->buffer);
  return nullptr;
}
PJRT_Error* UnsafePointer(PJRT_Buffer_UnsafePointer_Args* args) {
  const Buffer* const buffer = FindBuffer(args->buffer);
  if (buffer == nullptr || buffer->is_donated) return RefuseCall("the address of no buffer");
  args->buffer_pointer = reinterpret_cast<uintptr_t>(buffer->address);
  return nullptr;
}
PJRT_Error* DataPointer(PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args* args) {
  const Buffer* const buffer = FindBuffer(args->buffer);
  if (buffer == nullptr || buffer->is_donated) return RefuseCall("the address of no buffer");
  args->device_memory_ptr = buffer->address;
  return nullptr;
}

PJRT_Error* LocalHardwareId(PJRT_Device_LocalHardwareId_Args* args) {
  args->local_hardware_id = IndexOf(args->device);
  return nullptr;
}

PJRT_Error* Compile(PJRT_Client_Compile_Args* args) {
  return Translate(real->PJRT_Client_Compile(args));
}

const PJRT_Api* MakeApi() {
  void* const library = dlopen(std::getenv("FAKE_CUDA_PLUGIN"), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  real = reinterpret_cast<const PJRT_Api* (*)()>(dlsym(library, "GetPjrtApi"))();
  static PJRT_Api api;
  std::memcpy(&api, real, std::min(real->struct_size, sizeof(api)));
  api.struct_size = std::min(real->struct_size, sizeof(api));
  api.PJRT_Error_Message = &ErrorMessage;
  api.PJRT_Error_Destroy = &ErrorDestroy;
  api.PJRT_Error_GetCode = &ErrorGetCode;
  api.PJRT_Event_Await = &EventAwait;
  api.PJRT_Event_Destroy = &EventDestroy;
  // The CPU plugin would take handles of this one for its own.
  api.PJRT_Event_IsReady = nullptr;
  api.PJRT_Event_Error = nullptr;
  api.PJRT_Event_OnReady = nullptr;
  api.PJRT_Buffer_ToHostBuffer = nullptr;
  api.PJRT_Buffer_Delete = nullptr;
  api.PJRT_Buffer_CopyToDevice = nullptr;
  api.PJRT_Client_Compile = &Compile;
  api.PJRT_Client_CreateUninitializedBuffer = &CreateUninitialized;
  api.PJRT_Client_CreateViewOfDeviceBuffer = &CreateView;
  api.PJRT_Client_BufferFromHostBuffer = nullptr;  // not what one calls on a GPU
  api.PJRT_Buffer_Destroy = &BufferDestroy;
  api.PJRT_Buffer_UnsafePointer = &UnsafePointer;
  api.PJRT_Buffer_OpaqueDeviceMemoryDataPointer = &DataPointer;
  api.PJRT_LoadedExecutable_Destroy = &ExecutableDestroy;
  api.PJRT_LoadedExecutable_Execute = &Execute;
  api.PJRT_Device_LocalHardwareId = &LocalHardwareId;
  return &api;
}

}  // namespace
}  // namespace fake_plugin

extern "C" {

const PJRT_Api* GetPjrtApi() {
  static const PJRT_Api* const api = fake_plugin::MakeApi();
  return api;
}

// The client that JAX would have made; one a process.
PJRT_Client* fake_cuda_client() {
  using fake_plugin::real;
  if (fake_plugin::client != nullptr || GetPjrtApi() == nullptr) return fake_plugin::client;
  PJRT_NamedValue options[2];
  std::memset(options, 0, sizeof(options));
  for (PJRT_NamedValue& option : options) {
    option.struct_size = PJRT_NamedValue_STRUCT_SIZE;
    option.value_size = 1;
  }
  options[0].name = "cpu_device_count";
  options[0].type = PJRT_NamedValue_kInt64;
  options[0].int64_value = fake_cuda::NumDevices();
  options[1].name = "asynchronous";
  options[1].type = PJRT_NamedValue_kBool;
  options[1].bool_value = false;
  for (PJRT_NamedValue& option : options) option.name_size = std::strlen(option.name);
  REAL_ARGS(PJRT_Plugin_Initialize, initialize);
  real->PJRT_Plugin_Initialize(&initialize);
  REAL_ARGS(PJRT_Client_Create, create);
  create.create_options = options;
  create.num_options = 2;
  if (real->PJRT_Client_Create(&create) != nullptr) return nullptr;
  REAL_ARGS(PJRT_Client_AddressableDevices, list);
  list.client = create.client;
  if (real->PJRT_Client_AddressableDevices(&list) != nullptr) return nullptr;
  fake_plugin::devices.assign(list.addressable_devices,
                              list.addressable_devices + list.num_addressable_devices);
  fake_plugin::client = create.client;
  return create.client;
}

// Arrays of the caller's on a device. As of JAX, they are there when the compute stream is.
void* fake_cuda_allocate(int device, size_t bytes) {
  char* const address = fake_cuda::Allocate(device, bytes);
  fake_cuda::AwaitCompute(device);
  return address;
}
void fake_cuda_free(void* address) { fake_cuda::Free(static_cast<char*>(address)); }
void fake_cuda_write(void* to, const void* from, size_t bytes) {
  std::memcpy(fake_cuda::Shadow(to), from, bytes);
}
void fake_cuda_read(void* to, const void* from, size_t bytes) {
  std::memcpy(to, fake_cuda::Shadow(from), bytes);
}

}  // extern "C"

// A PJRT plugin for the fake driver: XLA's CPU plugin behind an interface that behaves as CUDA's.
// Buffers are device addresses, executions happen late on the device's compute stream, and outputs
// are in place where XLA aliases them. It finds the CPU plugin in FAKE_CUDA_PLUGIN. Faults:
//   FAKE_CUDA_FAIL_EXECUTE=n     the n-th execution is refused
//   FAKE_CUDA_FAIL_LATE=n        the n-th execution fails when it has been put on the stream
//   FAKE_CUDA_MISPLACE=1         outputs are never in place

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../pjrt/item_bytes.h"
#include "fake_cuda.h"
#include "pjrt_c_api.h"

namespace {

using fake_cuda::Setting;
using fake_cuda::Shadow;

#define REAL_ARGS(function, name)      \
  function##_Args name;                \
  std::memset(&name, 0, sizeof(name)); \
  name.struct_size = function##_Args_STRUCT_SIZE

const PJRT_Api* real = nullptr;
PJRT_Client* client = nullptr;
std::vector<PJRT_Device*> devices;

struct Error {
  std::string text;
  PJRT_Error_Code code;
};

PJRT_Error* NewError(std::string text, PJRT_Error_Code code) {
  return reinterpret_cast<PJRT_Error*>(new Error{std::move(text), code});
}

PJRT_Error* Translate(PJRT_Error* error) {
  if (error == nullptr) return nullptr;
  REAL_ARGS(PJRT_Error_Message, message);
  message.error = error;
  real->PJRT_Error_Message(&message);
  PJRT_Error* const made =
      NewError(std::string(message.message, message.message_size), PJRT_Error_Code_INTERNAL);
  REAL_ARGS(PJRT_Error_Destroy, destroy);
  destroy.error = error;
  real->PJRT_Error_Destroy(&destroy);
  return made;
}

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

// The end of an execution.
struct End {
  void Set(std::string failure) {
    const std::lock_guard<std::mutex> lock(mutex);
    failed = !failure.empty();
    text = std::move(failure);
    is_set = true;
    changed.notify_all();
  }
  std::mutex mutex;
  std::condition_variable changed;
  bool is_set = false;
  bool failed = false;
  std::string text;
};
using Event = std::shared_ptr<End>;

PJRT_Error* EventAwait(PJRT_Event_Await_Args* args) {
  const Event end = *reinterpret_cast<Event*>(args->event);
  std::unique_lock<std::mutex> lock(end->mutex);
  end->changed.wait(lock, [&] { return end->is_set; });
  return end->failed ? NewError(end->text, PJRT_Error_Code_INTERNAL) : nullptr;
}
PJRT_Error* EventDestroy(PJRT_Event_Destroy_Args* args) {
  delete reinterpret_cast<Event*>(args->event);
  return nullptr;
}

struct Buffer {
  char* address;
  PJRT_Buffer_Type type;
  std::vector<int64_t> dims;
  std::shared_ptr<char> memory;  // null: somebody else's
};

size_t Bytes(PJRT_Buffer_Type type, const std::vector<int64_t>& dims) {
  auto bytes = static_cast<size_t>(jaxoffload::ItemBytes(type));
  for (const int64_t d : dims) bytes *= static_cast<size_t>(d);
  return bytes;
}

int IndexOf(const PJRT_Device* device) {
  return static_cast<int>(std::find(devices.begin(), devices.end(), device) - devices.begin());
}

bool TakeMemory(int device, Buffer* buffer) {
  buffer->address = fake_cuda::Allocate(device, Bytes(buffer->type, buffer->dims));
  if (buffer->address == nullptr) return false;
  buffer->memory = std::shared_ptr<char>(buffer->address, &fake_cuda::Free);
  return true;
}

PJRT_Error* CreateUninitialized(PJRT_Client_CreateUninitializedBuffer_Args* args) {
  auto buffer = std::make_unique<Buffer>();
  buffer->type = args->shape_element_type;
  buffer->dims.assign(args->shape_dims, args->shape_dims + args->shape_num_dims);
  if (!TakeMemory(IndexOf(args->device), buffer.get())) {
    return NewError("RESOURCE_EXHAUSTED: the fake GPU is full", PJRT_Error_Code_RESOURCE_EXHAUSTED);
  }
  args->buffer = reinterpret_cast<PJRT_Buffer*>(buffer.release());
  return nullptr;
}

PJRT_Error* CreateView(PJRT_Client_CreateViewOfDeviceBuffer_Args* args) {
  char* const address = static_cast<char*>(args->device_buffer_ptr);
  const std::vector<int64_t> dims(args->dims, args->dims + args->num_dims);
  const size_t bytes = Bytes(args->element_type, dims);
  if (Shadow(address) == address && bytes > 0 && !fake_cuda::IsPinned(address, bytes)) {
    return NewError("a view of memory that is not the device's", PJRT_Error_Code_INVALID_ARGUMENT);
  }
  args->buffer =
      reinterpret_cast<PJRT_Buffer*>(new Buffer{address, args->element_type, dims, nullptr});
  return nullptr;
}

PJRT_Error* BufferDestroy(PJRT_Buffer_Destroy_Args* args) {
  delete reinterpret_cast<Buffer*>(args->buffer);
  return nullptr;
}
PJRT_Error* UnsafePointer(PJRT_Buffer_UnsafePointer_Args* args) {
  args->buffer_pointer =
      reinterpret_cast<uintptr_t>(reinterpret_cast<Buffer*>(args->buffer)->address);
  return nullptr;
}
PJRT_Error* DataPointer(PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args* args) {
  args->device_memory_ptr = reinterpret_cast<Buffer*>(args->buffer)->address;
  return nullptr;
}

// What is known of an executable after its first execution.
struct Program {
  std::vector<PJRT_Buffer_Type> types;
  std::vector<std::vector<int64_t>> dims;
  std::vector<int> alias;  // the argument in whose memory each output is, -1: in its own
  int device = 0;
  bool is_known = false;
};

// Runs on the CPU client. Outputs that are not in an argument's memory are copied to `places`.
std::string RunNow(PJRT_LoadedExecutable* executable, PJRT_Device* device,
                   const std::vector<Buffer>& arguments, const std::vector<char*>& places,
                   const Program& program, std::vector<int>* alias) {
  std::vector<PJRT_Buffer*> inputs;
  const auto destroy = [](PJRT_Buffer* buffer) {
    REAL_ARGS(PJRT_Buffer_Destroy, args);
    args.buffer = buffer;
    real->PJRT_Buffer_Destroy(&args);
  };
  const auto text_of = [](PJRT_Error* error) {
    PJRT_Error* const made = Translate(error);
    std::string text = reinterpret_cast<Error*>(made)->text;
    delete reinterpret_cast<Error*>(made);
    return text;
  };
  for (const Buffer& argument : arguments) {
    REAL_ARGS(PJRT_Client_BufferFromHostBuffer, args);
    args.client = client;
    args.data = Shadow(argument.address);
    args.type = argument.type;
    args.dims = argument.dims.data();
    args.num_dims = argument.dims.size();
    args.host_buffer_semantics = PJRT_HostBufferSemantics_kMutableZeroCopy;
    args.device = device;
    if (PJRT_Error* const error = real->PJRT_Client_BufferFromHostBuffer(&args)) {
      return text_of(error);
    }
    REAL_ARGS(PJRT_Event_Destroy, done);
    done.event = args.done_with_host_buffer;
    real->PJRT_Event_Destroy(&done);
    inputs.push_back(args.buffer);
  }
  std::vector<PJRT_Buffer*> outputs(program.types.size());
  PJRT_Buffer* const* const input_list = inputs.data();
  PJRT_Buffer** const output_list = outputs.data();
  PJRT_ExecuteOptions options;
  std::memset(&options, 0, sizeof(options));
  options.struct_size = PJRT_ExecuteOptions_STRUCT_SIZE;
  PJRT_Event* complete = nullptr;
  REAL_ARGS(PJRT_LoadedExecutable_Execute, args);
  args.executable = executable;
  args.options = &options;
  args.argument_lists = &input_list;
  args.num_devices = 1;
  args.num_args = inputs.size();
  args.output_lists = &output_list;
  args.device_complete_events = &complete;
  args.execute_device = device;
  std::string failure;
  if (PJRT_Error* const error = real->PJRT_LoadedExecutable_Execute(&args)) {
    failure = text_of(error);
  } else {
    REAL_ARGS(PJRT_Event_Await, await);
    await.event = complete;
    if (PJRT_Error* const late = real->PJRT_Event_Await(&await)) failure = text_of(late);
    REAL_ARGS(PJRT_Event_Destroy, done);
    done.event = complete;
    real->PJRT_Event_Destroy(&done);
    for (size_t o = 0; o < outputs.size(); ++o) {
      if (failure.empty()) {
        REAL_ARGS(PJRT_Buffer_UnsafePointer, pointer);
        pointer.buffer = outputs[o];
        real->PJRT_Buffer_UnsafePointer(&pointer);
        char* const where = reinterpret_cast<char*>(pointer.buffer_pointer);
        int found = -1;
        for (size_t a = 0; a < arguments.size(); ++a) {
          if (Shadow(arguments[a].address) == where) found = static_cast<int>(a);
        }
        if (Setting("FAKE_CUDA_MISPLACE", 0) != 0) found = -1;
        if (alias != nullptr) alias->push_back(found);
        const size_t bytes = Bytes(program.types[o], program.dims[o]);
        if (places[o] != nullptr && Shadow(places[o]) != where && bytes > 0) {
          std::memcpy(Shadow(places[o]), where, bytes);
          // It was not meant to be here.
          if (found < 0) std::memset(where, 0xab, bytes);
        }
      }
      destroy(outputs[o]);
    }
  }
  for (PJRT_Buffer* const input : inputs) destroy(input);
  return failure;
}

std::atomic<int> num_executions{0};

PJRT_Error* Describe(PJRT_LoadedExecutable* executable, Program* program) {
  REAL_ARGS(PJRT_LoadedExecutable_AddressableDevices, where);
  where.executable = executable;
  if (PJRT_Error* const error = real->PJRT_LoadedExecutable_AddressableDevices(&where)) {
    return Translate(error);
  }
  if (where.num_addressable_devices > 0) program->device = IndexOf(where.addressable_devices[0]);
  REAL_ARGS(PJRT_LoadedExecutable_GetExecutable, get);
  get.loaded_executable = executable;
  if (PJRT_Error* const error = real->PJRT_LoadedExecutable_GetExecutable(&get)) {
    return Translate(error);
  }
  REAL_ARGS(PJRT_Executable_OutputElementTypes, types);
  types.executable = get.executable;
  real->PJRT_Executable_OutputElementTypes(&types);
  program->types.assign(types.output_types, types.output_types + types.num_output_types);
  REAL_ARGS(PJRT_Executable_OutputDimensions, dims);
  dims.executable = get.executable;
  real->PJRT_Executable_OutputDimensions(&dims);
  const int64_t* next = dims.dims;
  for (size_t o = 0; o < dims.num_outputs; ++o) {
    program->dims.emplace_back(next, next + dims.dim_sizes[o]);
    next += dims.dim_sizes[o];
  }
  REAL_ARGS(PJRT_Executable_Destroy, destroy);
  destroy.executable = get.executable;
  real->PJRT_Executable_Destroy(&destroy);
  return nullptr;
}

// What is known of each executable that there is.
struct Programs {
  std::mutex mutex;
  std::map<PJRT_LoadedExecutable*, std::shared_ptr<Program>> known;
};

Programs& AllPrograms() {
  static auto* const programs = new Programs;
  return *programs;
}

PJRT_Error* ExecutableDestroy(PJRT_LoadedExecutable_Destroy_Args* args) {
  {
    // Another one may come to have its address.
    Programs& programs = AllPrograms();
    const std::lock_guard<std::mutex> lock(programs.mutex);
    programs.known.erase(args->executable);
  }
  return Translate(real->PJRT_LoadedExecutable_Destroy(args));
}

PJRT_Error* Execute(PJRT_LoadedExecutable_Execute_Args* args) {
  const int number = ++num_executions;
  if (number == Setting("FAKE_CUDA_FAIL_EXECUTE", -1)) {
    return NewError("RESOURCE_EXHAUSTED: no memory for scratch",
                    PJRT_Error_Code_RESOURCE_EXHAUSTED);
  }
  const bool fails_late = number == Setting("FAKE_CUDA_FAIL_LATE", -1);
  std::shared_ptr<Program> program;
  {
    Programs& programs = AllPrograms();
    const std::lock_guard<std::mutex> lock(programs.mutex);
    std::shared_ptr<Program>& entry = programs.known[args->executable];
    if (entry == nullptr) {
      entry = std::make_shared<Program>();
      if (PJRT_Error* const error = Describe(args->executable, entry.get())) {
        entry = nullptr;
        return error;
      }
    }
    program = entry;
  }
  const int index =
      args->execute_device == nullptr ? program->device : IndexOf(args->execute_device);
  PJRT_Device* const device = devices[index];
  std::vector<Buffer> arguments;
  for (size_t a = 0; a < args->num_args; ++a) {
    arguments.push_back(*reinterpret_cast<Buffer*>(args->argument_lists[0][a]));
  }
  const size_t count = program->types.size();
  auto end = std::make_shared<End>();
  std::vector<Buffer> outputs(count);
  for (size_t o = 0; o < count; ++o) {
    outputs[o].type = program->types[o];
    outputs[o].dims = program->dims[o];
  }
  // The first time it runs at once, to learn which outputs XLA puts in arguments' memory.
  const bool is_first = !program->is_known;
  std::vector<char*> places;
  for (size_t o = 0; o < count; ++o) {
    if (!is_first && program->alias[o] >= 0) {
      outputs[o].address = arguments[program->alias[o]].address;
    } else if (!TakeMemory(index, &outputs[o])) {
      return NewError("RESOURCE_EXHAUSTED: the fake GPU is full",
                      PJRT_Error_Code_RESOURCE_EXHAUSTED);
    }
    places.push_back(outputs[o].address);
  }
  const std::string late = fails_late ? "INTERNAL: the fake kernel failed" : "";
  if (is_first) {
    fake_cuda::AwaitCompute(index);
    std::vector<int> alias;
    const std::string failure =
        RunNow(args->executable, device, arguments, places, *program, &alias);
    if (!failure.empty()) return NewError(failure, PJRT_Error_Code_INTERNAL);
    for (size_t o = 0; o < count; ++o) {
      if (alias[o] < 0) continue;
      outputs[o].address = arguments[alias[o]].address;
      outputs[o].memory = nullptr;
    }
    program->alias = alias;
    program->is_known = true;
    end->Set(late);
  } else {
    fake_cuda::Compute(index, [=, executable = args->executable] {
      const std::string failure = RunNow(executable, device, arguments, places, *program, nullptr);
      end->Set(failure.empty() ? late : failure);
    });
  }
  for (size_t o = 0; o < count; ++o) {
    args->output_lists[0][o] = reinterpret_cast<PJRT_Buffer*>(new Buffer(outputs[o]));
  }
  if (args->device_complete_events != nullptr) {
    args->device_complete_events[0] = reinterpret_cast<PJRT_Event*>(new Event(end));
  }
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

extern "C" {

const PJRT_Api* GetPjrtApi() {
  static const PJRT_Api* const api = MakeApi();
  return api;
}

// The client that JAX would have made; one a process.
PJRT_Client* fake_cuda_client() {
  if (client != nullptr || GetPjrtApi() == nullptr) return client;
  PJRT_NamedValue options[2];
  std::memset(options, 0, sizeof(options));
  for (PJRT_NamedValue& option : options) {
    option.struct_size = PJRT_NamedValue_STRUCT_SIZE;
    option.value_size = 1;
  }
  options[0].name = "cpu_device_count";
  options[0].type = PJRT_NamedValue_kInt64;
  options[0].int64_value = Setting("FAKE_CUDA_DEVICES", 1);
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
  devices.assign(list.addressable_devices, list.addressable_devices + list.num_addressable_devices);
  client = create.client;
  return client;
}

// Arrays of the caller's on a device.
void* fake_cuda_allocate(int device, size_t bytes) { return fake_cuda::Allocate(device, bytes); }
void fake_cuda_free(void* address) { fake_cuda::Free(static_cast<char*>(address)); }
void fake_cuda_write(void* to, const void* from, size_t bytes) {
  std::memcpy(Shadow(to), from, bytes);
}
void fake_cuda_read(void* to, const void* from, size_t bytes) {
  std::memcpy(to, Shadow(from), bytes);
}
int fake_cuda_num_executions() { return num_executions; }

}  // extern "C"

// Executions of the fake plugin: checked when they are asked for, done late on the compute stream
// by XLA's CPU plugin. Faults:
//   FAKE_CUDA_FAIL_EXECUTE=n     the n-th execution is refused
//   FAKE_CUDA_FAIL_LATE=n        the n-th execution fails when it has been put on the stream
//   FAKE_CUDA_LOSE_KERNEL=n      the n-th execution loses the context, when it is done
//   FAKE_CUDA_MISPLACE=1         outputs are never in place

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <utility>

#include "fake_cuda.h"
#include "fake_plugin.h"

namespace fake_plugin {

using fake_cuda::Setting;
using fake_cuda::Shadow;

namespace {

constexpr uintptr_t kAlignment = 16;  // XLA refuses other addresses of arguments

// What is known of an executable.
struct Program {
  std::vector<PJRT_Buffer_Type> types;
  std::vector<std::vector<int64_t>> dims;
  std::vector<int> alias;  // the argument in whose memory each output is, -1: in its own
  int device = 0;
};

// Runs on the CPU client, of arguments at addresses of the host's. The outputs that are not in an
// argument's memory are copied to `places`; `alias` is given what each is in.
std::string RunNow(PJRT_LoadedExecutable* executable, PJRT_Device* device,
                   const std::vector<Buffer>& arguments, const std::vector<char*>& places,
                   const Program& program, std::vector<int>* alias) {
  std::vector<PJRT_Buffer*> inputs;
  const auto destroy = [](PJRT_Buffer* buffer) {
    REAL_ARGS(PJRT_Buffer_Destroy, args);
    args.buffer = buffer;
    real->PJRT_Buffer_Destroy(&args);
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
      return TakeText(error);
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
    failure = TakeText(error);
  } else {
    REAL_ARGS(PJRT_Event_Await, await);
    await.event = complete;
    if (PJRT_Error* const late = real->PJRT_Event_Await(&await)) failure = TakeText(late);
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
        if (!places.empty() && Shadow(places[o]) != where && bytes > 0) {
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

// Which outputs XLA puts in arguments' memory: learned from a run on copies.
std::string Learn(PJRT_LoadedExecutable* executable, std::vector<Buffer> arguments,
                  Program* program) {
  for (const Buffer& argument : arguments) fake_cuda::AwaitCompute(argument.device);
  std::vector<std::unique_ptr<char, void (*)(void*)>> memory;
  for (Buffer& argument : arguments) {
    const size_t bytes = Bytes(argument.type, argument.dims);
    memory.emplace_back(static_cast<char*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64)),
                        &std::free);
    if (bytes > 0) std::memcpy(memory.back().get(), Shadow(argument.address), bytes);
    argument.address = memory.back().get();
  }
  return RunNow(executable, devices[program->device], arguments, {}, *program, &program->alias);
}

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
  std::map<PJRT_LoadedExecutable*, std::shared_ptr<const Program>> known;
};

Programs& AllPrograms() {
  static auto* const programs = new Programs;
  return *programs;
}

PJRT_Error* Find(PJRT_LoadedExecutable* executable, const std::vector<Buffer>& arguments,
                 std::shared_ptr<const Program>* found) {
  Programs& programs = AllPrograms();
  const std::lock_guard<std::mutex> lock(programs.mutex);
  std::shared_ptr<const Program>& entry = programs.known[executable];
  if (entry == nullptr) {
    auto made = std::make_shared<Program>();
    if (PJRT_Error* const error = Describe(executable, made.get())) return error;
    const std::string failure = Learn(executable, arguments, made.get());
    if (!failure.empty()) return NewError(failure, PJRT_Error_Code_INTERNAL);
    entry = made;
  }
  *found = entry;
  return nullptr;
}

// What XLA refuses, or what would be an access to memory that is not the buffer's.
PJRT_Error* CheckArgument(const Buffer* buffer) {
  if (buffer == nullptr) return RefuseCall("an execution on a buffer that was destroyed");
  if (buffer->is_donated) return RefuseCall("an execution on a buffer that was donated");
  const size_t bytes = Bytes(buffer->type, buffer->dims);
  if (bytes == 0) return nullptr;
  if (reinterpret_cast<uintptr_t>(buffer->address) % kAlignment != 0) {
    return RefuseCall("an execution on a buffer at no multiple of 16");
  }
  const bool is_there = fake_cuda::DeviceOf(buffer->address) >= 0
                            ? fake_cuda::IsTaken(buffer->address, bytes)
                            : fake_cuda::IsPinned(buffer->address, bytes);
  return is_there ? nullptr : RefuseCall("an execution on memory that was freed or unpinned");
}

std::atomic<int> num_executions{0};

}  // namespace

PJRT_Error* ExecutableDestroy(PJRT_LoadedExecutable_Destroy_Args* args) {
  // What was put on the streams is done by then, as XLA's client keeps programs until it is.
  for (size_t d = 0; d < devices.size(); ++d) fake_cuda::AwaitCompute(static_cast<int>(d));
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
  std::vector<Buffer*> given;
  std::vector<Buffer> arguments;
  for (size_t a = 0; a < args->num_args; ++a) {
    given.push_back(FindBuffer(args->argument_lists[0][a]));
    if (given.back() == nullptr) return CheckArgument(nullptr);
    arguments.push_back(*given.back());
    arguments.back().memory = nullptr;  // the pool does not wait for executions either
  }
  for (const Buffer* const buffer : given) {
    if (PJRT_Error* const error = CheckArgument(buffer)) return error;
  }
  std::shared_ptr<const Program> program;
  if (PJRT_Error* const error = Find(args->executable, arguments, &program)) return error;
  const int index =
      args->execute_device == nullptr ? program->device : IndexOf(args->execute_device);
  for (const Buffer* const buffer : given) {
    if (buffer->device != index) return RefuseCall("an execution on another device's buffer");
  }
  for (const int donor : program->alias) {
    if (donor >= 0 && std::count(given.begin(), given.end(), given[donor]) > 1) {
      return RefuseCall("an execution that is given a buffer twice, once to keep");
    }
  }
  if (const int lost = fake_cuda::Lost(index)) {
    return NewError("INTERNAL: CUDA error " + std::to_string(lost), PJRT_Error_Code_INTERNAL);
  }
  fake_cuda::LeaveCurrent(index);
  const size_t count = program->types.size();
  std::vector<Buffer> outputs(count);
  std::vector<char*> places;
  for (size_t o = 0; o < count; ++o) {
    outputs[o].type = program->types[o];
    outputs[o].dims = program->dims[o];
    outputs[o].device = index;
    if (program->alias[o] >= 0) {
      outputs[o].address = arguments[program->alias[o]].address;
    } else if (!TakeMemory(&outputs[o])) {
      return NewError("RESOURCE_EXHAUSTED: the fake GPU is full",
                      PJRT_Error_Code_RESOURCE_EXHAUSTED);
    }
    places.push_back(outputs[o].address);
  }
  for (const int donor : program->alias) {
    if (donor >= 0) given[donor]->is_donated = true;
  }
  const std::string late =
      number == Setting("FAKE_CUDA_FAIL_LATE", -1) ? "INTERNAL: the fake kernel failed" : "";
  const bool loses = number == Setting("FAKE_CUDA_LOSE_KERNEL", -1);
  auto end = std::make_shared<End>();
  end->device = index;
  const uint64_t at = fake_cuda::Compute(index, [=, executable = args->executable] {
    if (loses) fake_cuda::Lose(index, fake_cuda::kIllegalAddress);
    if (const int lost = fake_cuda::Lost(index)) {
      end->Set("INTERNAL: CUDA error " + std::to_string(lost));
      return;
    }
    const std::string failure =
        RunNow(executable, devices[index], arguments, places, *program, nullptr);
    end->Set(failure.empty() ? late : failure);
  });
  end->number = at;
  for (size_t o = 0; o < count; ++o) args->output_lists[0][o] = NewBuffer(std::move(outputs[o]));
  if (args->device_complete_events != nullptr) {
    args->device_complete_events[0] = NewEvent(std::move(end));
  }
  return nullptr;
}

}  // namespace fake_plugin

extern "C" int fake_cuda_num_executions() { return fake_plugin::num_executions; }

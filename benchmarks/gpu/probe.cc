// The first questions to a GPU, asked of a PJRT plugin and a driver without anything of jaxoffload:
// is a donated view written in place, what does an execution cost the host, how soon does the host
// learn of its end, how fast are copies. Answers are numbers in an array; -1: not found out.
//
//   c++ -std=c++17 -O2 -shared -fPIC -I <pjrt headers> probe.cc -o libprobe.so -ldl

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "pjrt_c_api.h"

namespace {

#define ARGS(function, name)           \
  function##_Args name;                \
  std::memset(&name, 0, sizeof(name)); \
  name.struct_size = function##_Args_STRUCT_SIZE

const PJRT_Api* api = nullptr;

bool Failed(PJRT_Error* error, const char* doing) {
  if (error == nullptr) return false;
  ARGS(PJRT_Error_Message, message);
  message.error = error;
  api->PJRT_Error_Message(&message);
  std::fprintf(stderr, "%s: %.*s\n", doing, static_cast<int>(message.message_size),
               message.message);
  ARGS(PJRT_Error_Destroy, destroy);
  destroy.error = error;
  api->PJRT_Error_Destroy(&destroy);
  return true;
}

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double Median(std::vector<double> values) {
  if (values.empty()) return -1;
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

char* PointerOf(PJRT_Buffer* buffer) {
  ARGS(PJRT_Buffer_OpaqueDeviceMemoryDataPointer, args);
  args.buffer = buffer;
  if (Failed(api->PJRT_Buffer_OpaqueDeviceMemoryDataPointer(&args), "pointer")) return nullptr;
  return static_cast<char*>(args.device_memory_ptr);
}

void Destroy(PJRT_Buffer* buffer) {
  ARGS(PJRT_Buffer_Destroy, args);
  args.buffer = buffer;
  Failed(api->PJRT_Buffer_Destroy(&args), "destroy");
}

bool Await(PJRT_Event* event) {
  ARGS(PJRT_Event_Await, await);
  await.event = event;
  const bool failed = Failed(api->PJRT_Event_Await(&await), "await");
  ARGS(PJRT_Event_Destroy, destroy);
  destroy.event = event;
  Failed(api->PJRT_Event_Destroy(&destroy), "destroy an event");
  return !failed;
}

void Keep(void*, void*) {}

}  // namespace

extern "C" {

// The program takes (x, place) of f32[count] and gives x + 1 in place. Answers:
//  0 outputs that were at their place, of 8 at other offsets
//  1 seconds that Execute takes, median    2 its 99th percentile
//  3 seconds from Execute to the host's knowing of the end, through XLA's event, median
//  4 executions that were queued at once and ended
//  5 seconds that Execute takes where nobody asks for the end, median
int probe_execute(const char* plugin, void* client, const char* code, size_t code_size,
                  const char* options, size_t options_size, int64_t count, int rounds,
                  double* answers) {
  void* const library = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return 1;
  api = reinterpret_cast<const PJRT_Api* (*)()>(dlsym(library, "GetPjrtApi"))();
  auto* const pjrt = static_cast<PJRT_Client*>(client);
  ARGS(PJRT_Client_AddressableDevices, devices);
  devices.client = pjrt;
  if (Failed(api->PJRT_Client_AddressableDevices(&devices), "devices")) return 1;
  PJRT_Device* const device = devices.addressable_devices[0];

  PJRT_Program program;
  std::memset(&program, 0, sizeof(program));
  program.struct_size = PJRT_Program_STRUCT_SIZE;
  program.code = const_cast<char*>(code);
  program.code_size = code_size;
  program.format = "mlir";
  program.format_size = 4;
  ARGS(PJRT_Client_Compile, compile);
  compile.client = pjrt;
  compile.program = &program;
  compile.compile_options = options;
  compile.compile_options_size = options_size;
  if (Failed(api->PJRT_Client_Compile(&compile), "compile")) return 1;

  constexpr int kPlaces = 8;
  const int64_t bytes = (count * 4 + 255) / 256 * 256;
  const int64_t arena_bytes = bytes * (kPlaces + 1);
  ARGS(PJRT_Client_CreateUninitializedBuffer, arena);
  arena.client = pjrt;
  arena.shape_dims = &arena_bytes;
  arena.shape_num_dims = 1;
  arena.shape_element_type = PJRT_Buffer_Type_U8;
  arena.device = device;
  if (Failed(api->PJRT_Client_CreateUninitializedBuffer(&arena), "arena")) return 1;
  char* const base = PointerOf(arena.buffer);
  if (base == nullptr) return 1;
  const auto view = [&](int place) -> PJRT_Buffer* {
    ARGS(PJRT_Client_CreateViewOfDeviceBuffer, args);
    args.client = pjrt;
    args.device_buffer_ptr = base + place * bytes;
    args.dims = &count;
    args.num_dims = 1;
    args.element_type = PJRT_Buffer_Type_F32;
    args.device = device;
    args.on_delete_callback = &Keep;
    return Failed(api->PJRT_Client_CreateViewOfDeviceBuffer(&args), "view") ? nullptr : args.buffer;
  };
  PJRT_Buffer* const input = view(kPlaces);
  if (input == nullptr) return 1;
  PJRT_ExecuteOptions execute_options;
  std::memset(&execute_options, 0, sizeof(execute_options));
  execute_options.struct_size = PJRT_ExecuteOptions_STRUCT_SIZE;
  const auto execute = [&](PJRT_Buffer* place, PJRT_Event** end) -> PJRT_Buffer* {
    PJRT_Buffer* arguments[] = {input, place};
    PJRT_Buffer* const* const list = arguments;
    PJRT_Buffer* output = nullptr;
    PJRT_Buffer** const outputs = &output;
    ARGS(PJRT_LoadedExecutable_Execute, args);
    args.executable = compile.executable;
    args.options = &execute_options;
    args.argument_lists = &list;
    args.num_devices = 1;
    args.num_args = 2;
    args.output_lists = &outputs;
    args.device_complete_events = end;
    return Failed(api->PJRT_LoadedExecutable_Execute(&args), "execute") ? nullptr : output;
  };

  std::vector<PJRT_Buffer*> places;
  answers[0] = 0;
  for (int place = 0; place < kPlaces; ++place) {
    PJRT_Buffer* const given = view(place);
    PJRT_Event* end = nullptr;
    PJRT_Buffer* const output = given == nullptr ? nullptr : execute(given, &end);
    if (output == nullptr || !Await(end)) return 1;
    if (PointerOf(output) == base + place * bytes) ++answers[0];
    Destroy(given);
    places.push_back(output);
  }
  std::vector<double> calls;
  std::vector<double> ends;
  for (int round = 0; round < rounds; ++round) {
    PJRT_Buffer*& place = places[round % kPlaces];
    PJRT_Event* end = nullptr;
    const double start = Now();
    PJRT_Buffer* const output = execute(place, &end);
    const double called = Now();
    if (output == nullptr || !Await(end)) return 1;
    calls.push_back(called - start);
    ends.push_back(Now() - start);
    Destroy(place);
    place = output;
  }
  answers[1] = Median(calls);
  std::sort(calls.begin(), calls.end());
  answers[2] = calls[calls.size() * 99 / 100];
  answers[3] = Median(ends);
  answers[4] = 0;
  std::vector<PJRT_Event*> queued;
  for (int n = 0; n < 16; ++n) {
    PJRT_Buffer*& place = places[n % kPlaces];
    PJRT_Event* end = nullptr;
    PJRT_Buffer* const output = execute(place, &end);
    if (output == nullptr) return 1;
    Destroy(place);
    place = output;
    queued.push_back(end);
  }
  for (PJRT_Event* const end : queued) answers[4] += Await(end) ? 1 : 0;
  calls.clear();
  for (int round = 0; round < rounds; ++round) {
    PJRT_Buffer*& place = places[round % kPlaces];
    PJRT_Event* end = nullptr;
    const bool asks = round % 8 == 7;  // so that the queue stays short
    const double start = Now();
    PJRT_Buffer* const output = execute(place, asks ? &end : nullptr);
    if (!asks) calls.push_back(Now() - start);
    if (output == nullptr || (asks && !Await(end))) return 1;
    Destroy(place);
    place = output;
  }
  answers[5] = Median(calls);
  for (PJRT_Buffer* const place : places) Destroy(place);
  Destroy(input);
  Destroy(arena.buffer);
  return 0;
}

// Copies between `host`, which it pins, and `device` memory. Answers: bytes a second to the device,
// from it, and both at once in sum; seconds from an end to the host's knowing, through an event.
int probe_copies(const char* driver, void* host, void* device, size_t bytes, int rounds,
                 double* answers) {
  void* const library = dlopen(*driver != 0 ? driver : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return 1;
  const auto find = [&](const char* name) { return dlsym(library, name); };
  auto init = reinterpret_cast<int (*)(unsigned)>(find("cuInit"));
  auto get = reinterpret_cast<int (*)(int*, int)>(find("cuDeviceGet"));
  auto retain = reinterpret_cast<int (*)(void**, int)>(find("cuDevicePrimaryCtxRetain"));
  auto use = reinterpret_cast<int (*)(void*)>(find("cuCtxSetCurrent"));
  auto pin = reinterpret_cast<int (*)(void*, size_t, unsigned)>(find("cuMemHostRegister_v2"));
  auto unpin = reinterpret_cast<int (*)(void*)>(find("cuMemHostUnregister"));
  auto new_stream = reinterpret_cast<int (*)(void**, unsigned)>(find("cuStreamCreate"));
  auto await = reinterpret_cast<int (*)(void*)>(find("cuStreamSynchronize"));
  auto copy = reinterpret_cast<int (*)(void*, const void*, size_t, void*)>(find("cuMemcpyAsync"));
  auto new_event = reinterpret_cast<int (*)(void**, unsigned)>(find("cuEventCreate"));
  auto record = reinterpret_cast<int (*)(void*, void*)>(find("cuEventRecord"));
  auto await_event = reinterpret_cast<int (*)(void*)>(find("cuEventSynchronize"));
  int handle = 0;
  void* context = nullptr;
  void* up = nullptr;
  void* down = nullptr;
  void* event = nullptr;
  if (init(0) != 0 || get(&handle, 0) != 0 || retain(&context, handle) != 0) return 2;
  if (use(context) != 0 || new_stream(&up, 1) != 0 || new_stream(&down, 1) != 0) return 3;
  if (new_event(&event, 3) != 0 || pin(host, bytes, 1) != 0) return 4;
  const size_t half = bytes / 2;
  char* const h = static_cast<char*>(host);
  char* const d = static_cast<char*>(device);
  std::vector<double> rates[3];
  std::vector<double> waits;
  int failed = 0;
  for (int round = 0; round <= rounds; ++round) {
    for (int way = 0; way < 3; ++way) {
      const double start = Now();
      if (way != 1) failed |= copy(d, h, half, up);
      if (way != 0) failed |= copy(h + half, d + half, half, down);
      failed |= await(up) | await(down);
      const double seconds = Now() - start;
      if (round > 0) rates[way].push_back((way == 2 ? 2 : 1) * half / seconds);
    }
    const double start = Now();
    failed |= copy(d, h, 256, up) | record(event, up) | await_event(event);
    waits.push_back(Now() - start);
  }
  unpin(host);
  if (failed != 0) return 5;
  for (int way = 0; way < 3; ++way) answers[way] = Median(rates[way]);
  answers[3] = Median(waits);
  return 0;
}

}  // extern "C"

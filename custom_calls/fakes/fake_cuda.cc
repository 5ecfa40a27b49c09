// A CUDA driver without a GPU, as a shared library, as strict as the real one or stricter: what it
// refuses, it notes (fake_cuda_refusals). Streams are threads (fake_streams.h), device memory is
// host memory behind addresses that the host cannot use (fake_memory.cc). Environment variables
// make it fail or slow:
//   FAKE_CUDA_DEVICES=n          how many devices it finds (1)
//   FAKE_CUDA_MIB=n              memory of each (1024)
//   FAKE_CUDA_PIN_MIB=n          how much of the process's can be pinned (1 TiB)
//   FAKE_CUDA_DELAY_US=n         each operation of a stream may take up to so long (0)
//   FAKE_CUDA_SEED=n             other such times
//   FAKE_CUDA_HOLD=1             nothing is done before somebody waits for it
//   FAKE_CUDA_FAIL_COPY=n        the n-th copy that is given to it is refused with code 1
//   FAKE_CUDA_LOSE_COPY=n        the n-th copy loses the context, when it is done, with code 700
//   FAKE_CUDA_FAIL_EVENT=n       the n-th wait for an event finds the context lost with code 719
//   FAKE_CUDA_FAIL_PIN=1         memory cannot be pinned
//   FAKE_CUDA_FAIL_HANDLE=n      the n-th stream or event cannot be made

#include "fake_cuda.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include "fake_streams.h"

namespace fake_cuda {

int Setting(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

int NumDevices() { return Setting("FAKE_CUDA_DEVICES", 1); }

namespace {

std::mutex refusals_mutex;
std::string& Refusals() {
  static auto* const text = new std::string;
  return *text;
}

std::atomic<bool> is_initialized{false};
std::atomic<int> num_copies{0};
std::atomic<int> num_peer_copies{0};
std::atomic<int> num_waits{0};
std::atomic<int> num_handles{0};

// What every call asks first: a current context that is not lost.
int CheckCurrent(const char* call) {
  if (!is_initialized) return Refuse(kNotInitialized, std::string(call) + " before cuInit");
  const Context* const current = Current();
  if (current == nullptr) {
    return Refuse(kInvalidContext, std::string(call) + " without a current context");
  }
  return current->lost;
}

#define RETURN_IF_ERROR(expression) \
  if (const int code = (expression)) return code

// Whether a copy may read or write a range.
int CheckRange(const void* address, size_t bytes) {
  if (bytes == 0) return kSuccess;
  if (address == nullptr) return Refuse(kInvalidValue, "a copy at address 0");
  if (DeviceOf(address) >= 0) {
    if (IsTaken(address, bytes)) return kSuccess;
    return Refuse(kInvalidValue, "a copy beyond an allocation");
  }
  if (CrossesPinned(static_cast<const char*>(address), bytes)) {
    return Refuse(kInvalidValue, "a copy over the border of a pinned range");
  }
  return kSuccess;
}

int AddCopy(void* to, const void* from, size_t bytes, void* handle) {
  Stream* const stream = FindStream(handle);
  if (stream == nullptr) return Refuse(kInvalidHandle, "a copy on no stream");
  RETURN_IF_ERROR(stream->context()->lost);
  RETURN_IF_ERROR(CheckRange(to, bytes));
  RETURN_IF_ERROR(CheckRange(from, bytes));
  const int number = ++num_copies;
  if (number == Setting("FAKE_CUDA_FAIL_COPY", -1)) return kInvalidValue;
  const bool loses = number == Setting("FAKE_CUDA_LOSE_COPY", -1);
  const auto is_there = [bytes](const void* address, bool is_pinned) {
    if (DeviceOf(address) >= 0) return IsTaken(address, bytes);
    return !is_pinned || IsPinned(static_cast<const char*>(address), bytes);
  };
  const bool to_pinned = IsPinned(static_cast<char*>(to), bytes);
  const bool from_pinned = IsPinned(static_cast<const char*>(from), bytes);
  stream->Add([=, context = stream->context()] {
    if (context->lost != 0 || bytes == 0) return;
    if (!is_there(to, to_pinned) || !is_there(from, from_pinned)) {
      Refuse(kIllegalAddress, "memory was freed or unpinned while a copy of it was under way");
      Lose(context->device, kIllegalAddress);
      return;
    }
    if (loses) {
      Lose(context->device, kIllegalAddress);
      return;
    }
    std::memmove(Shadow(to), Shadow(from), bytes);
  });
  return kSuccess;
}

int CheckPeer(void* handle, const void* address) {
  const Context* const context = FindContext(handle);
  if (context == nullptr) return Refuse(kInvalidContext, "a peer copy without a context");
  RETURN_IF_ERROR(context->lost);
  if (DeviceOf(address) == context->device) return kSuccess;
  return Refuse(kInvalidValue, "a peer copy of memory of another context");
}

}  // namespace

int Refuse(Code code, const std::string& what) {
  const std::lock_guard<std::mutex> lock(refusals_mutex);
  Refusals() += std::to_string(code) + ": " + what + "\n";
  return code;
}

}  // namespace fake_cuda

using namespace fake_cuda;  // the driver's names are C's

extern "C" {

int cuInit(unsigned flags) {
  if (flags != 0) return Refuse(kInvalidValue, "cuInit with flags");
  is_initialized = true;
  return kSuccess;
}
int cuDriverGetVersion(int* version) {
  *version = 12040;
  return kSuccess;
}
int cuDeviceGetCount(int* count) {
  *count = NumDevices();
  return kSuccess;
}
int cuDeviceGet(int* device, int ordinal) {
  if (ordinal < 0 || ordinal >= NumDevices()) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}
int cuDeviceGetName(char* name, int length, int device) {
  if (device < 0 || device >= NumDevices()) return kInvalidDevice;
  std::strncpy(name, "Fake GPU", static_cast<size_t>(length));
  return kSuccess;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  if (device < 0 || device >= NumDevices()) return kInvalidDevice;
  ContextOf(device)->is_retained = true;
  *context = ContextOf(device);
  return kSuccess;
}
int cuCtxGetCurrent(void** context) {
  *context = Current();
  return kSuccess;
}
int cuCtxSetCurrent(void* handle) {
  Context* const context = FindContext(handle);
  if (handle != nullptr && context == nullptr) {
    return Refuse(kInvalidContext, "making current what is no context");
  }
  Current() = context;
  return kSuccess;
}
int cuCtxSynchronize() {
  RETURN_IF_ERROR(CheckCurrent("cuCtxSynchronize"));
  const Context* const current = Current();
  for (Stream* const stream : StreamsOf(current)) stream->AwaitAll();
  AwaitCompute(current->device);
  return current->lost;
}
int cuStreamCreate(void** stream, unsigned flags) {
  RETURN_IF_ERROR(CheckCurrent("cuStreamCreate"));
  if (flags > 1) return Refuse(kInvalidValue, "a stream with unknown flags");
  if (++num_handles == Setting("FAKE_CUDA_FAIL_HANDLE", -1)) return kOutOfMemory;
  *stream = NewStream(Current());
  return kSuccess;
}
int cuStreamDestroy_v2(void* handle) {
  const int lost = CheckCurrent("cuStreamDestroy");
  if (lost == kInvalidContext) return lost;
  Stream* const stream = FindStream(handle);
  if (stream == nullptr) return Refuse(kInvalidHandle, "destroying what is no stream");
  Destroy(stream);
  return lost;
}
int cuStreamSynchronize(void* handle) {
  RETURN_IF_ERROR(CheckCurrent("cuStreamSynchronize"));
  Stream* const stream = FindStream(handle);
  if (stream == nullptr) return Refuse(kInvalidHandle, "waiting for what is no stream");
  stream->AwaitAll();
  return stream->context()->lost;
}
int cuEventCreate(void** event, unsigned flags) {
  RETURN_IF_ERROR(CheckCurrent("cuEventCreate"));
  if (flags > 3) return Refuse(kInvalidValue, "an event with unknown flags");
  if (++num_handles == Setting("FAKE_CUDA_FAIL_HANDLE", -1)) return kOutOfMemory;
  *event = NewEvent(Current());
  return kSuccess;
}
int cuEventDestroy_v2(void* handle) {
  const int lost = CheckCurrent("cuEventDestroy");
  if (lost == kInvalidContext) return lost;
  Event* const event = FindEvent(handle);
  if (event == nullptr) return Refuse(kInvalidHandle, "destroying what is no event");
  Destroy(event);
  return lost;
}
int cuEventRecord(void* event_handle, void* stream_handle) {
  RETURN_IF_ERROR(CheckCurrent("cuEventRecord"));
  Event* const event = FindEvent(event_handle);
  Stream* const stream = FindStream(stream_handle);
  if (event == nullptr) return Refuse(kInvalidHandle, "recording what is no event");
  if (stream == nullptr) return Refuse(kInvalidHandle, "recording on what is no stream");
  if (event->context != stream->context()) {
    return Refuse(kInvalidHandle, "recording an event on a stream of another context");
  }
  RETURN_IF_ERROR(stream->context()->lost);
  const std::lock_guard<std::mutex> lock(event->mutex);
  event->stream = stream;
  event->number = stream->Add([] {});
  return kSuccess;
}
int cuEventSynchronize(void* handle) {
  RETURN_IF_ERROR(CheckCurrent("cuEventSynchronize"));
  Event* const event = FindEvent(handle);
  if (event == nullptr) return Refuse(kInvalidHandle, "waiting for what is no event");
  Stream* stream;
  uint64_t number;
  {
    // What it was recorded behind when it was asked for, not what it is recorded behind later.
    const std::lock_guard<std::mutex> lock(event->mutex);
    stream = event->stream;
    number = event->number;
  }
  if (stream != nullptr) stream->Await(number);
  if (++num_waits == Setting("FAKE_CUDA_FAIL_EVENT", -1)) {
    Lose(event->context->device, kLaunchFailed);
  }
  return event->context->lost;
}
int cuMemcpyAsync(void* to, const void* from, size_t bytes, void* stream) {
  RETURN_IF_ERROR(CheckCurrent("cuMemcpyAsync"));
  return AddCopy(to, from, bytes, stream);
}
int cuMemcpyPeerAsync(void* to, void* to_context, const void* from, void* from_context,
                      size_t bytes, void* stream) {
  RETURN_IF_ERROR(CheckCurrent("cuMemcpyPeerAsync"));
  RETURN_IF_ERROR(CheckPeer(to_context, to));
  RETURN_IF_ERROR(CheckPeer(from_context, from));
  ++num_peer_copies;
  return AddCopy(to, from, bytes, stream);
}
int cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
  RETURN_IF_ERROR(CheckCurrent("cuMemHostRegister"));
  return Pin(static_cast<char*>(address), bytes, flags);
}
int cuMemHostUnregister(void* address) {
  RETURN_IF_ERROR(CheckCurrent("cuMemHostUnregister"));
  return Unpin(static_cast<char*>(address));
}
int cuMemGetInfo_v2(size_t* free, size_t* total) {
  RETURN_IF_ERROR(CheckCurrent("cuMemGetInfo"));
  *total = static_cast<size_t>(Setting("FAKE_CUDA_MIB", 1024)) << 20;
  *free = *total - static_cast<size_t>(TakenBytes(Current()->device));
  return kSuccess;
}
int cuGetErrorName(int code, const char** name) {
  switch (code) {
    case kInvalidValue:
      *name = "CUDA_ERROR_INVALID_VALUE";
      return kSuccess;
    case kOutOfMemory:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      return kSuccess;
    case kInvalidContext:
      *name = "CUDA_ERROR_INVALID_CONTEXT";
      return kSuccess;
    case kInvalidHandle:
      *name = "CUDA_ERROR_INVALID_HANDLE";
      return kSuccess;
    case kIllegalAddress:
      *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
      return kSuccess;
    case kLaunchFailed:
      *name = "CUDA_ERROR_LAUNCH_FAILED";
      return kSuccess;
    default:
      return kInvalidValue;
  }
}

// What tests look at.
int64_t fake_cuda_pinned_bytes() { return PinnedBytes(); }
int64_t fake_cuda_taken_bytes() { return TakenBytes(-1); }
int64_t fake_cuda_num_live_handles() { return NumLiveHandles(); }
int fake_cuda_num_copies() { return num_copies; }
int fake_cuda_num_waits() { return num_waits; }
int fake_cuda_num_handles() { return num_handles; }
int fake_cuda_num_peer_copies() { return num_peer_copies; }
// A line for each call that was refused since this was asked last.
const char* fake_cuda_refusals() {
  thread_local std::string text;
  const std::lock_guard<std::mutex> lock(refusals_mutex);
  text = Refusals();
  Refusals().clear();
  return text.c_str();
}
void fake_cuda_lose(int device, int code) { Lose(device, code); }
// As if the process had been started again.
void fake_cuda_restart() {
  for (int device = 0; device < kMaxDevices; ++device) ContextOf(device)->lost = 0;
}

}  // extern "C"

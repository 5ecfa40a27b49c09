#include "cuda/driver.h"

#include <dlfcn.h>

#include <map>

#include "base/mutex.h"

namespace jaxoffload {
namespace {

constexpr unsigned kNonBlocking = 1;           // CU_STREAM_NON_BLOCKING
constexpr unsigned kBlockingSync = 1;          // CU_EVENT_BLOCKING_SYNC
constexpr unsigned kDisableTiming = 2;         // CU_EVENT_DISABLE_TIMING
constexpr unsigned kPortable = 1;              // CU_MEMHOSTREGISTER_PORTABLE
constexpr int kOutOfMemory = 2;                // CUDA_ERROR_OUT_OF_MEMORY
constexpr int kFirstSticky = 700;              // CUDA_ERROR_ILLEGAL_ADDRESS and what follows it
constexpr int kLastSticky = 719;               // CUDA_ERROR_LAUNCH_FAILED
constexpr int kEccUncorrectable = 214;         // CUDA_ERROR_ECC_UNCORRECTABLE
constexpr int kMemoryAlreadyRegistered = 712;  // CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
constexpr int kMemoryNotRegistered = 713;      // CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED

bool IsSticky(int code) {
  if (code == kMemoryAlreadyRegistered || code == kMemoryNotRegistered) return false;
  return code == kEccUncorrectable || (code >= kFirstSticky && code <= kLastSticky);
}

template <typename F>
void Find(void* library, const std::string& path, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (function == nullptr) {
    throw CudaError(-1, path + " has no " + name + ". Update the NVIDIA driver.");
  }
}

}  // namespace

std::shared_ptr<CudaDriver> CudaDriver::Load(const std::string& given) {
  const std::string path = given.empty() ? "libcuda.so.1" : given;
  static Mutex mutex;
  static auto* const loaded = new std::map<std::string, std::shared_ptr<CudaDriver>>();
  const MutexLock lock(mutex);
  const auto found = loaded->find(path);
  if (found != loaded->end()) return found->second;
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw CudaError(-1, std::string("no NVIDIA driver: ") + dlerror() +
                            ". Install it, or in a container pass the GPU through.");
  }
  std::shared_ptr<CudaDriver> driver(new CudaDriver);
  CudaDriver& d = *driver;
  Find(library, path, "cuInit", d.init_);
  Find(library, path, "cuDriverGetVersion", d.driver_version_);
  Find(library, path, "cuDeviceGetCount", d.device_count_);
  Find(library, path, "cuDeviceGet", d.device_get_);
  Find(library, path, "cuDeviceGetName", d.device_name_);
  Find(library, path, "cuDevicePrimaryCtxRetain", d.context_retain_);
  Find(library, path, "cuCtxGetCurrent", d.context_get_);
  Find(library, path, "cuCtxSetCurrent", d.context_set_);
  Find(library, path, "cuCtxSynchronize", d.context_synchronize_);
  Find(library, path, "cuStreamCreate", d.stream_create_);
  Find(library, path, "cuStreamDestroy_v2", d.stream_destroy_);
  Find(library, path, "cuStreamSynchronize", d.stream_synchronize_);
  Find(library, path, "cuEventCreate", d.event_create_);
  Find(library, path, "cuEventDestroy_v2", d.event_destroy_);
  Find(library, path, "cuEventRecord", d.event_record_);
  Find(library, path, "cuEventSynchronize", d.event_synchronize_);
  Find(library, path, "cuMemcpyAsync", d.memcpy_async_);
  Find(library, path, "cuMemcpyPeerAsync", d.memcpy_peer_);
  Find(library, path, "cuMemHostRegister_v2", d.host_register_);
  Find(library, path, "cuMemHostUnregister", d.host_unregister_);
  Find(library, path, "cuMemGetInfo_v2", d.memory_info_);
  Find(library, path, "cuGetErrorName", d.error_name_);
  d.Check(d.init_(0), "starting the NVIDIA driver");
  d.Check(d.driver_version_(&d.version_), "asking the NVIDIA driver for its version");
  d.Check(d.device_count_(&d.num_devices_), "counting GPUs");
  if (d.num_devices_ == 0) {
    throw CudaError(100, "the NVIDIA driver finds no GPU. Is CUDA_VISIBLE_DEVICES empty?");
  }
  loaded->emplace(path, driver);
  return driver;
}

std::string CudaDriver::Describe(int code, const std::string& doing) const {
  const char* name = nullptr;
  if (error_name_(code, &name) != 0 || name == nullptr) name = "an unknown error";
  std::string text = doing + ": CUDA error " + std::to_string(code) + " (" + name + ")";
  if (code == kOutOfMemory) {
    text += ". Memory outside our arena ran out: lower device_memory, or what other processes hold";
  } else if (IsSticky(code)) {
    text +=
        ". The GPU's context is lost to this process, also for JAX: start it again. If it comes "
        "back, run once under compute-sanitizer";
  }
  return text;
}

void CudaDriver::Check(int code, const std::string& doing) const {
  if (code != 0) throw CudaError(code, Describe(code, doing));
}

std::string CudaDriver::device_name(int device) const {
  int handle = 0;
  Check(device_get_(&handle, device), "finding GPU " + std::to_string(device));
  char name[256] = "";
  Check(device_name_(name, sizeof(name), handle), "naming GPU " + std::to_string(device));
  return name;
}

CuContext CudaDriver::Context(int device) {
  static Mutex mutex;
  if (device < 0 || device >= num_devices_ || device >= 64) {
    throw CudaError(101, "there is no GPU " + std::to_string(device));
  }
  const MutexLock lock(mutex);
  if (contexts_[device] == nullptr) {
    int handle = 0;
    Check(device_get_(&handle, device), "finding GPU " + std::to_string(device));
    Check(context_retain_(&contexts_[device], handle), "taking the GPU's context");
  }
  return contexts_[device];
}

void CudaDriver::Use(int device) {
  CuContext const wanted = Context(device);
  // Asked for each time: others on this thread, XLA for one, make theirs current too.
  CuContext current = nullptr;
  if (context_get_(&current) == 0 && current == wanted) return;
  Check(context_set_(wanted), "making the GPU's context current");
}

StreamHandle CudaDriver::NewStream(int device) {
  Use(device);
  CuStream stream = nullptr;
  Check(stream_create_(&stream, kNonBlocking), "making a stream");
  return StreamHandle(stream, {this, device});
}

EventHandle CudaDriver::NewEvent(int device) {
  Use(device);
  CuEvent event = nullptr;
  Check(event_create_(&event, kBlockingSync | kDisableTiming), "making an event");
  return EventHandle(event, {this, device});
}

template <bool is_stream>
void CudaDeleter<is_stream>::operator()(void* handle) const {
  if (driver->home_.IsForked()) return;
  try {
    driver->Use(device);
  } catch (const CudaError&) {
    return;  // with its context it has gone
  }
  (is_stream ? driver->stream_destroy_ : driver->event_destroy_)(handle);
}

template struct CudaDeleter<true>;
template struct CudaDeleter<false>;

int CudaDriver::CopyPeer(void* to, int to_device, const void* from, int from_device, size_t bytes,
                         CuStream stream) const {
  return memcpy_peer_(to, contexts_[to_device], from, contexts_[from_device], bytes, stream);
}

int CudaDriver::Pin(void* address, size_t bytes) const {
  return host_register_(address, bytes, kPortable);
}

void CudaDriver::MemoryInfo(int device, size_t* free, size_t* total) {
  Use(device);
  Check(memory_info_(free, total), "asking for the GPU's free memory");
}

}  // namespace jaxoffload

// The CUDA driver's own interface, found with dlopen: no toolkit to build with or to install.
//
// The declarations are ours; values and layouts are those of the driver's stable interface.

#ifndef JAXOFFLOAD_CUDA_DRIVER_H_
#define JAXOFFLOAD_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "base/process.h"

namespace jaxoffload {

using CuStream = void*;
using CuEvent = void*;
using CuContext = void*;

// A call of the driver's that failed.
class CudaError : public std::runtime_error {
 public:
  CudaError(int code, const std::string& what) : std::runtime_error(what), code_(code) {}
  int code() const { return code_; }

 private:
  const int code_;
};

class CudaDriver;

// Destroys a stream or an event with its device's context current, as the driver wants it.
template <bool is_stream>
struct CudaDeleter {
  CudaDriver* driver = nullptr;
  int device = 0;
  void operator()(void* handle) const;
};
using StreamHandle = std::unique_ptr<void, CudaDeleter<true>>;
using EventHandle = std::unique_ptr<void, CudaDeleter<false>>;

class CudaDriver {
 public:
  // Throws CudaError: there is no driver, it is too old, or it finds no device. The system's
  // driver without a `path`, which is for tests.
  static std::shared_ptr<CudaDriver> Load(const std::string& path = "");

  int num_devices() const { return num_devices_; }
  // As 12040 for CUDA 12.4: the newest that the driver knows.
  int version() const { return version_; }
  std::string device_name(int device) const;

  // Makes a device's primary context, which XLA uses too, current on the calling thread. Cheap when
  // it is. Throws CudaError.
  void Use(int device);

  // Of a device's context. They end on whatever thread, but not in a forked process, where the
  // driver cannot be called. Throw CudaError.
  StreamHandle NewStream(int device);
  // Blocks rather than spins when it is waited for.
  EventHandle NewEvent(int device);

  // The following are called while a run is under way and do not throw: they return 0 or the
  // driver's code, which Describe turns into words.
  int Copy(void* to, const void* from, size_t bytes, CuStream stream) const {
    return memcpy_async_(to, from, bytes, stream);
  }
  int CopyPeer(void* to, int to_device, const void* from, int from_device, size_t bytes,
               CuStream stream) const;
  int Record(CuEvent event, CuStream stream) const { return event_record_(event, stream); }
  int AwaitEvent(CuEvent event) const { return event_synchronize_(event); }
  int AwaitStream(CuStream stream) const { return stream_synchronize_(stream); }
  // Everything on the current device.
  int AwaitDevice() const { return context_synchronize_(); }
  // What a code means, and what to do about it.
  std::string Describe(int code, const std::string& doing) const;

  // Pins pages of the process for copies that do not stop in the driver, and ends that, with a
  // context current. 0, or the driver's code.
  int Pin(void* address, size_t bytes) const;
  int Unpin(void* address) const { return host_unregister_(address); }

  // Bytes of a device that nobody has taken, and of all.
  void MemoryInfo(int device, size_t* free, size_t* total);

 private:
  template <bool is_stream>
  friend struct CudaDeleter;

  CudaDriver() = default;
  void Check(int code, const std::string& doing) const;
  CuContext Context(int device);

  const HomeProcess home_;
  int num_devices_ = 0;
  int version_ = 0;
  CuContext contexts_[64] = {};

  int (*init_)(unsigned) = nullptr;
  int (*driver_version_)(int*) = nullptr;
  int (*device_count_)(int*) = nullptr;
  int (*device_get_)(int*, int) = nullptr;
  int (*device_name_)(char*, int, int) = nullptr;
  int (*context_retain_)(CuContext*, int) = nullptr;
  int (*context_get_)(CuContext*) = nullptr;
  int (*context_set_)(CuContext) = nullptr;
  int (*context_synchronize_)() = nullptr;
  int (*stream_create_)(CuStream*, unsigned) = nullptr;
  int (*stream_destroy_)(CuStream) = nullptr;
  int (*stream_synchronize_)(CuStream) = nullptr;
  int (*event_create_)(CuEvent*, unsigned) = nullptr;
  int (*event_destroy_)(CuEvent) = nullptr;
  int (*event_record_)(CuEvent, CuStream) = nullptr;
  int (*event_synchronize_)(CuEvent) = nullptr;
  int (*memcpy_async_)(void*, const void*, size_t, CuStream) = nullptr;
  int (*memcpy_peer_)(void*, CuContext, const void*, CuContext, size_t, CuStream) = nullptr;
  int (*host_register_)(void*, size_t, unsigned) = nullptr;
  int (*host_unregister_)(void*) = nullptr;
  int (*memory_info_)(size_t*, size_t*) = nullptr;
  int (*error_name_)(int, const char**) = nullptr;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_CUDA_DRIVER_H_

// XLA's CUDA plugin: arenas out of XLA's own pool, copies on streams of ours.
//
// **Arena.** One buffer of bytes from PJRT_Client_CreateUninitializedBuffer, so that it counts
// against XLA's own share of the device's memory; places in it become buffers with
// PJRT_Client_CreateViewOfDeviceBuffer. It is as large as the largest lease, and is taken anew
// between runs when that changes.
//
// **Streams.** Kernels go to XLA's one compute stream and are waited for by XLA's own events, which
// alone tell whether an execution failed. Copies go to two streams a direction, so that one is
// ready when the other ends, and are waited for by events of ours. What depends on a copy, or a
// copy on a kernel, starts when the host has seen the end.
//
// **Host memory.** Copies of pageable memory pass through the driver and hold the lane up, so the
// host tier is pinned (see host_block.h); pieces do not cross the border of two pinned ranges.
//
// Not yet run on hardware: tests/cuda runs it on a driver and a plugin that imitate them.

#ifndef JAXOFFLOAD_CUDA_PLATFORM_H_
#define JAXOFFLOAD_CUDA_PLATFORM_H_

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/process.h"
#include "cuda/driver.h"
#include "pjrt/platform.h"

namespace jaxoffload {

class CudaPlatform : public Platform {
 public:
  static constexpr int32_t kWindow = 8;

  // `ordinals`: the driver's numbers of the devices. Throws CudaError.
  CudaPlatform(const PJRT_Api* api, PJRT_Client* client, std::vector<PJRT_Device*> devices,
               std::vector<int32_t> ordinals, std::shared_ptr<CudaDriver> driver);
  ~CudaPlatform() override;
  CudaPlatform(const CudaPlatform&) = delete;
  CudaPlatform& operator=(const CudaPlatform&) = delete;

  int32_t window() const override { return kWindow; }
  char* ArenaBase(int32_t device) const override { return arenas_[device].base; }
  void Acquire(int32_t device, int64_t bytes) override EXCLUDES(mutex_);
  void Release(int32_t device, int64_t bytes) override EXCLUDES(mutex_);
  void Prepare() override EXCLUDES(mutex_);
  void Trim() override EXCLUDES(mutex_);
  int64_t leased_bytes(int32_t device) const override EXCLUDES(mutex_);
  int64_t resident_bytes(int32_t device) const override EXCLUDES(mutex_);
  PJRT_Error* Import(const BufferSpec& spec, PJRT_Buffer** buffer) override;
  bool Copy(int32_t lane, const CopySpec& copy, const std::atomic<bool>& abort,
            std::string* error) override;
  bool Await(int32_t lane, std::string* error) override;
  void CopyNow(char* to, const char* from, int64_t bytes, const std::atomic<bool>& abort) override;

 private:
  struct DeviceArena {
    // Written in Prepare and Trim, while no run is active; read by runs.
    char* base = nullptr;
    int64_t bytes = 0;
    PJRT_Buffer* buffer = nullptr;
    std::multiset<int64_t> leases;
  };
  // The streams of one copy lane. `issued` is the lane's thread's, `awaited` its awaiter's.
  struct CopyLane {
    int32_t ordinal = 0;
    std::vector<StreamHandle> streams;
    std::vector<EventHandle> events;
    uint64_t issued = 0;
    uint64_t awaited = 0;
  };

  PJRT_Error* Allocate(int32_t device, int64_t bytes) REQUIRES(mutex_);
  void Deallocate(DeviceArena& arena) REQUIRES(mutex_);
  int Enqueue(const CopySpec& copy, CuStream stream, const std::atomic<bool>& abort);

  const HomeProcess home_;
  const PJRT_Api* const api_;
  PJRT_Client* const client_;
  const std::vector<PJRT_Device*> devices_;
  const std::vector<int32_t> ordinals_;
  const std::shared_ptr<CudaDriver> driver_;
  std::vector<CopyLane> lanes_;  // by Lanes, but for the disk's; compute lanes have no streams

  mutable Mutex mutex_;
  std::vector<DeviceArena> arenas_;
  // For copies outside runs' vertices.
  StreamHandle now_;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_CUDA_PLATFORM_H_

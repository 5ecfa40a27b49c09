#include "cuda/platform.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "plan/lanes.h"
#include "tiers/host_block.h"

namespace jaxoffload {
namespace {

constexpr int kStreamsPerDirection = 2;

void Keep(void*, void*) {}

}  // namespace

CudaPlatform::CudaPlatform(const PJRT_Api* api, PJRT_Client* client,
                           std::vector<PJRT_Device*> devices, std::vector<int32_t> ordinals,
                           std::shared_ptr<CudaDriver> driver)
    : api_(api),
      client_(client),
      devices_(std::move(devices)),
      ordinals_(std::move(ordinals)),
      driver_(std::move(driver)),
      lanes_(devices_.size() * kDeviceLanes),
      arenas_(devices_.size()) {
  now_ = driver_->NewStream(ordinals_[0]);
  const Lanes lanes(static_cast<int32_t>(devices_.size()));
  for (int32_t lane = 0; lane < static_cast<int32_t>(lanes_.size()); ++lane) {
    lanes_[lane].ordinal = ordinals_[DeviceOfLane(lane)];
    if (lanes.IsCompute(lane)) continue;
    for (int i = 0; i < kStreamsPerDirection; ++i) {
      lanes_[lane].streams.push_back(driver_->NewStream(lanes_[lane].ordinal));
    }
    // One more than may be under way: the awaiter may still be at the oldest.
    for (int i = 0; i <= kWindow; ++i) {
      lanes_[lane].events.push_back(driver_->NewEvent(lanes_[lane].ordinal));
    }
  }
  // On whatever thread takes or gives back memory, which need not have used the GPU before.
  const auto using_gpu = [driver = driver_, ordinal = ordinals_[0]](auto call) {
    try {
      driver->Use(ordinal);
    } catch (const CudaError&) {
      return false;
    }
    return call(*driver) == 0;
  };
  HostBlock::Global().PinWith(
      [using_gpu](char* place, int64_t bytes) {
        return using_gpu([=](const CudaDriver& driver) { return driver.Pin(place, bytes); });
      },
      [using_gpu](char* place) {
        return using_gpu([=](const CudaDriver& driver) { return driver.Unpin(place); });
      });
}

CudaPlatform::~CudaPlatform() {
  if (home_.IsForked()) return;  // neither XLA nor the driver can be called there
  const MutexLock lock(mutex_);
  for (DeviceArena& arena : arenas_) Deallocate(arena);
}

void CudaPlatform::Acquire(int32_t device, int64_t bytes) {
  const MutexLock lock(mutex_);
  arenas_[device].leases.insert(bytes);
}

void CudaPlatform::Release(int32_t device, int64_t bytes) {
  const MutexLock lock(mutex_);
  DeviceArena& arena = arenas_[device];
  const auto lease = arena.leases.find(bytes);
  if (lease != arena.leases.end()) arena.leases.erase(lease);
  // With the last lease goes the last plan that could be running.
  if (arena.leases.empty()) Deallocate(arena);
}

void CudaPlatform::Prepare() {
  const MutexLock lock(mutex_);
  for (size_t device = 0; device < arenas_.size(); ++device) {
    DeviceArena& arena = arenas_[device];
    const int64_t wanted = arena.leases.empty() ? 0 : *arena.leases.rbegin();
    if (wanted == arena.bytes) continue;
    Deallocate(arena);
    Check(api_, Allocate(static_cast<int32_t>(device), wanted),
          ("taking " + std::to_string(wanted) +
           " bytes for the arena out of XLA's memory on the GPU (lower device_memory, free arrays, "
           "or raise XLA_PYTHON_CLIENT_MEM_FRACTION)")
              .c_str());
  }
}

PJRT_Error* CudaPlatform::Allocate(int32_t device, int64_t bytes) {
  JO_PJRT_ARGS(PJRT_Client_CreateUninitializedBuffer, args);
  args.client = client_;
  args.shape_dims = &bytes;
  args.shape_num_dims = 1;
  args.shape_element_type = PJRT_Buffer_Type_U8;
  args.device = devices_[device];
  if (PJRT_Error* const error = api_->PJRT_Client_CreateUninitializedBuffer(&args)) return error;
  JO_PJRT_ARGS(PJRT_Buffer_OpaqueDeviceMemoryDataPointer, pointer);
  pointer.buffer = args.buffer;
  if (PJRT_Error* const error = api_->PJRT_Buffer_OpaqueDeviceMemoryDataPointer(&pointer)) {
    DestroyBuffer(api_, args.buffer);
    return error;
  }
  // XLA hands memory out before the work that used it last has ended on the compute stream.
  driver_->Use(ordinals_[device]);
  const int code = driver_->AwaitDevice();
  if (code != 0) {
    DestroyBuffer(api_, args.buffer);
    throw CudaError(code, driver_->Describe(code, "waiting for the GPU"));
  }
  arenas_[device].buffer = args.buffer;
  arenas_[device].base = static_cast<char*>(pointer.device_memory_ptr);
  arenas_[device].bytes = bytes;
  return nullptr;
}

void CudaPlatform::Deallocate(DeviceArena& arena) {
  ForgetBeyond(static_cast<int32_t>(&arena - arenas_.data()), 0);
  if (arena.buffer != nullptr) DestroyBuffer(api_, arena.buffer);
  arena.buffer = nullptr;
  arena.base = nullptr;
  arena.bytes = 0;
}

void CudaPlatform::Trim() {
  const MutexLock lock(mutex_);
  for (DeviceArena& arena : arenas_) Deallocate(arena);
}

int64_t CudaPlatform::leased_bytes(int32_t device) const {
  const MutexLock lock(mutex_);
  const DeviceArena& arena = arenas_[device];
  return arena.leases.empty() ? 0 : *arena.leases.rbegin();
}

int64_t CudaPlatform::resident_bytes(int32_t device) const {
  const MutexLock lock(mutex_);
  return arenas_[device].bytes;
}

PJRT_Error* CudaPlatform::Import(const BufferSpec& spec, PJRT_Buffer** buffer) {
  JO_PJRT_ARGS(PJRT_Client_CreateViewOfDeviceBuffer, args);
  args.client = client_;
  args.device_buffer_ptr = spec.address;
  args.dims = spec.dims;
  args.num_dims = spec.num_dims;
  args.element_type = spec.type;
  args.device = devices_[spec.device];
  args.on_delete_callback = &Keep;
  PJRT_Error* const error = api_->PJRT_Client_CreateViewOfDeviceBuffer(&args);
  if (error == nullptr) *buffer = args.buffer;
  return error;
}

int CudaPlatform::Enqueue(const CopySpec& copy, CuStream stream, const std::atomic<bool>& abort) {
  if (copy.to_device >= 0 && copy.from_device >= 0 && copy.to_device != copy.from_device) {
    return driver_->CopyPeer(copy.to, ordinals_[copy.to_device], copy.from,
                             ordinals_[copy.from_device], copy.bytes, stream);
  }
  const HostBlock& host = HostBlock::Global();
  for (int64_t done = 0; done < copy.bytes;) {
    if (abort.load(std::memory_order_relaxed)) return 0;
    int64_t piece = copy.bytes - done;
    if (copy.to_device < 0) piece = std::min(piece, host.BytesToPinBorder(copy.to + done));
    if (copy.from_device < 0) piece = std::min(piece, host.BytesToPinBorder(copy.from + done));
    const int code = driver_->Copy(copy.to + done, copy.from + done, piece, stream);
    if (code != 0) return code;
    done += piece;
  }
  return 0;
}

bool CudaPlatform::Copy(int32_t lane_id, const CopySpec& copy, const std::atomic<bool>& abort,
                        std::string* error) {
  CopyLane& lane = lanes_[lane_id];
  const CuStream stream = lane.streams[lane.issued % lane.streams.size()].get();
  try {
    driver_->Use(lane.ordinal);
  } catch (const CudaError& e) {
    *error = e.what();
    return false;
  }
  int code = Enqueue(copy, stream, abort);
  if (code == 0)
    code = driver_->Record(lane.events[lane.issued % lane.events.size()].get(), stream);
  if (code != 0) {
    driver_->AwaitStream(stream);  // pieces may be under way
    *error = driver_->Describe(code, "copying " + std::to_string(copy.bytes) + " bytes");
    return false;
  }
  ++lane.issued;
  return true;
}

bool CudaPlatform::Await(int32_t lane_id, std::string* error) {
  CopyLane& lane = lanes_[lane_id];
  try {
    driver_->Use(lane.ordinal);
  } catch (const CudaError& e) {
    *error = e.what();
    return false;
  }
  const int code = driver_->AwaitEvent(lane.events[lane.awaited++ % lane.events.size()].get());
  if (code == 0) return true;
  *error = driver_->Describe(code, "waiting for a copy");
  return false;
}

void CudaPlatform::CopyNow(char* to, const char* from, int64_t bytes,
                           const std::atomic<bool>& abort) {
  if (to == from || bytes == 0) return;
  driver_->Use(ordinals_[0]);
  int code = Enqueue({to, from, bytes, -1, -1}, now_.get(), abort);
  const int end = driver_->AwaitStream(now_.get());
  if (code == 0) code = end;
  if (code != 0) {
    throw CudaError(code, driver_->Describe(code, "copying " + std::to_string(bytes) + " bytes"));
  }
}

}  // namespace jaxoffload

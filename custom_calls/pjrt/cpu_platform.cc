#include <algorithm>
#include <chrono>
#include <thread>

#include "launcher/backend.h"
#include "pjrt/platform.h"

namespace jaxoffload {

void Platform::Pay(const Resident& resident) {
  static const std::atomic<bool> never{false};
  CopyNow(resident.owed_to + resident.part_start, ArenaBase(resident.device) + resident.start,
          resident.bytes, never);
}

CpuPlatform::CpuPlatform(const PJRT_Api* api, PJRT_Client* client,
                         std::vector<PJRT_Device*> devices)
    : api_(api), client_(client), devices_(std::move(devices)) {
  for (size_t device = 0; device < devices_.size(); ++device) {
    arenas_.push_back(std::make_unique<Arena>("the arena of device " + std::to_string(device)));
  }
}

void CpuPlatform::Release(int32_t device, int64_t bytes) {
  // Before the pages go; what is below the other leases stays.
  ForgetBeyond(device, arenas_[device]->leased_bytes_without(bytes));
  arenas_[device]->Release(bytes);
}

void CpuPlatform::Trim() {
  for (size_t device = 0; device < arenas_.size(); ++device) {
    TrimBeyond(static_cast<int32_t>(device), 0);
  }
}

void CpuPlatform::TrimBeyond(int32_t device, int64_t bytes) {
  ForgetBeyond(device, bytes);
  arenas_[device]->TrimBeyond(bytes);
}

PJRT_Error* CpuPlatform::Import(const BufferSpec& spec, PJRT_Buffer** buffer) {
  JO_PJRT_ARGS(PJRT_Client_BufferFromHostBuffer, args);
  args.client = client_;
  args.data = spec.address;
  args.type = spec.type;
  args.dims = spec.dims;
  args.num_dims = spec.num_dims;
  args.host_buffer_semantics = PJRT_HostBufferSemantics_kMutableZeroCopy;
  args.device = devices_[spec.device];
  PJRT_Error* const error = api_->PJRT_Client_BufferFromHostBuffer(&args);
  if (error != nullptr) return error;
  *buffer = args.buffer;
  // Tells when XLA is done with the memory; it is ours for longer than that.
  JO_PJRT_ARGS(PJRT_Event_Destroy, destroy);
  destroy.event = args.done_with_host_buffer;
  return api_->PJRT_Event_Destroy(&destroy);
}

bool CpuPlatform::Copy(int32_t lane, const CopySpec& copy, const std::atomic<bool>& abort,
                       std::string*) {
  const int64_t rate = copy_bytes_per_second_.load(std::memory_order_relaxed);
  auto start = std::chrono::steady_clock::now();
  std::chrono::steady_clock::duration whole{0};
  if (rate > 0) {
    whole = std::chrono::duration_cast<std::chrono::steady_clock::duration>(
        std::chrono::duration<double>(static_cast<double>(copy.bytes) / rate));
    const bool is_devices = lane < static_cast<int32_t>(devices_.size()) * kDeviceLanes;
    const bool is_peers = copy.to_device >= 0 && copy.from_device >= 0;
    if (is_devices && !is_peers && has_bus_.load(std::memory_order_relaxed)) {
      MutexLock lock(bus_mutex_);
      auto& free = bus_free_[lane % kDeviceLanes];
      start = std::max(start, free);  // first come, first served
      free = start + whole;
    }
  }
  CopyBytes(copy.to, copy.from, copy.bytes, abort);
  if (rate > 0) std::this_thread::sleep_until(start + whole);
  return true;
}

int64_t CpuPlatform::quick_bytes() const {
  constexpr int64_t kQuick = int64_t{16} << 10;  // some 2 us; to wake takes 5 to 60
  return copy_bytes_per_second_.load(std::memory_order_relaxed) > 0 ? -1 : kQuick;
}

void CpuPlatform::CopyNow(char* to, const char* from, int64_t bytes,
                          const std::atomic<bool>& abort) {
  CopyBytes(to, from, bytes, abort);
}

}  // namespace jaxoffload

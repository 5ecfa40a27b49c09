// What differs between the platforms that XLA runs on: whose memory the arenas are, how a place
// becomes a buffer of XLA's, who copies, and how one learns that a copy has ended.

#ifndef JAXOFFLOAD_PJRT_PLATFORM_H_
#define JAXOFFLOAD_PJRT_PLATFORM_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "pjrt/api.h"
#include "plan/lanes.h"
#include "tiers/arena.h"
#include "tiers/residents.h"

namespace jaxoffload {

// A range of memory that a buffer of XLA's is made over.
struct BufferSpec {
  char* address;
  PJRT_Buffer_Type type;
  const int64_t* dims;
  size_t num_dims;
  int32_t device;
};

// One copy between tiers. A device of -1 is the host.
struct CopySpec {
  char* to;
  const char* from;
  int64_t bytes;
  int32_t to_device;
  int32_t from_device;
};

class Platform {
 public:
  virtual ~Platform() = default;

  // How many vertices of a lane may be under way; 0: they run on the lane's own thread, and their
  // end is the end of the call.
  virtual int32_t window() const = 0;

  // The arena of a device. A lease makes [0, bytes) usable from the next Prepare on, for as long as
  // it is held; the start may change in Prepare, and is null before the first. Acquire and Prepare
  // throw std::runtime_error.
  virtual char* ArenaBase(int32_t device) const = 0;
  virtual void Acquire(int32_t device, int64_t bytes) = 0;
  virtual void Release(int32_t device, int64_t bytes) = 0;
  // Before a run, while none is active.
  virtual void Prepare() = 0;
  // Gives back what can be had again. No run may be active.
  virtual void Trim() = 0;
  // The same of what is beyond so many bytes of a device's arena, where pages are had one by one.
  virtual void TrimBeyond(int32_t /*device*/, int64_t /*bytes*/) {}
  // Lets no copy be faster than so many bytes a second (0: as fast as it is): another machine's
  // link, for measurements; with `is_shared` one for the host's copies with all devices, in each
  // direction. False where copies are real ones over a link.
  virtual bool Throttle(int64_t /*bytes_per_second*/, bool /*is_shared*/) { return false; }
  // Copies of so many bytes are over before another thread would be awake.
  virtual int64_t quick_bytes() const { return -1; }
  // What is in the arenas between runs. Platforms pay and forget what they give back.
  Residents& residents() { return residents_; }
  // Copies what is owed to an array. Throws as CopyNow.
  void Pay(const Resident& resident);
  virtual int64_t leased_bytes(int32_t device) const = 0;
  virtual int64_t resident_bytes(int32_t device) const = 0;

  // A buffer over memory of ours that may be donated. The memory outlives it.
  virtual PJRT_Error* Import(const BufferSpec& spec, PJRT_Buffer** buffer) = 0;

  // Copies, or with a window puts the copy on a stream of the lane's. Called on the lane's thread.
  // False, with *error set and nothing under way, on failure.
  virtual bool Copy(int32_t lane, const CopySpec& copy, const std::atomic<bool>& abort,
                    std::string* error) = 0;
  // Waits for the lane's earliest copy that was not waited for.
  virtual bool Await(int32_t /*lane*/, std::string* /*error*/) { return true; }
  // Copies between any two addresses and returns when it is done. Throws std::runtime_error.
  virtual void CopyNow(char* to, const char* from, int64_t bytes,
                       const std::atomic<bool>& abort) = 0;

 protected:
  void ForgetBeyond(int32_t device, int64_t bytes) {
    residents_.ForgetBeyond(device, bytes, [this](const Resident& each) { Pay(each); });
  }

 private:
  Residents residents_;
};

// XLA's CPU plugin: arenas are host memory, and everything ends before it returns.
class CpuPlatform : public Platform {
 public:
  CpuPlatform(const PJRT_Api* api, PJRT_Client* client, std::vector<PJRT_Device*> devices);

  int32_t window() const override { return 0; }
  char* ArenaBase(int32_t device) const override { return arenas_[device]->base(); }
  void Acquire(int32_t device, int64_t bytes) override { arenas_[device]->Acquire(bytes); }
  void Release(int32_t device, int64_t bytes) override;
  void Prepare() override {}
  void Trim() override;
  void TrimBeyond(int32_t device, int64_t bytes) override;
  bool Throttle(int64_t bytes_per_second, bool is_shared) override {
    copy_bytes_per_second_.store(bytes_per_second, std::memory_order_relaxed);
    has_bus_.store(is_shared, std::memory_order_relaxed);
    return true;
  }
  int64_t quick_bytes() const override;
  int64_t leased_bytes(int32_t device) const override { return arenas_[device]->leased_bytes(); }
  int64_t resident_bytes(int32_t device) const override {
    return arenas_[device]->resident_bytes();
  }
  PJRT_Error* Import(const BufferSpec& spec, PJRT_Buffer** buffer) override;
  bool Copy(int32_t lane, const CopySpec& copy, const std::atomic<bool>& abort,
            std::string* error) override;
  void CopyNow(char* to, const char* from, int64_t bytes, const std::atomic<bool>& abort) override;

 private:
  const PJRT_Api* const api_;
  PJRT_Client* const client_;
  const std::vector<PJRT_Device*> devices_;
  std::vector<std::unique_ptr<Arena>> arenas_;
  std::atomic<int64_t> copy_bytes_per_second_{0};
  std::atomic<bool> has_bus_{false};
  Mutex bus_mutex_;
  // By direction, when the link that all devices share is free.
  std::array<std::chrono::steady_clock::time_point, kDeviceLanes> bus_free_ GUARDED_BY(bus_mutex_);
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PJRT_PLATFORM_H_

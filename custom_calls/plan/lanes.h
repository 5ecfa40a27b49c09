// Which kinds of vertices there are, which lane each runs on, and how lanes are numbered and
// called: said here and nowhere else. Python reads it from jaxoffload._native.
//
//   number   0         1                2                3       ...   3D             3D + 1
//   whose    device 0  device 0         device 0         device 1      the disk       the disk
//   name     compute   host to device   device to host   compute ...   disk to host   host to disk

#ifndef JAXOFFLOAD_PLAN_LANES_H_
#define JAXOFFLOAD_PLAN_LANES_H_

#include <array>
#include <cstdint>
#include <string>

namespace jaxoffload {

// The values of memgraph.py's Kind.
enum class Kind : uint8_t {
  kKernel = 0,
  kReload = 1,
  kOffload = 2,
  kTransfer = 3,
  kInput = 4,  // in hand-made graphs only; cannot run
  kLoad = 5,
  kStore = 6
};

struct LaneName {
  const char* name;
  const char* thread;  // of its thread, which the system cuts off after 15 characters
};
// Those that every device has, then the disk's.
constexpr std::array<LaneName, 5> kLaneNames = {{{"compute", "compute"},
                                                 {"host to device", "to-dev"},
                                                 {"device to host", "from-dev"},
                                                 {"disk to host", "disk-load"},
                                                 {"host to disk", "disk-store"}}};
constexpr int32_t kDeviceLanes = 3;
constexpr int32_t kDiskLanes = static_cast<int32_t>(kLaneNames.size()) - kDeviceLanes;

// The lanes of a client of so many devices.
class Lanes {
 public:
  explicit constexpr Lanes(int32_t num_devices) : num_devices_(num_devices) {}

  constexpr int32_t size() const { return first_of_disk() + kDiskLanes; }
  constexpr bool IsDisk(int32_t lane) const { return lane >= first_of_disk(); }
  constexpr bool IsCompute(int32_t lane) const { return !IsDisk(lane) && lane % kDeviceLanes == 0; }

  // Where a vertex runs. The disk's lanes are no device's: there `device` is not looked at.
  constexpr int32_t Of(Kind kind, int32_t device) const {
    switch (kind) {
      case Kind::kReload:
      case Kind::kTransfer:  // of the device that it goes to
        return device * kDeviceLanes + 1;
      case Kind::kOffload:
        return device * kDeviceLanes + 2;
      case Kind::kLoad:
        return first_of_disk();
      case Kind::kStore:
        return first_of_disk() + 1;
      default:
        return device * kDeviceLanes;
    }
  }

  // "jo-from-dev-0"
  std::string ThreadName(int32_t lane) const {
    if (IsDisk(lane)) {
      return std::string("jo-") + kLaneNames[kDeviceLanes + lane - first_of_disk()].thread;
    }
    return std::string("jo-") + kLaneNames[lane % kDeviceLanes].thread + "-" +
           std::to_string(lane / kDeviceLanes);
  }

 private:
  constexpr int32_t first_of_disk() const { return num_devices_ * kDeviceLanes; }

  int32_t num_devices_;
};

// Of a lane that is not the disk's.
constexpr int32_t DeviceOfLane(int32_t lane) { return lane / kDeviceLanes; }

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLAN_LANES_H_

// Which kinds of vertices there are, which lane each runs on, and how lanes are numbered and
// called: said here and nowhere else. Python reads it from jaxoffload._native.
//
//   number   0         1                2                3       ...   3D        3D + 1    3D + 2
//   whose    device 0  device 0         device 0         device 1      the disk  the disk  the host
//   name     compute   host to device   device to host   compute ...   disk to   host to   host
//                                                                      host      disk      compute

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
  kStore = 6,
  kHostKernel = 7,
  kLoadRows = 8,
  kStoreRows = 9,
  kPeerReload = 10
};
constexpr int kNumKinds = 11;

// Whether a vertex reads or writes rows of a table on disk, its first operand.
constexpr bool MovesRows(Kind kind) { return kind == Kind::kLoadRows || kind == Kind::kStoreRows; }
// Whether a vertex copies from a device to another.
constexpr bool IsBetweenDevices(Kind kind) {
  return kind == Kind::kTransfer || kind == Kind::kPeerReload;
}
// Whether a vertex runs an executable.
constexpr bool IsKernel(Kind kind) { return kind == Kind::kKernel || kind == Kind::kHostKernel; }

struct LaneName {
  const char* name;
  const char* thread;  // of its thread, which the system cuts off after 15 characters
};
// Those that every device has, then the disk's, then that of the host's cores.
constexpr std::array<LaneName, 6> kLaneNames = {{{"compute", "compute"},
                                                 {"host to device", "to-dev"},
                                                 {"device to host", "from-dev"},
                                                 {"disk to host", "disk-load"},
                                                 {"host to disk", "disk-store"},
                                                 {"host compute", "host"}}};
constexpr int32_t kDeviceLanes = 3;
constexpr int32_t kDiskLanes = 2;
constexpr int32_t kSharedLanes = static_cast<int32_t>(kLaneNames.size()) - kDeviceLanes;

// The lanes of a client of so many devices.
class Lanes {
 public:
  explicit constexpr Lanes(int32_t num_devices) : num_devices_(num_devices) {}

  constexpr int32_t size() const { return first_shared() + kSharedLanes; }
  constexpr bool IsHost(int32_t lane) const { return lane == first_shared() + kDiskLanes; }
  constexpr bool IsDisk(int32_t lane) const { return lane >= first_shared() && !IsHost(lane); }
  // Of a device.
  constexpr bool IsCompute(int32_t lane) const {
    return lane < first_shared() && lane % kDeviceLanes == 0;
  }

  // Where a vertex runs. The lanes of disk and host are no device's: there `device` is not looked
  // at.
  constexpr int32_t Of(Kind kind, int32_t device) const {
    switch (kind) {
      case Kind::kReload:
      case Kind::kTransfer:  // of the device that it goes to
      case Kind::kPeerReload:
        return device * kDeviceLanes + 1;
      case Kind::kOffload:
        return device * kDeviceLanes + 2;
      case Kind::kLoad:
      case Kind::kLoadRows:
        return first_shared();
      case Kind::kStore:
      case Kind::kStoreRows:
        return first_shared() + 1;
      case Kind::kHostKernel:
        return first_shared() + kDiskLanes;
      default:
        return device * kDeviceLanes;
    }
  }

  // "jo-from-dev-0"
  std::string ThreadName(int32_t lane) const {
    if (lane >= first_shared()) {
      return std::string("jo-") + kLaneNames[kDeviceLanes + lane - first_shared()].thread;
    }
    return std::string("jo-") + kLaneNames[lane % kDeviceLanes].thread + "-" +
           std::to_string(lane / kDeviceLanes);
  }

 private:
  constexpr int32_t first_shared() const { return num_devices_ * kDeviceLanes; }

  int32_t num_devices_;
};

// Of a lane that is a device's.
constexpr int32_t DeviceOfLane(int32_t lane) { return lane / kDeviceLanes; }

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLAN_LANES_H_

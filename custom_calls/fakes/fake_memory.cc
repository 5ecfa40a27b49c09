// Memory of the fake devices, and the process's own that is pinned for them.

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "fake_cuda.h"

namespace fake_cuda {
namespace {

constexpr size_t kSlice = size_t{4} << 30;  // addresses of one device
constexpr size_t kAlignment = 256;
constexpr uintptr_t kPage = 4096;
constexpr unsigned kAllFlags = 0xf;  // portable, device map, I/O memory, read-only

// Two ranges of the same length: addresses that nobody may use, and the bytes behind them.
struct DeviceMemory {
  DeviceMemory() : addresses(Map(PROT_NONE)), bytes(Map(PROT_READ | PROT_WRITE)) {}
  static char* Map(int protection) {
    void* const range = mmap(nullptr, kMaxDevices * kSlice, protection,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) std::abort();
    return static_cast<char*>(range);
  }
  bool Has(const char* address) const {
    return address >= addresses && address < addresses + kMaxDevices * kSlice;
  }

  char* const addresses;
  char* const bytes;
  std::mutex mutex;
  std::map<size_t, size_t> taken;  // end of each place, by its start
};

DeviceMemory& Memory() {
  static auto* const memory = new DeviceMemory;
  return *memory;
}

struct PinnedMemory {
  std::mutex mutex;
  std::map<uintptr_t, size_t> ranges;  // bytes of each, by its start
  int64_t bytes = 0;
};

PinnedMemory& Pinned() {
  static auto* const pinned = new PinnedMemory;
  return *pinned;
}

bool CanBeRead(const char* address) {
  char byte;
  iovec here{&byte, 1};
  iovec there{const_cast<char*>(address), 1};
  return process_vm_readv(getpid(), &here, 1, &there, 1, 0) == 1;
}

}  // namespace

char* Allocate(int device, size_t bytes) {
  DeviceMemory& memory = Memory();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  const size_t begin = static_cast<size_t>(device) * kSlice;
  const size_t limit = begin + (static_cast<size_t>(Setting("FAKE_CUDA_MIB", 1024)) << 20);
  const size_t size = (bytes + kAlignment) / kAlignment * kAlignment;
  size_t start = begin;
  for (auto next = memory.taken.lower_bound(begin); next != memory.taken.end(); ++next) {
    if (next->first >= start + size) break;
    start = next->second;
  }
  if (start + size > limit) return nullptr;
  memory.taken.emplace(start, start + size);
  return memory.addresses + start;
}

void Free(char* address) {
  DeviceMemory& memory = Memory();
  size_t start;
  size_t end;
  {
    const std::lock_guard<std::mutex> lock(memory.mutex);
    const auto found = memory.taken.find(static_cast<size_t>(address - memory.addresses));
    if (found == memory.taken.end()) std::abort();
    start = found->first;
    end = found->second;
    memory.taken.erase(found);
  }
  // Who still reads there shall notice, and who writes there already, without having waited.
  Compute(static_cast<int>(start / kSlice),
          [&memory, start, end] { std::memset(memory.bytes + start, 0xcd, end - start); });
}

int64_t TakenBytes(int device) {
  DeviceMemory& memory = Memory();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  size_t taken = 0;
  for (const auto& [start, end] : memory.taken) {
    if (device < 0 || static_cast<int>(start / kSlice) == device) taken += end - start;
  }
  return static_cast<int64_t>(taken);
}

char* Shadow(const void* address) {
  char* const given = static_cast<char*>(const_cast<void*>(address));
  DeviceMemory& memory = Memory();
  return memory.Has(given) ? memory.bytes + (given - memory.addresses) : given;
}

int DeviceOf(const void* address) {
  const char* const given = static_cast<const char*>(address);
  DeviceMemory& memory = Memory();
  return memory.Has(given) ? static_cast<int>((given - memory.addresses) / kSlice) : -1;
}

bool IsTaken(const void* address, size_t bytes) {
  const char* const given = static_cast<const char*>(address);
  DeviceMemory& memory = Memory();
  if (!memory.Has(given)) return false;
  const std::lock_guard<std::mutex> lock(memory.mutex);
  const auto start = static_cast<size_t>(given - memory.addresses);
  auto next = memory.taken.upper_bound(start);
  if (next == memory.taken.begin()) return false;
  --next;
  return start + bytes <= next->second;
}

int Pin(char* address, size_t bytes, unsigned flags) {
  if (address == nullptr || bytes == 0) return Refuse(kInvalidValue, "pinning nothing");
  if ((flags & ~kAllFlags) != 0) return Refuse(kInvalidValue, "pinning with unknown flags");
  if (DeviceOf(address) >= 0 || !CanBeRead(address) || !CanBeRead(address + bytes - 1)) {
    return Refuse(kInvalidValue, "pinning what is no memory of the process's");
  }
  PinnedMemory& pinned = Pinned();
  const std::lock_guard<std::mutex> lock(pinned.mutex);
  const auto first = reinterpret_cast<uintptr_t>(address);
  // Whole pages are pinned, each once.
  for (const auto& [start, size] : pinned.ranges) {
    const uintptr_t begin = start / kPage * kPage;
    const uintptr_t end = (start + size + kPage - 1) / kPage * kPage;
    if (first < end && begin < first + bytes) {
      return Refuse(kAlreadyRegistered, "pinning what is pinned");
    }
  }
  const int64_t limit = int64_t{Setting("FAKE_CUDA_PIN_MIB", 1 << 20)} << 20;
  if (Setting("FAKE_CUDA_FAIL_PIN", 0) != 0 || pinned.bytes + static_cast<int64_t>(bytes) > limit) {
    return kOutOfMemory;
  }
  pinned.ranges.emplace(first, bytes);
  pinned.bytes += static_cast<int64_t>(bytes);
  return kSuccess;
}

int Unpin(char* address) {
  PinnedMemory& pinned = Pinned();
  const std::lock_guard<std::mutex> lock(pinned.mutex);
  const auto found = pinned.ranges.find(reinterpret_cast<uintptr_t>(address));
  if (found == pinned.ranges.end()) return Refuse(kNotRegistered, "unpinning what is not pinned");
  pinned.bytes -= static_cast<int64_t>(found->second);
  pinned.ranges.erase(found);
  return kSuccess;
}

bool IsPinned(const char* address, size_t bytes) {
  PinnedMemory& pinned = Pinned();
  const std::lock_guard<std::mutex> lock(pinned.mutex);
  const auto first = reinterpret_cast<uintptr_t>(address);
  uintptr_t reached = first;
  for (const auto& [start, size] : pinned.ranges) {  // by address
    if (start <= reached && reached < start + size) reached = start + size;
  }
  return reached >= first + bytes;
}

bool CrossesPinned(const char* address, size_t bytes) {
  PinnedMemory& pinned = Pinned();
  const std::lock_guard<std::mutex> lock(pinned.mutex);
  const auto first = reinterpret_cast<uintptr_t>(address);
  for (const auto& [start, size] : pinned.ranges) {
    const bool overlaps = first < start + size && start < first + bytes;
    if (overlaps && (first < start || first + bytes > start + size)) return true;
  }
  return false;
}

int64_t PinnedBytes() {
  PinnedMemory& pinned = Pinned();
  const std::lock_guard<std::mutex> lock(pinned.mutex);
  return pinned.bytes;
}

}  // namespace fake_cuda

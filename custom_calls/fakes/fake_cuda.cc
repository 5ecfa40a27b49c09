// A CUDA driver without a GPU, as a shared library: streams are threads that do their work in order
// and late, device memory is host memory behind addresses that the host cannot use. Environment
// variables make it fail or slow:
//   FAKE_CUDA_DEVICES=n          how many devices it finds (1)
//   FAKE_CUDA_MIB=n              memory of each (1024)
//   FAKE_CUDA_DELAY_US=n         each operation of a stream may take up to so long (0)
//   FAKE_CUDA_FAIL_COPY=n        the n-th copy that is given to it fails with code 700
//   FAKE_CUDA_FAIL_PIN=1         memory cannot be pinned
//   FAKE_CUDA_FAIL_EVENT=n       the n-th wait for an event fails with code 719

#include "fake_cuda.h"

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace fake_cuda {

int Setting(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

}  // namespace fake_cuda

namespace {

using fake_cuda::Setting;
using fake_cuda::Shadow;

constexpr int kMaxDevices = 8;
constexpr size_t kSlice = size_t{4} << 30;  // addresses of one device
constexpr size_t kAlignment = 256;

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0;
  uint64_t reached = 0;
};

class Stream {
 public:
  Stream() : thread_([this] { Main(); }) {}
  ~Stream() {
    Add(nullptr);
    thread_.join();
  }
  void Add(std::function<void()> work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }
  void Synchronize() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return work_.empty() && !busy_; });
  }

 private:
  void Main() {
    uint64_t state = reinterpret_cast<uintptr_t>(this);
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return !work_.empty(); });
        work = std::move(work_.front());
        work_.pop_front();
        busy_ = true;
      }
      if (!work) return;
      if (const int delay = Setting("FAKE_CUDA_DELAY_US", 0)) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        std::this_thread::sleep_for(std::chrono::microseconds((state >> 33) % (delay + 1)));
      }
      work();
      const std::lock_guard<std::mutex> lock(mutex_);
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool busy_ = false;
  std::thread thread_;
};

std::atomic<int> num_copies{0};
std::atomic<int> num_peer_copies{0};
std::atomic<int> num_waits{0};
std::atomic<int64_t> pinned_bytes{0};
std::mutex pinned_mutex;
std::map<void*, size_t> pinned;

thread_local void* current = nullptr;

constexpr int kInvalidValue = 1;
constexpr int kInvalidContext = 201;

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

Stream& ComputeStream(int device) {
  static std::mutex mutex;
  static Stream* streams[kMaxDevices] = {};
  const std::lock_guard<std::mutex> lock(mutex);
  if (streams[device] == nullptr) streams[device] = new Stream;
  return *streams[device];
}

// A copy of host memory must not cross the border of a pinned range.
bool CrossesPinned(const void* address, size_t bytes) {
  const char* const start = static_cast<const char*>(address);
  const std::lock_guard<std::mutex> lock(pinned_mutex);
  for (const auto& [place, size] : pinned) {
    const char* const first = static_cast<const char*>(place);
    const bool overlaps = start < first + size && first < start + bytes;
    if (overlaps && (start < first || start + bytes > first + size)) return true;
  }
  return false;
}

}  // namespace

namespace fake_cuda {

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
  const std::lock_guard<std::mutex> lock(memory.mutex);
  const auto found = memory.taken.find(static_cast<size_t>(address - memory.addresses));
  if (found == memory.taken.end()) std::abort();
  // Who still reads there shall notice.
  std::memset(memory.bytes + found->first, 0xcd, found->second - found->first);
  memory.taken.erase(found);
}

char* Shadow(const void* address) {
  char* const given = static_cast<char*>(const_cast<void*>(address));
  DeviceMemory& memory = Memory();
  return memory.Has(given) ? memory.bytes + (given - memory.addresses) : given;
}

bool IsPinned(const char* address, size_t bytes) {
  const std::lock_guard<std::mutex> lock(pinned_mutex);
  const char* reached = address;
  for (const auto& [place, size] : pinned) {  // by address
    const char* const first = static_cast<const char*>(place);
    if (first <= reached && reached < first + size) reached = first + size;
  }
  return reached >= address + bytes;
}

void Compute(int device, std::function<void()> work) { ComputeStream(device).Add(std::move(work)); }

void AwaitCompute(int device) { ComputeStream(device).Synchronize(); }

}  // namespace fake_cuda

extern "C" {

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) {
  *version = 12040;
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = Setting("FAKE_CUDA_DEVICES", 1);
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < Setting("FAKE_CUDA_DEVICES", 1) ? 0 : 101;
}
int cuDeviceGetName(char* name, int length, int) {
  std::strncpy(name, "Fake GPU", static_cast<size_t>(length));
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  static char contexts[64];
  *context = &contexts[device];
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = current;
  return 0;
}
int cuCtxSetCurrent(void* context) {
  current = context;
  return 0;
}
int cuCtxSynchronize() {
  if (current == nullptr) return kInvalidContext;
  for (int device = 0; device < Setting("FAKE_CUDA_DEVICES", 1); ++device) {
    fake_cuda::AwaitCompute(device);
  }
  return 0;
}
int cuStreamCreate(void** stream, unsigned) {
  if (current == nullptr) return kInvalidContext;
  *stream = new Stream;
  return 0;
}
int cuStreamDestroy_v2(void* stream) {
  delete static_cast<Stream*>(stream);
  return 0;
}
int cuStreamSynchronize(void* stream) {
  if (current == nullptr) return kInvalidContext;
  static_cast<Stream*>(stream)->Synchronize();
  return 0;
}
int cuEventCreate(void** event, unsigned) {
  if (current == nullptr) return kInvalidContext;
  *event = new Event;
  return 0;
}
int cuEventDestroy_v2(void* event) {
  delete static_cast<Event*>(event);
  return 0;
}
int cuEventRecord(void* event, void* stream) {
  if (current == nullptr) return kInvalidContext;
  auto* const e = static_cast<Event*>(event);
  uint64_t number;
  {
    const std::lock_guard<std::mutex> lock(e->mutex);
    number = ++e->recorded;
  }
  static_cast<Stream*>(stream)->Add([e, number] {
    const std::lock_guard<std::mutex> lock(e->mutex);
    e->reached = number;
    e->changed.notify_all();
  });
  return 0;
}
int cuEventSynchronize(void* event) {
  if (current == nullptr) return kInvalidContext;
  auto* const e = static_cast<Event*>(event);
  std::unique_lock<std::mutex> lock(e->mutex);
  e->changed.wait(lock, [e] { return e->reached == e->recorded; });
  return ++num_waits == Setting("FAKE_CUDA_FAIL_EVENT", -1) ? 719 : 0;
}
int cuMemcpyAsync(void* to, const void* from, size_t bytes, void* stream) {
  if (current == nullptr) return kInvalidContext;
  if (++num_copies == Setting("FAKE_CUDA_FAIL_COPY", -1)) return 700;
  if (CrossesPinned(to, bytes) || CrossesPinned(from, bytes)) return kInvalidValue;
  static_cast<Stream*>(stream)->Add([=] { std::memmove(Shadow(to), Shadow(from), bytes); });
  return 0;
}
int cuMemcpyPeerAsync(void* to, void* to_context, const void* from, void* from_context,
                      size_t bytes, void* stream) {
  if (to_context == nullptr || from_context == nullptr) return kInvalidContext;
  ++num_peer_copies;
  return cuMemcpyAsync(to, from, bytes, stream);
}
int cuMemHostRegister_v2(void* address, size_t bytes, unsigned) {
  if (current == nullptr) return kInvalidContext;
  if (Setting("FAKE_CUDA_FAIL_PIN", 0) != 0) return 2;
  const std::lock_guard<std::mutex> lock(pinned_mutex);
  if (!pinned.emplace(address, bytes).second) return 712;
  pinned_bytes += static_cast<int64_t>(bytes);
  return 0;
}
int cuMemHostUnregister(void* address) {
  if (current == nullptr) return kInvalidContext;
  const std::lock_guard<std::mutex> lock(pinned_mutex);
  const auto found = pinned.find(address);
  if (found == pinned.end()) return 713;
  pinned_bytes -= static_cast<int64_t>(found->second);
  pinned.erase(found);
  return 0;
}
int cuMemGetInfo_v2(size_t* free, size_t* total) {
  if (current == nullptr) return kInvalidContext;
  *total = size_t{1} << 30;
  *free = *total / 2;
  return 0;
}
int cuGetErrorName(int code, const char** name) {
  switch (code) {
    case 2:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      return 0;
    case 700:
      *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
      return 0;
    case 719:
      *name = "CUDA_ERROR_LAUNCH_FAILED";
      return 0;
    default:
      return kInvalidValue;
  }
}

// What tests look at.
int64_t fake_cuda_pinned_bytes() { return pinned_bytes; }
int fake_cuda_num_copies() { return num_copies; }
int fake_cuda_num_waits() { return num_waits; }
int fake_cuda_num_peer_copies() { return num_peer_copies; }
int64_t fake_cuda_taken_bytes() {
  DeviceMemory& memory = Memory();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  size_t taken = 0;
  for (const auto& [start, end] : memory.taken) taken += end - start;
  return static_cast<int64_t>(taken);
}

}  // extern "C"

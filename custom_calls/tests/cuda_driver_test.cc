// The driver behind its table, on the fake one; and the host tier pinned for it.

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/driver.h"
#include "tiers/host_block.h"

namespace jaxoffload {
namespace {

TEST_APART(CopiesOfAStreamEndInOrderAndAnEventTells) {
  setenv("FAKE_CUDA_DEVICES", "1", 1);
  const std::shared_ptr<CudaDriver> driver = CudaDriver::Load(FAKE_CUDA);
  CHECK(driver->num_devices() == 1);
  CHECK(driver->version() == 12040);
  CHECK(driver->device_name(0) == "Fake GPU");
  setenv("FAKE_CUDA_DELAY_US", "500", 1);
  const StreamHandle stream_handle = driver->NewStream(0);
  const EventHandle event_handle = driver->NewEvent(0);
  const CuStream stream = stream_handle.get();
  const CuEvent event = event_handle.get();
  std::vector<int> values(1000);
  for (int i = 0; i < 1000; ++i) values[i] = i;
  std::vector<int> middle(1000);
  std::vector<int> end(1000);
  for (int round = 0; round < 20; ++round) {
    values[0] = round;
    CHECK(driver->Copy(middle.data(), values.data(), 4000, stream) == 0);
    CHECK(driver->Copy(end.data(), middle.data(), 4000, stream) == 0);
    CHECK(driver->Record(event, stream) == 0);
    CHECK(driver->AwaitEvent(event) == 0);
    CHECK(end == values);
  }
  unsetenv("FAKE_CUDA_DELAY_US");
}

TEST_APART(ErrorsOfTheDriverSayWhatToDo) {
  const std::shared_ptr<CudaDriver> driver = CudaDriver::Load(FAKE_CUDA);
  CHECK(driver->Describe(2, "x").find("lower device_memory") != std::string::npos);
  CHECK(driver->Describe(700, "x").find("start it again") != std::string::npos);
  CHECK(driver->Describe(713, "x").find("start it again") == std::string::npos);
  bool thrown = false;
  try {
    CudaDriver::Load("/no/such/driver.so");
  } catch (const CudaError& e) {
    thrown = std::string(e.what()).find("Install it") != std::string::npos;
  }
  CHECK(thrown);
  thrown = false;
  try {
    driver->Use(7);
  } catch (const CudaError& e) {
    thrown = std::string(e.what()).find("no GPU 7") != std::string::npos;
  }
  CHECK(thrown);
}

TEST_APART(RangesInUseArePinnedAndGoWhole) {
  constexpr int64_t kPin = HostBlock::kPinBytes;
  HostBlock block(4 * kPin, 64 * kPin);
  std::vector<char*> pinned;
  char* const early = block.Allocate(5000);
  bool allowed = true;
  block.PinWith(
      [&](char* place, int64_t bytes) {
        CHECK(bytes == kPin);
        if (allowed) pinned.push_back(place);
        return allowed;
      },
      [&](char* place) {
        for (size_t i = 0; i < pinned.size(); ++i) {
          if (pinned[i] == place) {
            pinned.erase(pinned.begin() + i);
            return true;
          }
        }
        CHECK(false);
        return false;
      });
  CHECK(pinned.size() == 1);
  CHECK(block.IsPinned(early, 5000));
  CHECK(!block.IsPinned(reinterpret_cast<char*>(&block), 1));
  char* const large = block.Allocate(3 * kPin);
  CHECK(pinned.size() == 4);
  CHECK(block.IsPinned(large, 3 * kPin));
  CHECK(block.stats().pinned_bytes == 4 * kPin);
  CHECK(block.BytesToPinBorder(early) == kPin - (early - pinned[0]));
  CHECK(block.BytesToPinBorder(reinterpret_cast<char*>(&block)) > (int64_t{1} << 60));
  std::memset(large, 1, 3 * kPin);
  block.Free(large);
  CHECK(pinned.size() == 4);  // kept for the next
  block.ReleaseFree();
  CHECK(pinned.size() == 1);  // with what is in use
  allowed = false;
  char* const other = block.Allocate(2 * kPin);
  CHECK(!block.IsPinned(other, 2 * kPin));
  CHECK(block.stats().num_pin_failures > 0);
  std::memset(other, 1, 2 * kPin);
  block.Free(other);
  block.Free(early);
  block.ReleaseFree();
  CHECK(block.stats().pinned_bytes <= kPin);
}

// The device goes on using the pages that it knows, so nobody else may get their addresses' others.
TEST_APART(PagesThatStayPinnedAreNotGivenBack) {
  constexpr int64_t kPin = HostBlock::kPinBytes;
  HostBlock block(4 * kPin, 64 * kPin);
  bool allowed = false;
  block.PinWith([](char*, int64_t) { return true; }, [&](char*) { return allowed; });
  char* const place = block.Allocate(2 * kPin);
  std::memset(place, 7, 2 * kPin);
  block.Free(place);
  block.ReleaseFree();
  CHECK(block.stats().num_unpin_failures == 2);
  CHECK(block.stats().pinned_bytes == 2 * kPin);
  CHECK(block.stats().kept_bytes == 2 * kPin);
  CHECK(block.Allocate(2 * kPin) == place);
  CHECK(place[0] == 7 && place[2 * kPin - 1] == 7);  // the same pages, still pinned
  CHECK(block.IsPinned(place, 2 * kPin));
  block.Free(place);
  allowed = true;
  block.ReleaseFree();
  CHECK(block.stats().pinned_bytes == 0);
  CHECK(block.stats().kept_bytes == 0);
}

TEST_APART(AContextThatOthersMadeCurrentIsReplaced) {
  setenv("FAKE_CUDA_DEVICES", "2", 1);
  const std::shared_ptr<CudaDriver> driver = CudaDriver::Load(FAKE_CUDA);
  driver->Use(0);
  void* const library = dlopen(FAKE_CUDA, RTLD_NOW | RTLD_NOLOAD);
  const auto set_current = reinterpret_cast<int (*)(void*)>(dlsym(library, "cuCtxSetCurrent"));
  CHECK(set_current(nullptr) == 0);
  size_t free = 0;
  size_t total = 0;
  driver->MemoryInfo(0, &free, &total);  // throws without a context
  CHECK(total > 0);
}

}  // namespace
}  // namespace jaxoffload

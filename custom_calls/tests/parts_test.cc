// The parts alone: inbox, ready queue, plan validation, arenas.

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "launcher/inbox.h"
#include "launcher/policy.h"
#include "plan/lanes.h"
#include "plan/loaded_plan.h"
#include "planner/place_intervals.h"
#include "planner/skyline.h"
#include "tests/check.h"
#include "tests/plan_maker.h"
#include "tiers/arena.h"

namespace jaxoffload::testing {
namespace {

TEST(InboxDeliversEverythingOnceFromManyProducers) {
  constexpr int32_t kProducers = 4;
  constexpr int32_t kEach = 20000;
  Inbox inbox;
  Patience patience;
  std::vector<int32_t> next(kProducers * kEach);
  std::vector<int64_t> payload(kProducers * kEach);  // unsynchronized but for the inbox
  std::vector<std::thread> producers;
  for (int32_t p = 0; p < kProducers; ++p) {
    producers.emplace_back([&, p] {
      for (int32_t i = 0; i < kEach; ++i) {
        const int32_t id = p * kEach + i;
        payload[id] = id + 1;
        inbox.Push(id, next.data());
        if (i % 1000 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    });
  }
  std::vector<bool> seen(next.size(), false);
  for (size_t count = 0; count < next.size();) {
    for (int32_t id = inbox.Take(patience); id != Inbox::kEmpty;) {
      const int32_t following = next[id];
      CHECK(!seen[id]);
      CHECK_EQ(payload[id], id + 1);
      seen[id] = true;
      ++count;
      id = following;
    }
  }
  for (std::thread& producer : producers) producer.join();
  CHECK_EQ(inbox.TryTake(), Inbox::kEmpty);
}

TEST(InboxStopWakesASleeperAndStays) {
  Inbox inbox;
  Patience patience;
  std::thread sleeper([&] { CHECK_EQ(inbox.Take(patience), Inbox::kStop); });
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  inbox.Stop();
  sleeper.join();
  CHECK_EQ(inbox.Take(patience), Inbox::kStop);
  CHECK_EQ(inbox.TryTake(), Inbox::kStop);
}

TEST(ReadyQueueRandomPolicyIsUniform) {
  PlanMaker maker;
  const int32_t argument = maker.Version(Space::kArgument, 0, 0, 64);
  for (int i = 0; i < 4; ++i) {
    maker.Kernel({argument}, {maker.Version(Space::kDevice, 0, 64 * i, 64)});
  }
  const auto plan = maker.Load();
  std::vector<int> first(4, 0);
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    ReadyQueue queue(*plan, 0, Policy::kRandom, seed);
    for (int32_t v = 0; v < 4; ++v) queue.Push(v);
    ++first[queue.Pop()];
  }
  for (int count : first) CHECK(count > 850 && count < 1150);
}

PlanMaker SmallPlan() {
  PlanMaker maker;
  const int32_t argument = maker.Version(Space::kArgument, 0, 0, 64);
  const int32_t x = maker.Version(Space::kDevice, 0, 0, 64);
  const int32_t y = maker.Version(Space::kDevice, 0, 64, 64);
  maker.Copy(Kind::kReload, argument, x);
  maker.Kernel({x}, {y}, 0, {x});
  maker.Copy(Kind::kOffload, y, maker.Version(Space::kResult, 0, 0, 64));
  return maker;
}

TEST(LoadedPlanNamesTheArrayThatIsWrong) {
  const struct {
    std::function<void(PlanArrays&)> spoil;
    const char* message;
  } kCases[] = {
      {[](PlanArrays& a) { a.kind[0] = 11; }, "kind[0]=11 is outside [0, 11)"},
      {[](PlanArrays& a) { a.kind[0] = 8; }, "vertex 0 is a copy with 1 inputs and 1 outputs"},
      {[](PlanArrays& a) { a.kind[0] = 7; }, "executable[0]=-1, but a kernel"},
      {[](PlanArrays& a) { a.kind[0] = 4; }, "kind[0]=4 exists in hand-made graphs only"},
      {[](PlanArrays& a) { a.kind[0] = 5; }, "lane[0]=1 does not go with kind[0]=5"},
      {[](PlanArrays& a) { a.lane[0] = 6; }, "lane[0]=6 does not go with kind[0]=1"},
      {[](PlanArrays& a) { a.argument_on_disk = {1}; }, "inputs[0]=0 is in a tier"},
      {[](PlanArrays& a) { a.result_on_disk = {1}; }, "outputs[2]=3 is in a tier"},
      {[](PlanArrays& a) { a.result_on_disk = {1, 1}; }, "result_on_disk has 2 entries"},
      {[](PlanArrays& a) { a.disk_bytes = -1; }, "disk_bytes=-1 is outside [0, "},
      {[](PlanArrays& a) { a.lane[2] = 8; }, "lane[2]=8 does not go with kind[2]=2"},
      {[](PlanArrays& a) { a.lane[2] = 9; }, "lane[2]=9 is outside [0, 9)"},
      {[](PlanArrays& a) { a.lane[1] = 1; }, "lane[1]=1 is not a compute lane"},
      {[](PlanArrays& a) { a.lane.pop_back(); }, "lane has 2 entries, expected 3"},
      {[](PlanArrays& a) { a.priority.push_back(0); }, "priority has 4 entries, expected 3"},
      {[](PlanArrays& a) { a.executable[1] = 1; }, "executable[1]=1 is outside [-1, 1)"},
      {[](PlanArrays& a) { a.executable[1] = -1; }, "executable[1]=-1, but a kernel"},
      {[](PlanArrays& a) { a.executable[0] = 0; }, "executable[0]=0, but a copy"},
      {[](PlanArrays& a) { a.succ_offsets[0] = 1; }, "succ_offsets[0]=1 must be 0"},
      {[](PlanArrays& a) { a.succ_offsets[3] = 9; }, "succ_offsets[3]=9 must be the length"},
      {[](PlanArrays& a) { a.succ[0] = 0; }, "succ[0]=0 is not after its tail 0"},
      {[](PlanArrays& a) { a.succ[0] = 3; }, "succ[0]=3 is outside [0, 3)"},
      {[](PlanArrays& a) { a.inputs[1] = 4; }, "inputs[1]=4 is outside [0, 4)"},
      {[](PlanArrays& a) { a.outputs[0] = -1; }, "outputs[0]=-1 is outside [0, 4)"},
      {[](PlanArrays& a) { a.outputs[1] = 1; }, "outputs[1]=1 is written by vertices 0 and 1"},
      {[](PlanArrays& a) { a.outputs[2] = 0; }, "outputs[2]=0 is an argument"},
      {[](PlanArrays& a) { a.inputs[0] = 3; }, "vertex 0 copies between versions"},
      {[](PlanArrays& a) { a.overwritten[1] = 0; }, "overwritten[1]=0 is not read by vertex 1"},
      {[](PlanArrays& a) { a.overwritten[0] = 0; }, "overwritten[0]=0, but the vertex is a copy"},
      {[](PlanArrays& a) { a.input_offsets[1] = 3; }, "input_offsets[2]=2 decreases"},
      {[](PlanArrays& a) { a.space[1] = 9; }, "space[1]=9 is outside [0, 5)"},
      {[](PlanArrays& a) { a.index[1] = 1; }, "index[1]=1 is not a device (there are 1)"},
      {[](PlanArrays& a) { a.index[0] = 5; }, "index[0]=5 is not an argument"},
      {[](PlanArrays& a) { a.index[3] = -1; }, "index[3]=-1 is not a result"},
      {[](PlanArrays& a) { a.offset[2] = 65; }, "offset[2]=65 and bytes[2]=64 reach beyond"},
      {[](PlanArrays& a) { a.offset[2] = -64; }, "offset[2]=-64 and bytes[2]=64 reach beyond"},
      {[](PlanArrays& a) { a.offset[2] = INT64_MAX; }, "reach beyond the 128 bytes"},
      {[](PlanArrays& a) { a.bytes[1] = -1; }, "bytes[1]=-1 is negative"},
      {[](PlanArrays& a) { a.dims_offsets.pop_back(); }, "dims_offsets has 4 entries, expected 5"},
      {[](PlanArrays& a) { a.dims[0] = -1; }, "dims[0]=-1 is outside"},
      {[](PlanArrays& a) { a.descriptions.pop_back(); }, "descriptions has 2 entries"},
      {[](PlanArrays& a) { a.arena_bytes = {128, 0, 0}; }, "the client has 2 devices"},
      {[](PlanArrays& a) { a.donated = {0}; }, "donated is not a list of pairs"},
      {[](PlanArrays& a) { a.donated = {0, 1}; }, "donated names argument 0 and result 1"},
      {[](PlanArrays& a) { a.host_bytes = -1; }, "host_bytes=-1 is outside [0, "},
      {[](PlanArrays& a) { a.host_bytes = INT64_MAX; },
       "host_bytes=9223372036854775807 is outside"},
      {[](PlanArrays& a) { a.disk_bytes = INT64_MAX; },
       "disk_bytes=9223372036854775807 is outside"},
      {[](PlanArrays& a) { a.arena_bytes[0] = INT64_MAX; },
       "arena_bytes[0]=9223372036854775807 is"},
      {[](PlanArrays& a) { a.argument_bytes[0] = INT64_MAX; }, "argument_bytes[0]=92233720368547"},
      {[](PlanArrays& a) { a.result_bytes[0] = INT64_MAX; }, "result_bytes[0]=9223372036854775807"},
  };
  for (const auto& each : kCases) {
    PlanArrays arrays = SmallPlan().Arrays();
    // The copy's input is of another size in one case: give version 3 one.
    if (std::strstr(each.message, "different") == nullptr &&
        std::strstr(each.message, "copies between") != nullptr) {
      arrays.bytes[3] = 32;
    }
    each.spoil(arrays);
    CHECK_THROWS(LoadedPlan::Load(arrays, PlanMaker::kDevices, 1), each.message);
  }
}

TEST(LoadedPlanRefusesReadingWhatIsNeverWritten) {
  PlanArrays arrays = SmallPlan().Arrays();
  arrays.inputs[2] = 3;
  arrays.outputs[2] = 2;
  arrays.outputs[1] = 1;
  arrays.outputs[0] = 2;
  arrays.overwritten[1] = -1;
  CHECK_THROWS(LoadedPlan::Load(arrays, PlanMaker::kDevices, 1), "Plan: ");
}

// The bytes that are needed at once, and so the least capacity that can do.
int64_t MostAtOnce(const std::vector<int64_t>& lower, const std::vector<int64_t>& upper,
                   const std::vector<int64_t>& size) {
  int64_t most = 0;
  for (const int64_t time : lower) {
    int64_t now = 0;
    for (size_t i = 0; i < size.size(); ++i) {
      if (lower[i] <= time && time < upper[i]) now += size[i];
    }
    most = std::max(most, now);
  }
  return most;
}

TEST(PlacementKeepsWithinTheCapacity) {
  int num_found = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    std::vector<int64_t> lower, upper, size;
    for (int i = 0; i < 16; ++i) {
      lower.push_back(random.Below(10));
      upper.push_back(lower.back() + 1 + random.Below(6));
      size.push_back(1 + random.Below(20));
    }
    // Where nothing can be spared, one byte too many is soon taken.
    const int64_t capacity = MostAtOnce(lower, upper, size);
    CHECK(PlaceIntervals(lower, upper, size, capacity - 1, 10000).empty());
    const std::vector<int64_t> found = PlaceIntervals(lower, upper, size, capacity, 10000);
    if (found.empty()) continue;
    ++num_found;
    for (size_t i = 0; i < size.size(); ++i) {
      CHECK(found[i] >= 0 && found[i] + size[i] <= capacity);
      for (size_t j = 0; j < i; ++j) {
        CHECK(upper[i] <= lower[j] || upper[j] <= lower[i] || found[i] + size[i] <= found[j] ||
              found[j] + size[j] <= found[i]);
      }
    }
  }
  CHECK(num_found > 250);
}

TEST(SkylineKeepsWithinTheCapacity) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    std::vector<int64_t> lower, upper, size, order;
    for (int i = 0; i < 40; ++i) {
      lower.push_back(random.Below(20));
      upper.push_back(lower.back() + 1 + random.Below(9));
      size.push_back(random.Below(20));
      order.insert(order.begin() + random.Below(i + 1), i);
    }
    int64_t all = 0;
    for (const int64_t bytes : size) all += bytes;
    const std::vector<int64_t> found = PlaceOnSkyline(lower, upper, size, order, all);
    CHECK_EQ(found.size(), size.size());
    int64_t top = 0;
    for (size_t i = 0; i < size.size(); ++i) {
      CHECK(found[i] >= 0);
      top = std::max(top, found[i] + size[i]);
      for (size_t j = 0; j < i; ++j) {
        CHECK(upper[i] <= lower[j] || upper[j] <= lower[i] || found[i] + size[i] <= found[j] ||
              found[j] + size[j] <= found[i]);
      }
    }
    CHECK(PlaceOnSkyline(lower, upper, size, order, top) == found);
    CHECK(PlaceOnSkyline(lower, upper, size, order, top - 1).empty());
  }
}

TEST(SkylineRefusesWhatIsNoOrder) {
  CHECK_THROWS(PlaceOnSkyline({0}, {1}, {1}, {}, 9), "1, 1, 1 and 0 entries");
  CHECK_THROWS(PlaceOnSkyline({0}, {1}, {1}, {1}, 9), "names buffer 1");
  CHECK_THROWS(PlaceOnSkyline({0, 0}, {1, 1}, {1, 1}, {0, 0}, 9), "names buffer 0");
  CHECK_THROWS(PlaceOnSkyline({3}, {3}, {1}, {0}, 9), "buffer 0 lives in [3, 3)");
  CHECK_EQ(PlaceOnSkyline({INT64_MIN}, {INT64_MAX}, {1}, {0}, 9).size(), 1u);
  CHECK_THROWS(PlaceOnSkyline({0}, {1}, {-1}, {0}, 9), "has -1 bytes");
  CHECK(PlaceOnSkyline({}, {}, {}, {}, 9).empty());
  CHECK(PlaceOnSkyline({0, 0}, {1, 1}, {INT64_MAX, 1}, {0, 1}, INT64_MAX).empty());
}

TEST(PlacementRefusesWhatItCannotAddUp) {
  CHECK_THROWS(PlaceIntervals({0, 0}, {1, 1}, {1}, 9, 9), "2, 2 and 1 entries");
  CHECK_THROWS(PlaceIntervals({0}, {1, 1}, {1, 1}, 9, 9), "1, 2 and 2 entries");
  CHECK_THROWS(PlaceIntervals({0, 3}, {1, 3}, {1, 1}, 9, 9), "buffer 1 lives in [3, 3)");
  CHECK_THROWS(PlaceIntervals({0}, {1}, {0}, 9, 9), "has 0 bytes");
  CHECK_THROWS(PlaceIntervals({0}, {1}, {-5}, 9, 9), "has -5 bytes");
  CHECK_THROWS(PlaceIntervals({INT64_MIN}, {INT64_MAX}, {1}, 9, 9), "buffer 0 lives in");
  CHECK_THROWS(PlaceIntervals({0, 0}, {1, 1}, {INT64_MAX, INT64_MAX}, INT64_MAX, 9), "added up");
  CHECK(PlaceIntervals({}, {}, {}, 9, 9).empty());
  const std::vector<int64_t> found =
      PlaceIntervals({0, 0}, {INT64_MAX, INT64_MAX}, {8, 8}, INT64_MAX, INT64_MAX);
  CHECK_EQ(found.size(), 2u);
  CHECK_EQ(found[0] + found[1], 8);
}

TEST(ArenaGivesPagesBackWhenTheLargestLeaseEnds) {
  constexpr int64_t kMiB = 1 << 20;
  Arena arena("test", 64 * kMiB);
  arena.Acquire(kMiB);
  arena.Acquire(8 * kMiB);
  CHECK_EQ(arena.leased_bytes(), 8 * kMiB);
  std::memset(arena.base(), 1, 8 * kMiB);
  CHECK_EQ(arena.resident_bytes(), 8 * kMiB);
  arena.Release(8 * kMiB);
  CHECK_EQ(arena.resident_bytes(), kMiB);
  CHECK_EQ(arena.base()[0], 1);
  arena.Release(kMiB);
  CHECK_EQ(arena.resident_bytes(), 0);
  CHECK_EQ(arena.leased_bytes(), 0);
  arena.Acquire(4096);
  arena.base()[0] = 1;
  arena.Trim();
  CHECK_EQ(arena.base()[0], 0);
}

TEST(ArenaSaysWhenItIsTooSmall) {
  Arena arena("the arena of device 7", 4 << 20);
  CHECK_THROWS(arena.Acquire(5 << 20), "the arena of device 7 has room for 4194304 bytes");
}

TEST(LanesAreNumberedDeviceByDeviceThenTheDisksAndTheHosts) {
  const Lanes lanes(2);
  std::string found;
  for (const int32_t device : {0, 1}) {
    for (const Kind kind :
         {Kind::kKernel, Kind::kInput, Kind::kReload, Kind::kTransfer, Kind::kOffload, Kind::kLoad,
          Kind::kStore, Kind::kHostKernel, Kind::kLoadRows, Kind::kStoreRows}) {
      found += std::to_string(lanes.Of(kind, device)) + " ";
    }
  }
  CHECK_EQ(found, "0 0 1 1 2 6 7 8 6 7 3 3 4 4 5 6 7 8 6 7 ");
  std::string names;
  for (int32_t lane = 0; lane < lanes.size(); ++lane) {
    names += lanes.ThreadName(lane) + (lanes.IsCompute(lane) ? "* " : " ");
  }
  CHECK_EQ(names,
           "jo-compute-0* jo-to-dev-0 jo-from-dev-0 jo-compute-1* jo-to-dev-1 jo-from-dev-1 "
           "jo-disk-load jo-disk-store jo-host ");
}

}  // namespace
}  // namespace jaxoffload::testing

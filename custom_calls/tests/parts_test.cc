// The parts alone: inbox, ready queue, plan validation, arenas.

#include <sys/mman.h>

#include <cstring>
#include <functional>
#include <set>
#include <thread>
#include <vector>

#include "launcher/inbox.h"
#include "launcher/ready_queue.h"
#include "plan/loaded_plan.h"
#include "tests/check.h"
#include "tests/plan_maker.h"
#include "tiers/arena.h"

namespace jaxoffload::testing {
namespace {

TEST(InboxDeliversEverythingOnceFromManyProducers) {
  constexpr int32_t kProducers = 4;
  constexpr int32_t kEach = 20000;
  Inbox inbox;
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
    for (int32_t id = inbox.Take(); id != Inbox::kEmpty;) {
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
  std::thread sleeper([&] { CHECK_EQ(inbox.Take(), Inbox::kStop); });
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  inbox.Stop();
  sleeper.join();
  CHECK_EQ(inbox.Take(), Inbox::kStop);
  CHECK_EQ(inbox.TryTake(), Inbox::kStop);
}

TEST(ReadyQueueRandomPolicyIsUniform) {
  PlanMaker maker;
  const int32_t argument = maker.Version(Space::kArgument, 0, 0, 64);
  for (int i = 0; i < 4; ++i) {
    maker.Kernel({argument}, {maker.Version(Space::kDevice, 0, 64 * i, 64)});
  }
  const auto plan = maker.Load();
  RunOptions options;
  options.policy = Policy::kRandom;
  std::vector<int> first(4, 0);
  for (options.seed = 0; options.seed < 4000; ++options.seed) {
    ReadyQueue queue(*plan, 0, options);
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
      {[](PlanArrays& a) { a.kind[0] = 7; }, "kind[0]=7 is outside [0, 7)"},
      {[](PlanArrays& a) { a.kind[0] = 4; }, "kind[0]=4 exists in hand-made graphs only"},
      {[](PlanArrays& a) { a.kind[0] = 5; }, "lane[0]=1 does not go with kind[0]=5"},
      {[](PlanArrays& a) { a.lane[0] = 6; }, "lane[0]=6 does not go with kind[0]=1"},
      {[](PlanArrays& a) { a.argument_on_disk = {1}; }, "inputs[0]=0 is in a tier"},
      {[](PlanArrays& a) { a.result_on_disk = {1}; }, "outputs[2]=3 is in a tier"},
      {[](PlanArrays& a) { a.result_on_disk = {1, 1}; }, "result_on_disk has 2 entries"},
      {[](PlanArrays& a) { a.disk_bytes = -1; }, "disk_bytes is negative"},
      {[](PlanArrays& a) { a.lane[2] = 8; }, "lane[2]=8 is outside [0, 8)"},
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
      {[](PlanArrays& a) { a.host_bytes = -1; }, "host_bytes is negative"},
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

}  // namespace
}  // namespace jaxoffload::testing

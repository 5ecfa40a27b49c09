// The checker of live ranges: silent on good plans (launcher_test.cc), and it names both vertices
// when an edge is missing, whichever comes first.

#include "launcher/live_ranges.h"

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "launcher/launcher.h"
#include "tests/check.h"
#include "tests/fake_backend.h"
#include "tests/plan_maker.h"

namespace jaxoffload::testing {
namespace {

struct Outcome {
  std::string error;
  bool right;
};

Outcome RunChecked(Launcher& launcher, const PlanMaker& maker, uint64_t seed) {
  const auto plan = maker.Load();
  auto backend = std::make_shared<FakeBackend>(plan, std::make_shared<FakeMemory>());
  Arrays arrays(*plan, seed);
  RunOptions options;
  options.policy = Policy::kRandom;
  options.seed = seed;
  options.max_delay_us = 50;
  options.check = true;
  auto run = std::make_shared<Run>(plan, backend, arrays.arguments(), arrays.results(), options);
  launcher.Submit(run);
  run->Wait();
  return {run->report()->error_message, arrays.right()};
}

// Loads a plan and walks it through the checker by hand.
class Walk {
 public:
  explicit Walk(const PlanMaker& maker, bool by_streams = false)
      : plan_(maker.Load()), arrays_(*plan_, 0) {
    const auto arguments = arrays_.arguments();
    const auto results = arrays_.results();
    for (int32_t v = 0; v < plan_->num_versions(); ++v) {
      char* base = memory_.host.data();
      if (plan_->space(v) == Space::kDevice) base = memory_.device[plan_->index(v)].data();
      if (plan_->space(v) == Space::kArgument) base = arguments[plan_->index(v)];
      if (plan_->space(v) == Space::kResult) base = results[plan_->index(v)];
      address_.push_back(base + plan_->offset(v));
    }
    ranges_ = std::make_unique<LiveRanges>(*plan_, address_, by_streams);
  }
  // "" if the vertex may start.
  std::string Start(int32_t vertex) {
    std::string error;
    const bool may_start = ranges_->Start(vertex, &error);
    CHECK_EQ(may_start, error.empty());
    return error;
  }
  void Run(int32_t vertex) {
    CHECK_EQ(Start(vertex), "");
    ranges_->Complete(vertex);
  }
  void RunFirst(int32_t count) {
    for (int32_t vertex = 0; vertex < count; ++vertex) Run(vertex);
  }
  void Complete(int32_t vertex) { ranges_->Complete(vertex); }
  int64_t peak() const { return ranges_->peak_device_bytes(); }

 private:
  std::shared_ptr<const LoadedPlan> plan_;
  FakeMemory memory_;
  Arrays arrays_;
  std::vector<char*> address_;
  std::unique_ptr<LiveRanges> ranges_;
};

// v0 writes x, v1 reads it, v2 writes over half of x and v3 reads that.
PlanMaker Reuse() {
  PlanMaker maker;
  const int32_t argument = maker.Version(Space::kArgument, 0, 0, 128);
  const int32_t x = maker.Version(Space::kDevice, 0, 0, 128);
  maker.Kernel({argument}, {x});
  maker.Kernel({x}, {maker.Version(Space::kDevice, 0, 256, 128)});
  const int32_t y = maker.Version(Space::kDevice, 0, 64, 128);
  maker.Copy(Kind::kReload, argument, y);
  maker.Kernel({y}, {maker.Version(Space::kDevice, 0, 512, 64)});
  return maker;
}

TEST(LiveRangesRefuseToTakeBytesThatAreStillToBeRead) {
  Walk walk(Reuse());
  walk.Run(0);
  CHECK_EQ(walk.Start(2),
           "race: vertex 2 (v2) writes bytes [64, 192) of device 0 (version 3), which overlaps "
           "bytes [0, 128) of device 0 (version 1) of vertex 0 (v0): vertex 1 (v1) has still to "
           "read it");
}

TEST(LiveRangesRefuseToTakeBytesThatAreBeingRead) {
  Walk walk(Reuse());
  walk.Run(0);
  CHECK_EQ(walk.Start(1), "");
  CHECK_CONTAINS(walk.Start(2), "vertex 1 (v1) has still to read it");
}

TEST(LiveRangesRefuseToTakeBytesThatAreBeingWritten) {
  Walk walk(Reuse());
  CHECK_EQ(walk.Start(0), "");
  CHECK_CONTAINS(walk.Start(2), "it is being written");
}

TEST(LiveRangesLetDeadBytesBeTaken) {
  Walk walk(Reuse());
  walk.RunFirst(4);
  CHECK_EQ(walk.peak(), 256);
}

TEST(LiveRangesRefuseToReadBeforeTheWriterHasCompleted) {
  Walk walk(Reuse());
  CHECK_CONTAINS(walk.Start(1), "before its writer, vertex 0 (v0), has completed");
  CHECK_EQ(walk.Start(0), "");
  CHECK_CONTAINS(walk.Start(1), "before its writer, vertex 0 (v0), has completed");
  walk.Complete(0);
  CHECK_EQ(walk.Start(1), "");
}

// v0 writes x, v1 reads it, v2 overwrites it in place.
PlanMaker InPlace() {
  PlanMaker maker;
  const int32_t argument = maker.Version(Space::kArgument, 0, 0, 64);
  const int32_t x = maker.Version(Space::kDevice, 0, 0, 64);
  maker.Kernel({argument}, {x});
  maker.Copy(Kind::kOffload, x, maker.Version(Space::kHost, 0, 0, 64));
  maker.Kernel({x}, {maker.Version(Space::kDevice, 0, 0, 64)}, 0, {x});
  return maker;
}

TEST(LiveRangesAllowOverwritingInPlaceWhenAllOthersHaveRead) {
  Walk walk(InPlace());
  walk.RunFirst(3);
  CHECK_EQ(walk.peak(), 64);
}

TEST(LiveRangesRefuseOverwritingInPlaceBeforeAllOthersHaveRead) {
  Walk walk(InPlace());
  walk.Run(0);
  CHECK_CONTAINS(walk.Start(2), "vertex 1 (v1) has still to read it");
}

// v0 writes x, v1 to v3 each add what v4 to v6 have brought, v7 reads the sum.
PlanMaker Sum() {
  PlanMaker maker;
  const int32_t argument = maker.Version(Space::kArgument, 0, 0, 64);
  std::vector<int32_t> sums = {maker.Version(Space::kDevice, 0, 0, 64)};
  maker.Kernel({argument}, {sums[0]});
  std::vector<int32_t> brought;
  for (int32_t k = 0; k < 3; ++k) {
    brought.push_back(maker.Version(Space::kDevice, 0, 256 * (k + 1), 64));
    maker.Copy(Kind::kReload, argument, brought[k]);
  }
  for (int32_t k = 0; k < 3; ++k) {
    const int32_t made = maker.Version(Space::kDevice, 0, 0, 64);
    maker.Kernel({sums[k], brought[k]}, {made}, 0, {sums[k]});
    sums.push_back(made);
  }
  maker.Kernel({sums[3]}, {maker.Version(Space::kDevice, 0, 1024, 64)});
  maker.Sum({4, 5, 6});
  return maker;
}

TEST(LiveRangesLetPartsOfASumComeInAnyOrder) {
  for (const std::vector<int32_t>& order :
       std::vector<std::vector<int32_t>>{{4, 5, 6}, {4, 6, 5}, {5, 4, 6}, {6, 5, 4}}) {
    Walk walk(Sum());
    walk.RunFirst(4);
    for (const int32_t part : order) walk.Run(part);
    walk.Run(7);
    CHECK_EQ(walk.peak(), 256);
  }
}

TEST(LiveRangesRefuseTwoPartsOfASumAtOnce) {
  Walk walk(Sum());
  walk.RunFirst(4);
  CHECK_EQ(walk.Start(6), "");
  CHECK_CONTAINS(walk.Start(4), "race: vertex 4 (v4) reads");
}

TEST(LiveRangesLetPartsOfASumFollowOneAnotherOnAStream) {
  Walk walk(Sum(), /*by_streams=*/true);
  walk.RunFirst(4);
  for (const int32_t part : {5, 6, 4}) CHECK_EQ(walk.Start(part), "");
  for (const int32_t part : {5, 6}) walk.Complete(part);
  CHECK_CONTAINS(walk.Start(7), "race: vertex 7 (v7) reads");
  walk.Complete(4);
  walk.Run(7);
  CHECK_EQ(walk.peak(), 256);
}

TEST(LiveRangesRefuseASumOnAStreamBeforeItsStartIsThere) {
  Walk walk(Sum(), /*by_streams=*/true);
  walk.Run(1);
  CHECK_EQ(walk.Start(0), "");
  CHECK_CONTAINS(walk.Start(4), "before its writer, vertex 0 (v0), has completed");
}

TEST(LiveRangesRefuseToReadASumBeforeItsLastPart) {
  Walk walk(Sum());
  walk.RunFirst(4);
  walk.Run(6);
  walk.Run(5);
  CHECK_CONTAINS(walk.Start(7), "race: vertex 7 (v7) reads");
}

TEST(LiveRangesRefuseAPartOfASumBeforeWhatItAddsIsThere) {
  Walk walk(Sum());
  walk.Run(0);
  walk.Run(1);
  CHECK_CONTAINS(walk.Start(5), "before its writer, vertex 2 (v2), has completed");
}

TEST(PartsOfASumThatAddNothingAreRefused) {
  PlanMaker maker;
  const int32_t argument = maker.Version(Space::kArgument, 0, 0, 64);
  const int32_t x = maker.Version(Space::kDevice, 0, 0, 64);
  maker.Kernel({argument}, {x});
  maker.Sum({0});
  CHECK_THROWS(maker.Load(), "first_of_sum[0]=0, but the vertex adds nothing");
}

TEST(LiveRangesKeepResultsForEver) {
  PlanMaker maker;
  const int32_t argument = maker.Version(Space::kArgument, 0, 0, 64);
  maker.Copy(Kind::kOffload, argument, maker.Version(Space::kResult, 0, 0, 64));
  maker.Copy(Kind::kOffload, argument, maker.Version(Space::kResult, 0, 32, 64));
  Walk walk(maker);
  walk.Run(0);
  CHECK_CONTAINS(walk.Start(1), "it is a result");
}

TEST(LiveRangesSeeAResultWrittenOverAnArgumentThatIsStillToBeRead) {
  PlanMaker maker;
  const int32_t argument = maker.Version(Space::kArgument, 0, 0, 64);
  const int32_t x = maker.Version(Space::kDevice, 0, 0, 64);
  maker.Copy(Kind::kReload, argument, x);
  maker.Copy(Kind::kReload, argument, maker.Version(Space::kDevice, 0, 64, 64));
  maker.Copy(Kind::kOffload, x, maker.Version(Space::kResult, 0, 0, 64));
  const auto plan = maker.Load();
  std::vector<char> donated(64);
  FakeMemory memory;
  const std::vector<char*> address = {donated.data(), memory.device[0].data(),
                                      memory.device[0].data() + 64, donated.data()};
  LiveRanges ranges(*plan, address);
  std::string error;
  CHECK(ranges.Start(0, &error));
  ranges.Complete(0);
  CHECK(!ranges.Start(2, &error));
  CHECK_CONTAINS(error, "overlaps bytes [0, 64) of argument 0 (version 0): vertex 1 (v1)");
  CHECK(ranges.Start(1, &error));
  ranges.Complete(1);
  CHECK(ranges.Start(2, &error));
}

TEST(LiveRangesLetOneArrayBeTwoArguments) {
  PlanMaker maker;
  const int32_t a = maker.Version(Space::kArgument, 0, 0, 64);
  const int32_t b = maker.Version(Space::kArgument, 1, 0, 64);
  maker.Kernel({a, b}, {maker.Version(Space::kDevice, 0, 0, 64)});
  const auto plan = maker.Load();
  std::vector<char> array(64);
  FakeMemory memory;
  const std::vector<char*> address = {array.data(), array.data(), memory.device[0].data()};
  LiveRanges ranges(*plan, address);
  std::string error;
  CHECK(ranges.Start(0, &error));
}

// Whether `head` comes after `tail` without the edge between them.
bool Implied(const PlanMaker& maker, int32_t tail, int32_t head) {
  std::set<int32_t> reached = {tail};
  for (const auto& [t, h] : maker.edges()) {  // sorted by tail, and tail < head
    if (reached.count(t) > 0 && !(t == tail && h == head)) reached.insert(h);
  }
  return reached.count(head) > 0;
}

// The property that matters: with one needed edge gone, a run is either stopped by the checker or
// right. And the checker does stop some.
TEST(LiveRangesStopEveryRunThatAMissingEdgeMakesWrong) {
  Launcher launcher{Lanes(PlanMaker::kDevices)};
  int stopped = 0;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    const PlanMaker whole = RandomPlan(seed, 60);
    Random random(seed);
    for (int removal = 0; removal < 8; ++removal) {
      PlanMaker maker = whole;
      auto edge = maker.edges().begin();
      std::advance(edge, random.Below(maker.edges().size()));
      const auto [tail, head] = *edge;
      if (Implied(maker, tail, head)) continue;
      maker.RemoveEdge(tail, head);
      for (uint64_t order = 0; order < 4; ++order) {
        const Outcome outcome = RunChecked(launcher, maker, order);
        CHECK(outcome.right || !outcome.error.empty());
        if (!outcome.error.empty()) CHECK_CONTAINS(outcome.error, "race: ");
        stopped += outcome.error.empty() ? 0 : 1;
      }
    }
  }
  CHECK(stopped > 20);
}

}  // namespace
}  // namespace jaxoffload::testing

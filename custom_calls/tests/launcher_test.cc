// The launcher on a fake backend: right results in every order, failures that drain, runs that
// queue. Plans and delays are random, with the seed in every message.

#include "launcher/launcher.h"

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "base/patience.h"
#include "base/thread.h"
#include "launcher/callback_threads.h"
#include "tests/check.h"
#include "tests/fake_backend.h"
#include "tests/fork.h"
#include "tests/no_memory.h"
#include "tests/plan_maker.h"

namespace jaxoffload::testing {
namespace {

constexpr Lanes kLanes(PlanMaker::kDevices);

RunOptions Options(Policy policy, uint64_t seed = 0, int64_t max_delay_us = 0, bool check = false) {
  RunOptions options;
  options.policy = policy;
  options.seed = seed;
  options.max_delay_us = max_delay_us;
  options.check = check;
  return options;
}

struct Fixture {
  explicit Fixture(std::shared_ptr<const LoadedPlan> loaded)
      : plan(std::move(loaded)),
        memory(std::make_shared<FakeMemory>()),
        backend(std::make_shared<FakeBackend>(plan, memory)),
        launcher(kLanes) {}

  std::shared_ptr<Run> Submit(Arrays& arrays, const RunOptions& options) {
    auto run = std::make_shared<Run>(plan, backend, arrays.arguments(), arrays.results(), options);
    launcher.Submit(run);
    return run;
  }
  std::shared_ptr<const RunReport> RunAndWait(Arrays& arrays, const RunOptions& options) {
    const std::shared_ptr<Run> run = Submit(arrays, options);
    run->Wait();
    return run->report();
  }

  std::shared_ptr<const LoadedPlan> plan;
  std::shared_ptr<FakeMemory> memory;
  std::shared_ptr<FakeBackend> backend;
  Launcher launcher;
};

// Runs random plans under one policy; every result must be right.
void CheckRandomPlans(Policy policy, int64_t max_delay_us, bool check) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    Fixture f(RandomPlan(seed, 120).Load());
    for (uint64_t repeat = 0; repeat < 4; ++repeat) {
      Arrays arrays(*f.plan, Mix(seed, repeat));
      const auto report = f.RunAndWait(arrays, Options(policy, repeat, max_delay_us, check));
      if (!report->error_message.empty() || !arrays.right()) {
        Fail(__FILE__, __LINE__, "seed " + std::to_string(seed) + ": " + report->error_message);
      }
      CHECK_EQ(report->error_vertex, -1);
      for (int32_t v = 0; v < f.plan->num_vertices(); ++v) {
        CHECK(report->start_ns[v] >= 0 && report->end_ns[v] >= report->start_ns[v]);
        for (const int32_t* s = f.plan->successors_begin(v); s != f.plan->successors_end(v); ++s) {
          CHECK(report->start_ns[*s] >= report->end_ns[v]);
        }
      }
    }
    CHECK_EQ(f.backend->num_ended.load(), 4);
  }
}

TEST(LauncherGivesRightResultsWorkConserving) {
  CheckRandomPlans(Policy::kWorkConserving, 0, false);
}
TEST(LauncherGivesRightResultsInFixedOrder) { CheckRandomPlans(Policy::kFixed, 0, false); }
TEST(LauncherGivesRightResultsInRandomOrder) { CheckRandomPlans(Policy::kRandom, 0, false); }
TEST(LauncherGivesRightResultsWithDelays) { CheckRandomPlans(Policy::kRandom, 300, false); }
TEST(LauncherGivesRightResultsWhileChecked) { CheckRandomPlans(Policy::kRandom, 100, true); }

// One gate, then many vertices of one lane: all are ready when the gate completes.
PlanMaker GateAndMany(const std::vector<double>& priorities) {
  PlanMaker maker;
  const int32_t argument = maker.Version(Space::kArgument, 0, 0, 64);
  const int32_t gate = maker.Version(Space::kDevice, 0, 0, 64);
  maker.Kernel({argument}, {gate});
  for (size_t i = 0; i < priorities.size(); ++i) {
    maker.Kernel({gate}, {maker.Version(Space::kDevice, 0, 64 * (1 + i), 64)}, priorities[i]);
  }
  return maker;
}

std::vector<int32_t> OrderOf(const RunReport& report) {
  std::vector<int32_t> order(report.start_ns.size());
  for (size_t v = 0; v < order.size(); ++v) order[v] = static_cast<int32_t>(v);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t x, int32_t y) { return report.start_ns[x] < report.start_ns[y]; });
  return order;
}

template <typename T>
std::string Text(const std::vector<T>& values) {
  std::string text;
  for (const T& value : values) text += std::to_string(value) + " ";
  return text;
}

TEST(LauncherStartsLargestPriorityFirstAndTiesInSerialOrder) {
  Fixture f(GateAndMany({1, 5, 3, 5, 9}).Load());
  Arrays arrays(*f.plan, 0);
  const auto report = f.RunAndWait(arrays, Options(Policy::kWorkConserving));
  CHECK_EQ(Text(OrderOf(*report)), "0 5 2 4 3 1 ");
}

TEST(LauncherFixedPolicyKeepsSerialOrder) {
  Fixture f(GateAndMany({1, 5, 3, 5, 9}).Load());
  Arrays arrays(*f.plan, 0);
  CHECK_EQ(Text(OrderOf(*f.RunAndWait(arrays, Options(Policy::kFixed)))), "0 1 2 3 4 5 ");
}

TEST(LauncherFixedPolicyWaitsForTheNextVertexAlthoughAnotherIsReady) {
  PlanMaker maker;
  const int32_t argument = maker.Version(Space::kArgument, 0, 0, 64);
  const int32_t x = maker.Version(Space::kDevice, 0, 0, 64);
  maker.Copy(Kind::kReload, argument, x);
  const int32_t waits = maker.Kernel({x}, {maker.Version(Space::kDevice, 0, 64, 64)});
  const int32_t ready = maker.Kernel({argument}, {maker.Version(Space::kDevice, 0, 128, 64)});
  Fixture f(maker.Load());
  std::atomic<bool> has_begun{false};  // the one that is ready
  bool holds = false;
  f.backend->on_execute = [&](int32_t vertex) {
    if (vertex == ready) has_begun = true;
    // Long enough that the ready one could begin; and where it may, until it has.
    if (vertex == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    while (vertex == 0 && holds && !has_begun) std::this_thread::yield();
  };
  Arrays arrays(*f.plan, 0);
  const auto fixed = f.RunAndWait(arrays, Options(Policy::kFixed));
  CHECK(fixed->start_ns[waits] < fixed->start_ns[ready]);
  holds = true;
  has_begun = false;
  const auto free = f.RunAndWait(arrays, Options(Policy::kWorkConserving));
  CHECK(free->start_ns[waits] > free->start_ns[ready]);
}

TEST(LauncherRandomPolicyFindsManyOrdersAndRepeatsASeed) {
  Fixture f(GateAndMany(std::vector<double>(8, 0)).Load());
  std::set<std::string> orders;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Arrays arrays(*f.plan, 0);
    const std::string order = Text(OrderOf(*f.RunAndWait(arrays, Options(Policy::kRandom, seed))));
    CHECK_EQ(order, Text(OrderOf(*f.RunAndWait(arrays, Options(Policy::kRandom, seed)))));
    orders.insert(order);
  }
  CHECK(orders.size() > 10);
}

TEST(LauncherStopsAtTheFirstErrorAndTheNextRunWorks) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    Fixture f(RandomPlan(seed, 100).Load());
    for (const int32_t failing : {0, 7, 50, f.plan->num_vertices() - 1}) {
      f.backend->failing = failing;
      Arrays arrays(*f.plan, seed);
      const auto report = f.RunAndWait(arrays, Options(Policy::kRandom, seed, 20));
      CHECK_EQ(report->error_vertex, failing);
      CHECK_EQ(report->error_message, "vertex fails");
      CHECK_EQ(report->end_ns[failing], -1);
      for (const int32_t* s = f.plan->successors_begin(failing);
           s != f.plan->successors_end(failing); ++s) {
        CHECK_EQ(report->start_ns[*s], -1);
      }
      f.backend->failing = -1;
      Arrays again(*f.plan, seed + 1);
      CHECK_EQ(f.RunAndWait(again, Options(Policy::kWorkConserving))->error_message, "");
      CHECK(again.right());
    }
  }
}

TEST(LauncherReportsWhatAVertexThrowsAndTheNextRunWorks) {
  Fixture f(RandomPlan(1, 100).Load());
  f.backend->on_execute = [](int32_t vertex_id) {
    if (vertex_id == 7) throw std::bad_alloc();
  };
  Arrays arrays(*f.plan, 1);
  const auto report = f.RunAndWait(arrays, Options(Policy::kWorkConserving));
  CHECK_EQ(report->error_vertex, 7);
  CHECK_EQ(report->error_message, "std::bad_alloc");
  f.backend->on_execute = nullptr;
  Arrays again(*f.plan, 2);
  CHECK_EQ(f.RunAndWait(again, Options(Policy::kWorkConserving))->error_message, "");
  CHECK(again.right());
}

TEST(LauncherReportsAFailedBegin) {
  Fixture f(RandomPlan(1, 20).Load());
  f.backend->failing = FakeBackend::kFailsInBegin;
  Arrays arrays(*f.plan, 0);
  const auto report = f.RunAndWait(arrays, Options(Policy::kWorkConserving));
  CHECK_EQ(report->error_message, "begin fails");
  CHECK_EQ(report->error_vertex, -1);
  CHECK_EQ(f.backend->num_executed.load(), 0);
  CHECK_EQ(f.backend->num_ended.load(), 1);
  f.backend->failing = -1;
  CHECK_EQ(f.RunAndWait(arrays, Options(Policy::kFixed))->error_message, "");
  CHECK(arrays.right());
}

TEST(LauncherCancelsARunAndTheNextOneWorks) {
  Fixture f(RandomPlan(3, 150).Load());
  std::atomic<bool> reached{false};
  f.backend->on_execute = [&](int32_t vertex) {
    if (vertex == 40) reached = true;
    if (reached) std::this_thread::sleep_for(std::chrono::microseconds(200));
  };
  Arrays arrays(*f.plan, 0);
  const auto run = f.Submit(arrays, Options(Policy::kFixed));
  while (!reached) std::this_thread::yield();
  run->Cancel();
  run->Wait();
  CHECK(run->report()->cancelled);
  CHECK_EQ(run->report()->error_message, "the run was cancelled");
  CHECK(f.backend->num_executed < f.plan->num_vertices());
  f.backend->on_execute = nullptr;
  CHECK_EQ(f.RunAndWait(arrays, Options(Policy::kRandom))->error_message, "");
  CHECK(arrays.right());
}

TEST(LauncherCancelsARunThatIsStillQueued) {
  Fixture f(GateAndMany({0, 0}).Load());
  std::atomic<bool> release{false};
  f.backend->on_execute = [&](int32_t) {
    while (!release) std::this_thread::yield();
  };
  Arrays first(*f.plan, 0), second(*f.plan, 1);
  const auto running = f.Submit(first, Options(Policy::kFixed));
  const auto queued = f.Submit(second, Options(Policy::kFixed));
  queued->Cancel();
  CHECK(!queued->WaitFor(std::chrono::milliseconds(1)));
  release = true;
  running->Wait();
  queued->Wait();
  CHECK_EQ(running->report()->error_message, "");
  CHECK(queued->report()->cancelled);
  CHECK_EQ(f.backend->num_executed.load(), 3);
}

TEST(LauncherRunsThePlansOfManyThreadsOneAtATime) {
  auto memory = std::make_shared<FakeMemory>();
  Launcher launcher(kLanes);
  std::vector<std::shared_ptr<const LoadedPlan>> plans;
  for (uint64_t seed = 0; seed < 3; ++seed) plans.push_back(RandomPlan(seed, 60).Load());
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      const auto& plan = plans[t % plans.size()];
      auto backend = std::make_shared<FakeBackend>(plan, memory);
      for (uint64_t repeat = 0; repeat < 15; ++repeat) {
        Arrays arrays(*plan, Mix(t, repeat));
        auto run = std::make_shared<Run>(plan, backend, arrays.arguments(), arrays.results(),
                                         Options(static_cast<Policy>((t + repeat) % 3), repeat));
        launcher.Submit(run);
        run->Wait();
        CHECK_EQ(run->report()->error_message, "");
        CHECK(arrays.right());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A chain of copies that are all over before a lane would wake.
PlanMaker QuickChain(int length) {
  PlanMaker maker;
  int32_t last = maker.Version(Space::kArgument, 0, 0, 64);
  for (int i = 0; i < length; ++i) {
    const int32_t next = maker.Version(Space::kDevice, 0, 64 * i, 64);
    maker.Copy(Kind::kReload, last, next);
    last = next;
  }
  maker.Copy(Kind::kOffload, last, maker.Version(Space::kResult, 0, 0, 64));
  return maker;
}

TEST(LauncherExecutesWhatIsQuickWhereItBecomesReady) {
  Fixture f(QuickChain(5).Load());
  f.backend->all_are_quick = true;
  std::set<std::thread::id> threads;
  f.backend->on_execute = [&](int32_t) { threads.insert(std::this_thread::get_id()); };
  Arrays arrays(*f.plan, 0);
  CHECK_EQ(f.RunAndWait(arrays, Options(Policy::kWorkConserving))->error_message, "");
  CHECK(arrays.right());
  CHECK(threads == std::set<std::thread::id>{std::this_thread::get_id()});
}

// Where the order is what is asked for, a lane has all of its vertices.
TEST(LauncherKeepsWhatIsQuickOnItsLaneInFixedAndRandomOrder) {
  for (const Policy policy : {Policy::kFixed, Policy::kRandom}) {
    Fixture f(QuickChain(5).Load());
    f.backend->all_are_quick = true;
    const std::thread::id mine = std::this_thread::get_id();
    std::atomic<int> here{0};
    f.backend->on_execute = [&](int32_t) { here += std::this_thread::get_id() == mine; };
    Arrays arrays(*f.plan, 0);
    f.RunAndWait(arrays, Options(policy));
    CHECK(arrays.right());
    CHECK_EQ(here.load(), 0);
  }
}

TEST(LauncherExecutesNoMoreThanAFewQuickVerticesAtATime) {
  PlanMaker maker;
  const int32_t argument = maker.Version(Space::kArgument, 0, 0, 64);
  for (int i = 0; i < 100; ++i) {
    maker.Copy(Kind::kReload, argument, maker.Version(Space::kDevice, 0, 64 * i, 64));
  }
  Fixture f(maker.Load());
  f.backend->all_are_quick = true;
  const std::thread::id mine = std::this_thread::get_id();
  std::atomic<int> here{0};
  f.backend->on_execute = [&](int32_t) { here += std::this_thread::get_id() == mine; };
  Arrays arrays(*f.plan, 0);
  f.RunAndWait(arrays, Options(Policy::kWorkConserving));
  CHECK(here >= 1 && here <= 8);
}

TEST(LauncherEndsRunsOfWhatIsQuickWithoutRecursion) {
  Fixture f(QuickChain(3).Load());
  f.backend->all_are_quick = true;
  std::atomic<bool> release{false};
  f.backend->on_execute = [&](int32_t) {
    while (!release) std::this_thread::yield();
  };
  Arrays first(*f.plan, 0), arrays(*f.plan, 1);
  std::vector<std::shared_ptr<Run>> runs{f.Submit(first, Options(Policy::kFixed))};
  for (int i = 0; i < 20000; ++i)
    runs.push_back(f.Submit(arrays, Options(Policy::kWorkConserving)));
  release = true;
  for (const auto& run : runs) run->Wait();
  CHECK_EQ(f.backend->num_ended.load(), 20001);
  CHECK(first.right() && arrays.right());
}

constexpr auto kLong = std::chrono::minutes(1);

// Runs random plans of one device, each helped along; every result must be right.
TEST(LauncherGivesRightResultsWithHelp) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    Fixture f(RandomPlan(seed, 120).Load());
    for (const Policy policy : {Policy::kWorkConserving, Policy::kFixed, Policy::kRandom}) {
      Arrays arrays(*f.plan, seed);
      auto run = std::make_shared<Run>(f.plan, f.backend, arrays.arguments(), arrays.results(),
                                       Options(policy, seed, 50, seed % 2 == 0));
      f.launcher.SubmitAndHelp(run, kLong);
      CHECK(run->WaitFor(std::chrono::milliseconds(0)));  // it has ended
      CHECK_EQ(run->report()->error_message, "");
      CHECK(arrays.right());
    }
  }
}

TEST(LauncherHelperExecutesTheKernelsOfOneDevice) {
  PlanMaker maker;
  const int32_t argument = maker.Version(Space::kArgument, 0, 0, 64);
  const int32_t x = maker.Version(Space::kDevice, 0, 0, 64);
  maker.Copy(Kind::kReload, argument, x);
  const int32_t y = maker.Version(Space::kDevice, 0, 64, 64);
  maker.Kernel({x}, {y});
  maker.Kernel({argument}, {maker.Version(Space::kDevice, 1, 64, 64)}, 0, {}, 1);
  maker.Copy(Kind::kOffload, y, maker.Version(Space::kResult, 0, 0, 64));
  Fixture f(maker.Load());
  const std::thread::id mine = std::this_thread::get_id();
  std::array<std::atomic<bool>, 4> is_mine{};
  f.backend->on_execute = [&](int32_t v) { is_mine[v] = std::this_thread::get_id() == mine; };
  Arrays arrays(*f.plan, 0);
  auto run = std::make_shared<Run>(f.plan, f.backend, arrays.arguments(), arrays.results(),
                                   Options(Policy::kFixed));
  f.launcher.SubmitAndHelp(run, kLong);
  CHECK(arrays.right());
  CHECK(!is_mine[0] && is_mine[1] && !is_mine[2] && !is_mine[3]);
}

// Helpers that leave at once, after some vertices or none: the lane goes on from there.
TEST(LauncherLanesTakeOverFromHelpersThatLeave) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    Fixture f(RandomPlan(seed, 120).Load());
    for (const Policy policy : {Policy::kWorkConserving, Policy::kFixed, Policy::kRandom}) {
      Arrays first(*f.plan, seed), second(*f.plan, seed + 1);
      const RunOptions options = Options(policy, seed, seed % 3 == 0 ? 50 : 0, seed % 2 == 0);
      auto run =
          std::make_shared<Run>(f.plan, f.backend, first.arguments(), first.results(), options);
      f.launcher.SubmitAndHelp(run, std::chrono::microseconds(seed % 5 * 20));
      const std::shared_ptr<Run> next = f.Submit(second, options);  // for the lane's own inbox
      for (const auto& each : {run, next}) {
        each->Wait();
        CHECK_EQ(each->report()->error_message, "");
      }
      CHECK(first.right() && second.right());
    }
  }
}

TEST(LauncherHelperLeavesWhileItWaitsForALane) {
  PlanMaker maker;
  const int32_t x = maker.Version(Space::kDevice, 0, 0, 64);
  maker.Copy(Kind::kReload, maker.Version(Space::kArgument, 0, 0, 64), x);
  const int32_t y = maker.Version(Space::kDevice, 0, 64, 64);
  maker.Kernel({x}, {y});
  maker.Copy(Kind::kOffload, y, maker.Version(Space::kResult, 0, 0, 64));
  Fixture f(maker.Load());
  std::atomic<bool> go_on{false};
  std::thread::id kernels;
  f.backend->on_execute = [&](int32_t v) {
    while (v == 0 && !go_on) std::this_thread::yield();
    if (v == 1) kernels = std::this_thread::get_id();
  };
  Arrays arrays(*f.plan, 0);
  auto run = std::make_shared<Run>(f.plan, f.backend, arrays.arguments(), arrays.results(),
                                   Options(Policy::kFixed));
  f.launcher.SubmitAndHelp(run, std::chrono::milliseconds(1));
  CHECK(!run->WaitFor(std::chrono::milliseconds(0)));
  go_on = true;
  run->Wait();
  CHECK(arrays.right());
  CHECK(kernels != std::this_thread::get_id());
}

TEST(InboxForgetsACallWhenSomethingIsPushed) {
  Inbox inbox;
  Patience patience;
  std::array<int32_t, 2> next{};
  inbox.Call();
  inbox.Call();
  CHECK_EQ(inbox.Take(patience), Inbox::kCalled);
  CHECK_EQ(inbox.TryTake(), Inbox::kEmpty);
  inbox.Call();
  inbox.Push(1, next.data());
  inbox.Call();
  CHECK_EQ(inbox.TryTake(), 1);
  CHECK_EQ(next[1], Inbox::kEmpty);
  const auto soon = Patience::Clock::now() + std::chrono::milliseconds(2);
  CHECK_EQ(inbox.Take(patience, soon), Inbox::kEmpty);
  CHECK(Patience::Clock::now() >= soon);
  std::thread caller([&] { inbox.Call(); });
  CHECK_EQ(inbox.Take(patience), Inbox::kCalled);  // maybe asleep
  caller.join();
  inbox.Stop();
  inbox.Call();
  CHECK_EQ(inbox.Take(patience), Inbox::kStop);
}

TEST(LauncherHelpersAndLanesTakeTurns) {
  Fixture f(RandomPlan(4, 60).Load());
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 5; ++t) {
    threads.emplace_back([&, t] {
      auto backend = std::make_shared<FakeBackend>(f.plan, f.memory);
      for (uint64_t repeat = 0; repeat < 20; ++repeat) {
        Arrays arrays(*f.plan, Mix(t, repeat));
        auto run = std::make_shared<Run>(f.plan, backend, arrays.arguments(), arrays.results(),
                                         Options(static_cast<Policy>(repeat % 3), repeat));
        if ((t + repeat) % 3 == 0) {
          f.launcher.Submit(run);
        } else {
          f.launcher.SubmitAndHelp(run);
        }
        run->Wait();
        CHECK_EQ(run->report()->error_message, "");
        CHECK(arrays.right());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(LauncherHelperIsLetGoOfByFailureCancellationAndRunsWithoutAVertex) {
  Fixture f(RandomPlan(2, 60).Load());
  const auto help = [&](const std::function<void(Run&)>& and_then = nullptr) {
    Arrays arrays(*f.plan, 0);
    auto run = std::make_shared<Run>(f.plan, f.backend, arrays.arguments(), arrays.results(),
                                     Options(Policy::kWorkConserving));
    if (and_then) and_then(*run);
    f.launcher.SubmitAndHelp(run, kLong);
    return run->report()->error_message;
  };
  f.backend->failing = 7;
  CHECK_EQ(help(), "vertex fails");
  f.backend->failing = FakeBackend::kFailsInBegin;
  CHECK_EQ(help(), "begin fails");
  f.backend->failing = -1;
  CHECK_EQ(help([](Run& run) { run.Cancel(); }), "the run was cancelled");
  CHECK_EQ(help(), "");
  f.backend->all_are_quick = true;
  CHECK_EQ(help(), "");
}

TEST(LauncherStopsAtAQuickVertexThatFailsAndTheNextRunWorks) {
  for (const int32_t failing : {0, 3, 5}) {
    Fixture f(QuickChain(5).Load());
    f.backend->all_are_quick = true;
    f.backend->failing = failing;
    Arrays arrays(*f.plan, 0), again(*f.plan, 1);
    CHECK_EQ(f.RunAndWait(arrays, Options(Policy::kWorkConserving))->error_vertex, failing);
    f.backend->failing = -1;
    CHECK_EQ(f.RunAndWait(again, Options(Policy::kWorkConserving))->error_message, "");
    CHECK(again.right());
  }
}

TEST(PatienceIsForWaitsThatAreShort) {
  using std::chrono::microseconds;
  Patience patience;
  const auto limit_after = [&](int count, microseconds wait) {
    for (int i = 0; i < count; ++i) patience.Waited(wait);
    return patience.limit();
  };
  CHECK(patience.limit() == microseconds(4));
  patience.Waited(std::chrono::hours(1));
  CHECK(limit_after(40, microseconds(20)) > microseconds(35));
  CHECK(limit_after(1, microseconds(20)) <= microseconds(100));
  CHECK(limit_after(40, microseconds(1)) == microseconds(4));
  CHECK(limit_after(1, std::chrono::hours(1)) == microseconds(4));
  CHECK(limit_after(40, microseconds(300)) == microseconds(4));
}

TEST(LauncherEndsEmptyRunsWithoutRecursion) {
  PlanMaker maker;
  Fixture f(maker.Load());
  Arrays arrays(*f.plan, 0);
  std::vector<std::shared_ptr<Run>> runs;
  for (int i = 0; i < 2000; ++i) runs.push_back(f.Submit(arrays, Options(Policy::kFixed)));
  for (const auto& run : runs) run->Wait();
  CHECK_EQ(f.backend->num_ended.load(), 2000);
}

TEST(LauncherShutdownWaitsForQueuedRunsAndRefusesLaterOnes) {
  Fixture f(RandomPlan(5, 60).Load());
  std::vector<std::unique_ptr<Arrays>> arrays;
  std::vector<std::shared_ptr<Run>> runs;
  for (uint64_t i = 0; i < 10; ++i) {
    arrays.push_back(std::make_unique<Arrays>(*f.plan, i));
    runs.push_back(f.Submit(*arrays.back(), Options(Policy::kRandom, i, 50)));
  }
  f.launcher.Shutdown();
  f.launcher.Shutdown();
  for (size_t i = 0; i < runs.size(); ++i) {
    CHECK(runs[i]->WaitFor(std::chrono::milliseconds(1000)));
    CHECK(arrays[i]->right());
  }
  CHECK_THROWS(f.Submit(*arrays[0], Options(Policy::kFixed)), "shut down");
}

TEST(LauncherCallbacksMayWaitForOtherRuns) {
  Fixture f(RandomPlan(6, 40).Load());
  Arrays first(*f.plan, 0), second(*f.plan, 1);
  std::atomic<bool> done{false};
  auto run = std::make_shared<Run>(f.plan, f.backend, first.arguments(), first.results(),
                                   Options(Policy::kFixed),
                                   [&](const std::shared_ptr<const RunReport>& report) {
                                     CHECK_EQ(report->error_message, "");
                                     f.RunAndWait(second, Options(Policy::kFixed));
                                     done = true;
                                   });
  f.launcher.Submit(run);
  while (!done) std::this_thread::yield();
  CHECK(first.right() && second.right());
}

void Post(CallbackThreads& threads, std::function<void()> body) {
  threads.Post(threads.Prepare(std::move(body)));
}

TEST(CallbackThreadsFlushDenormalsAsXlasThreadsDo) {
  std::atomic<bool> done{false};
  volatile float small = 1e-30F;
  float product = 1;
  bool is_one_of_them = false;
  Post(CallbackThreads::Global(), [&] {
    product = small * 1e-10F;
    is_one_of_them = CallbackThreads::IsOneOfThem();
    done = true;
  });
  while (!done) std::this_thread::yield();
  CHECK(product == 0 && is_one_of_them);
  CHECK(small * 1e-10F > 0 && !CallbackThreads::IsOneOfThem());
}

TEST(CallbackThreadsRunTasksThatWaitForEachOther) {
  // The tasks' own, for they look at it when the test may have ended.
  const auto left = std::make_shared<std::atomic<int>>(8);
  for (int i = 0; i < 8; ++i) {
    Post(CallbackThreads::Global(), [left] {
      --*left;
      while (*left > 0) std::this_thread::yield();
    });
  }
  while (*left > 0) std::this_thread::yield();
}

TEST(CallbackThreadsMakeDoWithThoseThatThereAre) {
  auto* const threads = new CallbackThreads;  // theirs for good
  threads_left = 0;
  CHECK_THROWS(threads->Prepare([] {}), "ulimit -u");
  threads_left = 1;
  const auto order = std::make_shared<std::vector<int>>();
  const auto left = std::make_shared<std::atomic<int>>(5);
  for (int i = 0; i < 5; ++i) {
    Post(*threads, [=] {
      order->push_back(i);  // by one thread
      --*left;
    });
  }
  while (*left > 0) std::this_thread::yield();
  CHECK_EQ(Text(*order), "0 1 2 3 4 ");
  threads_left = -1;
}

TEST(LauncherSaysWhenThereAreNoThreadsAndTriesAgain) {
  for (const int32_t window : {0, 4}) {
    const int32_t needed = window > 0 ? 2 * kLanes.size() : kLanes.size();
    const auto plan = RandomPlan(1, 60).Load();
    const auto backend = std::make_shared<FakeBackend>(plan, std::make_shared<FakeMemory>());
    Launcher launcher(kLanes, window);
    for (const int32_t there_are : {0, 1, needed - 1, needed}) {
      Arrays arrays(*plan, there_are);
      const auto run = std::make_shared<Run>(plan, backend, arrays.arguments(), arrays.results(),
                                             Options(Policy::kWorkConserving));
      threads_left = there_are;
      if (there_are < needed) {
        CHECK_THROWS(launcher.Submit(run), "no thread can be started");
        CHECK_EQ(backend->num_begun.load(), 0);
        continue;
      }
      launcher.Submit(run);
      run->Wait();
      CHECK_EQ(run->report()->error_message, "");
      CHECK(arrays.right());
    }
    threads_left = -1;
  }
}

// On a lane nobody could be told: from Backend::End on, nothing is allocated.
TEST(LauncherEndsRunsWithoutMemory) {
  struct Backend : FakeBackend {
    using FakeBackend::FakeBackend;
    void End(RunContext& context) override {
      FakeBackend::End(context);
      no_memory = true;
    }
    void Begin(RunContext& context) override {
      FakeBackend::Begin(context);
      no_memory = false;
    }
  };
  const auto plan = RandomPlan(2, 40).Load();
  const auto backend = std::make_shared<Backend>(plan, std::make_shared<FakeMemory>());
  Launcher launcher(kLanes);
  for (const char* how : {"right", "fails", "cancelled", "fails in Begin"}) {
    const bool fails = std::string(how) == "fails";
    const bool is_cancelled = std::string(how) == "cancelled";
    Arrays arrays(*plan, 1);
    std::atomic<bool> done{false};
    std::string error;
    auto run = std::make_shared<Run>(plan, backend, arrays.arguments(), arrays.results(),
                                     Options(Policy::kWorkConserving),
                                     [&](const std::shared_ptr<const RunReport>& report) {
                                       error = report->error_message;
                                       done = true;
                                     });
    backend->failing = fails ? 5 : std::string(how) == "fails in Begin" ? -2 : -1;
    if (is_cancelled) run->Cancel();
    launcher.Submit(run);
    no_memory = false;  // where the run ended on this thread
    while (!done) std::this_thread::yield();
    CHECK_EQ(error, fails                    ? "vertex fails"
                    : is_cancelled           ? "the run was cancelled"
                    : backend->failing == -2 ? "begin fails"
                                             : "");
  }
}

TEST(LauncherRunsWhatIsQueuedInTheOrderOfSubmission) {
  struct Backend : FakeBackend {
    using FakeBackend::FakeBackend;
    std::function<void()> on_begin;
    void Begin(RunContext& context) override {
      FakeBackend::Begin(context);
      on_begin();
    }
  };
  Fixture f(GateAndMany({0}).Load());
  std::atomic<bool> release{false};
  f.backend->on_execute = [&](int32_t) {
    while (!release) std::this_thread::yield();
  };
  Arrays arrays(*f.plan, 0);
  const auto first = f.Submit(arrays, Options(Policy::kFixed));
  std::vector<int> order;  // one run begins at a time
  std::vector<std::shared_ptr<Run>> runs;
  for (int i = 0; i < 5; ++i) {
    const auto backend = std::make_shared<Backend>(f.plan, f.memory);
    backend->on_begin = [&order, i] { order.push_back(i); };
    runs.push_back(std::make_shared<Run>(f.plan, backend, arrays.arguments(), arrays.results(),
                                         Options(Policy::kFixed)));
    f.launcher.Submit(runs.back());
  }
  release = true;
  for (const auto& run : runs) run->Wait();
  CHECK_EQ(Text(order), "0 1 2 3 4 ");
}

TEST_APART(LauncherRefusesAForkedChild) {
  auto f = std::make_unique<Fixture>(RandomPlan(4, 40).Load());
  Arrays arrays(*f->plan, 0);
  CHECK_EQ(f->RunAndWait(arrays, Options(Policy::kFixed))->error_message, "");
  MustPassInChild([&] {
    CHECK_THROWS(f->Submit(arrays, Options(Policy::kFixed)), "'spawn' or 'forkserver'");
    f->launcher.Shutdown();
    f.reset();
  });
  CHECK_EQ(f->RunAndWait(arrays, Options(Policy::kFixed))->error_message, "");
  CHECK(arrays.right());
}

TEST(LauncherResolvesEveryTiersAddress) {
  struct Backend : FakeBackend {
    using FakeBackend::FakeBackend;
    char* DiskBase() override { return reinterpret_cast<char*>(uintptr_t{1} << 63); }
    bool Execute(int32_t, RunContext& context, std::string*) override {
      address = context.address;
      return true;
    }
    std::vector<char*> address;
  };
  PlanMaker maker;
  const int32_t argument = maker.Version(Space::kArgument, 0, 0, 64);
  const int32_t up = maker.Version(Space::kDevice, 1, 128, 64);
  maker.Copy(Kind::kReload, argument, up, 1);
  maker.Copy(Kind::kOffload, up, maker.Version(Space::kHost, 0, 192, 64), 1);
  maker.Copy(Kind::kOffload, up, maker.Version(Space::kResult, 0, 0, 64), 1);
  PlanArrays arrays = maker.Arrays();
  // A version on disk that no vertex touches.
  arrays.space.push_back(static_cast<uint8_t>(Space::kDisk));
  arrays.index.push_back(0);
  arrays.offset.push_back(320);
  arrays.bytes.push_back(64);
  arrays.dtype.push_back(6);
  arrays.dims.push_back(64);
  arrays.dims_offsets.push_back(static_cast<int64_t>(arrays.dims.size()));
  arrays.disk_bytes = 384;
  const auto plan = std::make_shared<LoadedPlan>(LoadedPlan::Load(arrays, PlanMaker::kDevices, 1));
  const auto memory = std::make_shared<FakeMemory>();
  const auto backend = std::make_shared<Backend>(plan, memory);
  Launcher launcher(kLanes);
  Arrays given(*plan, 0);
  const auto run = std::make_shared<Run>(plan, backend, given.arguments(), given.results(),
                                         Options(Policy::kFixed));
  launcher.Submit(run);
  run->Wait();
  const std::vector<char*> wanted = {given.arguments()[0], memory->device[1].data() + 128,
                                     memory->host.data() + 192, given.results()[0],
                                     backend->DiskBase() + 320};
  CHECK(backend->address == wanted);
}

TEST(CopiesStopWhenTheRunStops) {
  std::atomic<bool> abort{true};
  const std::vector<char> from(100, 'x');
  std::vector<char> to(100, 'o');
  CopyBytes(to.data(), from.data(), 100, abort);
  CHECK(to == std::vector<char>(100, 'o'));
  abort = false;
  CopyBytes(to.data(), from.data(), 100, abort);
  CHECK(to == from);
}

TEST(LauncherReportsBytesThatMoved) {
  PlanMaker maker;
  const int32_t argument = maker.Version(Space::kArgument, 0, 0, 192);
  const int32_t up = maker.Version(Space::kDevice, 0, 128, 192);
  const int32_t away = maker.Version(Space::kHost, 0, 0, 192);
  const int32_t other = maker.Version(Space::kDevice, 1, 0, 192);
  maker.Copy(Kind::kReload, argument, up);
  maker.Copy(Kind::kOffload, up, away);
  maker.Copy(Kind::kTransfer, up, other, 1);
  maker.Copy(Kind::kOffload, other, maker.Version(Space::kResult, 0, 0, 192), 1);
  Fixture f(maker.Load());
  Arrays arrays(*f.plan, 0);
  const auto report = f.RunAndWait(arrays, Options(Policy::kWorkConserving, 0, 0, true));
  CHECK_EQ(report->bytes_reloaded, 192);
  CHECK_EQ(report->bytes_offloaded, 384);
  CHECK_EQ(report->bytes_transferred, 192);
  CHECK_EQ(report->peak_device_bytes, 320);
  CHECK_EQ(report->peak_live_bytes, 192);
  CHECK_EQ(Text(report->lane), "1 2 4 5 ");
  CHECK(arrays.right());
}

TEST(WhoWaitsIsToldOfARunThatStandsStill) {
  Fixture f(RandomPlan(5, 60).Load());
  std::atomic<bool> stands{true};
  f.backend->on_execute = [&stands](int32_t) {
    while (stands) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  Arrays arrays(*f.plan, 1);
  const auto run = std::make_shared<Run>(f.plan, f.backend, arrays.arguments(), arrays.results(),
                                         Options(Policy::kWorkConserving));
  std::thread submits([&] { f.launcher.Submit(run); });  // and runs what is quick
  int told = 0;
  run->WaitTelling(std::chrono::milliseconds(5), [&] {
    ++told;
    stands = false;
  });
  submits.join();
  CHECK_EQ(told, 1);
  CHECK(arrays.right());
  // One that goes on, however slowly, does not stand still.
  f.backend->on_execute = [](int32_t) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  };
  f.Submit(arrays, Options(Policy::kWorkConserving))
      ->WaitTelling(std::chrono::milliseconds(150), [&] { ++told; });
  CHECK_EQ(told, 1);
}

}  // namespace
}  // namespace jaxoffload::testing

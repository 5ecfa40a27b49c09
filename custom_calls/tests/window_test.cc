// The launcher with a window, on a backend whose vertices run on streams: threads that take their
// work in order, each with delays of its own.

#include <chrono>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "launcher/launcher.h"
#include "tests/check.h"
#include "tests/fake_backend.h"
#include "tests/plan_maker.h"

namespace jaxoffload::testing {
namespace {

constexpr Lanes kLanes(PlanMaker::kDevices);
constexpr int32_t kNumLanes = kLanes.size();

// Compute lanes have one stream; lanes that copy have two and take turns, so their vertices may
// overtake one another.
class StreamBackend : public FakeBackend {
 public:
  StreamBackend(std::shared_ptr<const LoadedPlan> plan, std::shared_ptr<FakeMemory> memory,
                int32_t window)
      : FakeBackend(plan, std::move(memory)),
        plan_(std::move(plan)),
        window_(window),
        under_way_(kNumLanes),
        turn_(kNumLanes),
        entries_(plan_->num_vertices()) {
    for (int32_t i = 0; i < 2 * kNumLanes; ++i) streams_.push_back(std::make_unique<Stream>());
    for (auto& stream : streams_) {
      stream->thread = std::thread([this, s = stream.get()] { Serve(*s); });
    }
  }
  ~StreamBackend() override {
    for (auto& stream : streams_) {
      {
        const MutexLock lock(stream->mutex);
        stream->stopped = true;
        stream->changed.NotifyAll();
      }
      stream->thread.join();
    }
  }

  int32_t max_under_way() const { return max_under_way_; }
  // Called on the stream's thread before a vertex, if set before the run.
  std::function<void(int32_t vertex_id)> on_stream;
  std::atomic<int32_t> failing_await{-1};

  bool IsInOrder(int32_t lane) const override { return kLanes.IsCompute(lane); }

  bool Execute(int32_t vertex_id, RunContext& context, std::string*) override {
    const int32_t lane = plan_->lane(vertex_id);
    const int32_t now = ++under_way_[lane];
    CHECK(now <= window_);
    int32_t most = max_under_way_;
    while (now > most && !max_under_way_.compare_exchange_weak(most, now)) {
    }
    const int32_t which = IsInOrder(lane) ? 0 : turn_[lane]++ % 2;
    entries_[vertex_id] = std::make_unique<Entry>();
    entries_[vertex_id]->context = &context;
    Stream& stream = *streams_[2 * lane + which];
    const MutexLock lock(stream.mutex);
    stream.waiting.push_back(vertex_id);
    stream.changed.NotifyAll();
    return true;
  }

  bool Await(int32_t vertex_id, RunContext&, std::string* error) override {
    Entry& entry = *entries_[vertex_id];
    const MutexLock lock(entry.mutex);
    while (!entry.done) entry.ended.Wait(entry.mutex);
    --under_way_[plan_->lane(vertex_id)];
    if (failing_await == vertex_id) {
      *error = "the stream fails";
      return false;
    }
    *error = entry.error;
    return entry.error.empty();
  }

 private:
  struct Entry {
    RunContext* context = nullptr;
    Mutex mutex;
    CondVar ended;
    bool done = false;
    std::string error;
  };
  struct Stream {
    Mutex mutex;
    CondVar changed;
    std::deque<int32_t> waiting;
    bool stopped = false;
    std::thread thread;
  };

  void Serve(Stream& stream) {
    for (uint64_t count = 0;; ++count) {
      int32_t vertex_id;
      {
        const MutexLock lock(stream.mutex);
        while (stream.waiting.empty() && !stream.stopped) stream.changed.Wait(stream.mutex);
        if (stream.waiting.empty()) return;
        vertex_id = stream.waiting.front();
        stream.waiting.pop_front();
      }
      const uint64_t hash = Mix(static_cast<uint64_t>(vertex_id), count);
      if (hash % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(hash % 200));
      if (on_stream) on_stream(vertex_id);
      Entry& entry = *entries_[vertex_id];
      std::string error;
      FakeBackend::Execute(vertex_id, *entry.context, &error);
      const MutexLock lock(entry.mutex);
      entry.error = std::move(error);
      entry.done = true;
      entry.ended.NotifyAll();
    }
  }

  const std::shared_ptr<const LoadedPlan> plan_;
  const int32_t window_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<std::atomic<int32_t>> under_way_;
  std::atomic<int32_t> max_under_way_{0};
  std::vector<int32_t> turn_;
  std::vector<std::unique_ptr<Entry>> entries_;
};

struct Fixture {
  Fixture(std::shared_ptr<const LoadedPlan> loaded, int32_t window)
      : plan(std::move(loaded)),
        memory(std::make_shared<FakeMemory>()),
        backend(std::make_shared<StreamBackend>(plan, memory, window)),
        launcher(kLanes, window) {}

  std::shared_ptr<const RunReport> Run(Arrays& arrays, Policy policy, uint64_t seed = 0,
                                       bool check = false) {
    RunOptions options;
    options.policy = policy;
    options.seed = seed;
    options.check = check;
    auto run = std::make_shared<jaxoffload::Run>(plan, backend, arrays.arguments(),
                                                 arrays.results(), options);
    launcher.Submit(run);
    run->Wait();
    return run->report();
  }

  std::shared_ptr<const LoadedPlan> plan;
  std::shared_ptr<FakeMemory> memory;
  std::shared_ptr<StreamBackend> backend;
  Launcher launcher;
};

void CheckRandomPlans(Policy policy, int32_t window, bool check) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    Fixture f(RandomPlan(seed, 120).Load(), window);
    for (uint64_t repeat = 0; repeat < 3; ++repeat) {
      Arrays arrays(*f.plan, Mix(seed, repeat));
      const auto report = f.Run(arrays, policy, repeat, check);
      if (!report->error_message.empty() || !arrays.right()) {
        Fail(__FILE__, __LINE__, "seed " + std::to_string(seed) + ": " + report->error_message);
      }
      for (int32_t v = 0; v < f.plan->num_vertices(); ++v) {
        CHECK(report->start_ns[v] >= 0 && report->end_ns[v] >= report->start_ns[v]);
      }
    }
    CHECK_EQ(f.backend->num_ended.load(), 3);
  }
}

TEST(WindowGivesRightResultsWorkConserving) {
  for (const int32_t window : {1, 2, 8}) CheckRandomPlans(Policy::kWorkConserving, window, false);
}
TEST(WindowGivesRightResultsInFixedOrder) { CheckRandomPlans(Policy::kFixed, 4, false); }
TEST(WindowGivesRightResultsInRandomOrder) { CheckRandomPlans(Policy::kRandom, 4, false); }
TEST(WindowGivesRightResultsWhileChecked) { CheckRandomPlans(Policy::kRandom, 4, true); }

// A chain of kernels on one lane.
PlanMaker Chain(int32_t count) {
  PlanMaker maker;
  int32_t last = maker.Version(Space::kArgument, 0, 0, 64);
  for (int32_t i = 0; i < count; ++i) {
    const int32_t next = i + 1 < count ? maker.Version(Space::kDevice, 0, 64 * i, 64)
                                       : maker.Version(Space::kResult, 0, 0, 64);
    maker.Kernel({last}, {next});
    last = next;
  }
  return maker;
}

TEST(WindowPutsAChainOnTheStreamAhead) {
  Fixture f(Chain(40).Load(), 8);
  // The first vertex ends only when as many as the window holds have been put behind it.
  f.backend->on_stream = [&](int32_t vertex) {
    if (vertex != 0) return;
    for (int wait = 0; wait < 5000 && f.backend->max_under_way() < 8; ++wait) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  Arrays arrays(*f.plan, 3);
  const auto report = f.Run(arrays, Policy::kWorkConserving);
  CHECK_EQ(report->error_message, "");
  CHECK_EQ(f.backend->max_under_way(), 8);
  CHECK(arrays.right());
  for (int32_t v = 1; v < 40; ++v) CHECK(report->start_ns[v] >= report->end_ns[v - 1]);
}

TEST(WindowDoesNotRunAheadWhileChecked) {
  Fixture f(Chain(12).Load(), 8);
  Arrays arrays(*f.plan, 3);
  CHECK_EQ(f.Run(arrays, Policy::kWorkConserving, 0, true)->error_message, "");
  CHECK_EQ(f.backend->max_under_way(), 1);
}

TEST(WindowStopsAtTheFirstErrorAndTheNextRunWorks) {
  Fixture f(RandomPlan(5, 120).Load(), 4);
  const int32_t last = f.plan->num_vertices() - 1;
  for (const int32_t vertex : {0, 17, last}) {
    Arrays arrays(*f.plan, 1);
    f.backend->failing = vertex;
    auto report = f.Run(arrays, Policy::kWorkConserving);
    CHECK_EQ(report->error_message, "vertex fails");
    CHECK_EQ(report->error_vertex, vertex);
    f.backend->failing = -1;
    f.backend->failing_await = vertex;
    report = f.Run(arrays, Policy::kWorkConserving);
    CHECK_EQ(report->error_message, "the stream fails");
    CHECK_EQ(report->start_ns[vertex], -1);
    f.backend->failing_await = -1;
    Arrays again(*f.plan, 2);
    CHECK_EQ(f.Run(again, Policy::kWorkConserving)->error_message, "");
    CHECK(again.right());
  }
}

}  // namespace
}  // namespace jaxoffload::testing

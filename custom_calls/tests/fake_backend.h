// A backend without XLA: kernels write, into the real bytes of their places, words that depend on
// every word that they read. So a vertex that runs too early or a place that is taken too soon
// changes the results, and under TSan it is a reported race.

#ifndef JAXOFFLOAD_TESTS_FAKE_BACKEND_H_
#define JAXOFFLOAD_TESTS_FAKE_BACKEND_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/hash.h"
#include "base/mutex.h"
#include "launcher/backend.h"
#include "plan/loaded_plan.h"

namespace jaxoffload::testing {

// Memory of a client: what the backends of its plans share.
struct FakeMemory {
  std::vector<std::vector<char>> device =
      std::vector<std::vector<char>>(4, std::vector<char>(1 << 20));
  std::vector<char> host = std::vector<char>(1 << 20);
};

class FakeBackend : public Backend {
 public:
  FakeBackend(std::shared_ptr<const LoadedPlan> plan, std::shared_ptr<FakeMemory> memory)
      : plan_(std::move(plan)), memory_(std::move(memory)) {}

  // Vertex that fails, -1 for none; kFailsInBegin for the set-up.
  static constexpr int32_t kFailsInBegin = -2;
  std::atomic<int32_t> failing{-1};
  // Called at the start of every vertex, if set before the run.
  std::function<void(int32_t vertex_id)> on_execute;
  std::atomic<int32_t> num_begun{0};
  std::atomic<int32_t> num_ended{0};
  std::atomic<int32_t> num_executed{0};

  char* DeviceBase(int32_t device) override { return memory_->device[device].data(); }
  char* HostBase() override { return memory_->host.data(); }

  // Some copies, or all vertices.
  bool all_are_quick = false;
  bool IsQuick(int32_t vertex_id) const override {
    return all_are_quick || (!IsKernel(plan_->kind(vertex_id)) && Mix(vertex_id) % 2 == 0);
  }
  void Begin(RunContext&) override;
  bool Execute(int32_t vertex_id, RunContext& context, std::string* error) override;
  void End(RunContext&) override { ++num_ended; }

 private:
  const std::shared_ptr<const LoadedPlan> plan_;
  const std::shared_ptr<FakeMemory> memory_;
};

// The caller's arrays of one run, and what the results must be: computed in serial order with
// memory of its own for every version, so places and order play no part.
class Arrays {
 public:
  Arrays(const LoadedPlan& plan, uint64_t seed);

  std::vector<char*> arguments() { return Pointers(arguments_); }
  std::vector<char*> results() { return Pointers(results_); }
  bool right() const { return results_ == expected_; }

 private:
  static std::vector<char*> Pointers(std::vector<std::vector<char>>& arrays);
  void Expect(const LoadedPlan& plan);

  std::vector<std::vector<char>> arguments_;
  std::vector<std::vector<char>> results_;
  std::vector<std::vector<char>> expected_;
};

}  // namespace jaxoffload::testing

#endif  // JAXOFFLOAD_TESTS_FAKE_BACKEND_H_

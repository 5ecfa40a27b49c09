// Prints the launcher's own nanoseconds a vertex: plans of empty vertices, no XLA.
//
//   overhead [number of vertices]
//
// Not a test: numbers depend on the machine. benchmarks/overhead.py measures with XLA.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "launcher/launcher.h"
#include "tests/plan_maker.h"

namespace jaxoffload::testing {
namespace {

class EmptyBackend : public Backend {
 public:
  char* DeviceBase(int32_t) override { return nullptr; }
  char* HostBase() override { return nullptr; }
  void Begin(RunContext&) override {}
  bool Execute(int32_t, RunContext&, std::string*) override { return true; }
  void End(RunContext&) override {}
};

void Measure(const char* name, const PlanMaker& maker) {
  const auto plan = maker.Load();
  auto backend = std::make_shared<EmptyBackend>();
  Launcher launcher{Lanes(PlanMaker::kDevices)};
  int64_t best = INT64_MAX;
  for (int repeat = 0; repeat < 20; ++repeat) {
    auto run = std::make_shared<Run>(plan, backend, std::vector<char*>(1), std::vector<char*>(),
                                     RunOptions());
    launcher.Submit(run);
    run->Wait();
    best = std::min(best, run->report()->wall_ns);
  }
  std::printf("%-24s %8.0f ns a vertex\n", name, static_cast<double>(best) / plan->num_vertices());
}

PlanMaker Chain(int n, bool hop) {
  PlanMaker maker;
  int32_t last = maker.Version(Space::kArgument, 0, 0, 64);
  for (int i = 0; i < n; ++i) {
    const int32_t next = maker.Version(Space::kDevice, 0, 64 * (i % 4), 64);
    if (hop && i % 2 == 0) {
      maker.Copy(Kind::kReload, last, next);
    } else {
      maker.Kernel({last}, {next});
    }
    last = next;
  }
  return maker;
}

PlanMaker FanOut(int n) {
  PlanMaker maker;
  const int32_t argument = maker.Version(Space::kArgument, 0, 0, 64);
  const int32_t gate = maker.Version(Space::kDevice, 0, 0, 64);
  maker.Kernel({argument}, {gate});
  for (int i = 1; i < n; ++i) {
    maker.Kernel({gate}, {maker.Version(Space::kDevice, 0, 64 * i, 64)}, i * 7919 % n);
  }
  return maker;
}

}  // namespace
}  // namespace jaxoffload::testing

int main(int argc, char** argv) {
  using namespace jaxoffload::testing;  // NOLINT: a small program
  const int n = argc > 1 ? std::atoi(argv[1]) : 10000;
  Measure("chain, one lane", Chain(n, false));
  Measure("chain, lane to lane", Chain(n, true));
  Measure("fan-out, one lane", FanOut(n));
  return 0;
}

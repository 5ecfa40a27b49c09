// A plan that can be run: what Python and the FFI handler hold.

#ifndef JAXOFFLOAD_PJRT_PLAN_H_
#define JAXOFFLOAD_PJRT_PLAN_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/stamp.h"
#include "launcher/run.h"
#include "pjrt/client.h"
#include "plan/loaded_plan.h"

namespace jaxoffload {

class PlanBackend;

class Plan : public std::enable_shared_from_this<Plan> {
 public:
  // Throws std::invalid_argument, naming the array that is wrong. `disk` holds the plan's tensors
  // on disk; null where there are none.
  static std::shared_ptr<Plan> Create(std::shared_ptr<Client> client,
                                      std::vector<std::shared_ptr<Executable>> executables,
                                      PlanArrays arrays,
                                      std::shared_ptr<DiskExtent> disk = nullptr);

  const LoadedPlan& loaded() const { return *loaded_; }
  const std::shared_ptr<Client>& client() const { return client_; }

  // Queues a run on the client; never waits. The caller's arrays must outlive it: those that
  // `owners` own do, for the run holds them until it has ended. `done` is called
  // as Run's. Of arguments and results on disk the addresses do not matter. Throws
  // std::invalid_argument: wrong number of arrays, or one without an address. `helps`: the caller
  // waits for the end, and may execute kernels itself (Launcher::SubmitAndHelp).
  std::shared_ptr<Run> Submit(
      std::vector<char*> arguments, std::vector<char*> results, const RunOptions& options,
      std::function<void(const std::shared_ptr<const RunReport>&)> done = nullptr,
      std::vector<std::shared_ptr<DiskSource>> argument_sources = {},
      std::vector<std::shared_ptr<DiskExtent>> result_extents = {},
      std::vector<std::shared_ptr<void>> owners = {}, Contents contents = {}, bool helps = false);
  // Whether the latest run was so short that to wake another thread for it would have been a good
  // part of it: who waits for the next had better help.
  bool IsShort() const { return is_short_.load(std::memory_order_relaxed); }

  // What is on the devices now of what its runs have left there: parts of arguments, and bytes.
  std::vector<std::pair<int32_t, int64_t>> residents() const;
  // Forgets it. If nothing else is there, gives the arenas' memory back, once no run is active.
  void Release();

  // Of the latest run that ended, null before the first.
  std::shared_ptr<const RunReport> last_report() const EXCLUDES(mutex_);
  void set_last_report(std::shared_ptr<const RunReport> report) EXCLUDES(mutex_);

 private:
  Plan() = default;

  std::shared_ptr<Client> client_;
  std::shared_ptr<const LoadedPlan> loaded_;
  std::shared_ptr<PlanBackend> backend_;
  std::atomic<bool> is_short_{false};
  mutable Mutex mutex_;
  std::shared_ptr<const RunReport> last_report_ GUARDED_BY(mutex_);
};

// An argument that no operand of the custom call brings: it is in a lower tier.
struct BoundArgument {
  bool is_bound = false;
  char* address = nullptr;             // in host memory
  std::shared_ptr<void> owner;         // of that memory
  std::shared_ptr<const Stamp> stamp;  // of what is in it
  std::shared_ptr<DiskSource> source;  // on disk; the address does not matter then
};

// An argument that is the same in all iterations of a loop of the program around the call.
struct FixedArgument {
  int32_t argument;
  uint32_t number;  // its stamp is as much after the first of the loop's
};

struct BoundPlan {
  std::shared_ptr<Plan> plan;
  std::vector<BoundArgument> arguments;  // those of the plan, or none
  std::vector<FixedArgument> fixed;  // where there are some, the last operand is the first stamp
};

// A plan under a key of its own, by which an XLA program that is being compiled finds it. The
// program's calls hold the plan themselves once they are instantiated, so a registration need live
// no longer than that.
class PlanRegistration {
 public:
  explicit PlanRegistration(BoundPlan plan);
  ~PlanRegistration();
  PlanRegistration(const PlanRegistration&) = delete;
  PlanRegistration& operator=(const PlanRegistration&) = delete;

  // Of no other plan, in this process or, for programs may be stored, in another.
  const std::string& key() const { return key_; }

 private:
  const std::string key_;
};

// Without a plan if there is none of this key.
BoundPlan FindPlan(const std::string& key);
size_t NumRegisteredPlans();

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PJRT_PLAN_H_

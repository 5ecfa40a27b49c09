// The tensors of one plan that stay on their devices from one of its runs to the next.

#ifndef JAXOFFLOAD_PJRT_PLAN_RESIDENTS_H_
#define JAXOFFLOAD_PJRT_PLAN_RESIDENTS_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "launcher/backend.h"
#include "pjrt/platform.h"
#include "plan/loaded_plan.h"
#include "tiers/residents.h"

namespace jaxoffload {

class PlanResidents {
 public:
  // Why a vertex is idle (RunContext::is_idle): what it would bring is in its place, and the same
  // is where it would take it from; or not.
  enum Idle : uint8_t { kSeen = 1, kUnseen = 2 };

  // `platform` outlives it.
  PlanResidents(std::shared_ptr<const LoadedPlan> plan, Platform& platform);

  // Before a run: tells which vertices are idle. Throws where bytes that it reads are lost.
  void Find(RunContext& context) EXCLUDES(mutex_);
  // After it: what it has left, or, if it was stopped, what is as it was and what is lost.
  void Leave(RunContext& context) EXCLUDES(mutex_);

  // What is on the devices now of what its runs have left there: parts of arguments, and bytes.
  std::vector<std::pair<int32_t, int64_t>> List() const EXCLUDES(mutex_);
  // Pays what is owed of it, and forgets it.
  void Forget() EXCLUDES(mutex_);

 private:
  struct Part {
    int32_t reload = -1;
    int32_t load = -1;  // from disk, if nobody else needs what that brings
    int32_t argument = -1;
    bool is_read_elsewhere = false;  // others copy, or read, some of its bytes from the argument
    // Of one that is written over: by which vertex, and what copies it to which result, unless that
    // can be owed.
    int32_t overwriter = -1;
    int32_t offload = -1;
    int32_t result = -1;
    bool gives_way = false;  // to others, until it is brought again at the end
    int32_t updated = -1;    // the result from which it is, if not from the argument
    Resident place{};        // the stamp is that of the last run
    Residents::Found found = Residents::Found::kNo;  // by this run
    bool is_owed = false;                            // by this run, if it succeeds
  };

  bool IsReadElsewhere(const Part& part, const std::vector<int32_t>& versions) const;
  static void Owe(Part& part, const RunContext& context);
  void Restore(Part& part, RunContext& context) REQUIRES(mutex_);
  Residents::Pay Payer();

  const std::shared_ptr<const LoadedPlan> plan_;
  Platform& platform_;
  mutable Mutex mutex_;
  std::vector<Part> parts_ GUARDED_BY(mutex_);
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PJRT_PLAN_RESIDENTS_H_

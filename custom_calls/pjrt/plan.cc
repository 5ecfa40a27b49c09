#include "pjrt/plan.h"

#include <atomic>
#include <map>
#include <random>
#include <stdexcept>
#include <utility>

#include "pjrt/plan_backend.h"

namespace jaxoffload {
namespace {

void CheckArrays(const char* name, const std::vector<char*>& arrays,
                 const std::vector<int64_t>& bytes) {
  if (arrays.size() != bytes.size()) {
    throw std::invalid_argument("run: " + std::to_string(arrays.size()) + " " + name +
                                " given, the plan has " + std::to_string(bytes.size()));
  }
  for (size_t i = 0; i < arrays.size(); ++i) {
    if (arrays[i] == nullptr && bytes[i] > 0) {
      throw std::invalid_argument(std::string("run: ") + name + "[" + std::to_string(i) +
                                  "] has no address");
    }
  }
}

void CheckSource(const char* name, size_t i, const DiskSource* source, bool on_disk,
                 int64_t bytes) {
  if (!on_disk && source == nullptr) return;
  const std::string where = std::string("run: ") + name + "[" + std::to_string(i) + "]";
  if (on_disk != (source != nullptr)) {
    throw std::invalid_argument(where + (on_disk ? " must be on disk" : " must be in memory") +
                                ", for so it was planned");
  }
  if (on_disk && source->bytes() != bytes) {
    throw std::invalid_argument(where + " has " + std::to_string(source->bytes()) +
                                " bytes on disk, the plan has " + std::to_string(bytes));
  }
}

struct Registry {
  Mutex mutex;
  std::map<std::string, BoundPlan> plans GUARDED_BY(mutex);
};

// Never destroyed: XLA may look into it until the process ends.
Registry& GlobalRegistry() {
  static Registry* const registry = new Registry;
  return *registry;
}

std::string NewKey() {
  static const uint64_t process = (uint64_t{std::random_device()()} << 32) | std::random_device()();
  static std::atomic<uint64_t> number{0};  // only told apart, so relaxed
  return std::to_string(process) + ":" +
         std::to_string(number.fetch_add(1, std::memory_order_relaxed));
}

}  // namespace

std::shared_ptr<Plan> Plan::Create(std::shared_ptr<Client> client,
                                   std::vector<std::shared_ptr<Executable>> executables,
                                   PlanArrays arrays, std::shared_ptr<DiskExtent> disk) {
  std::shared_ptr<Plan> plan(new Plan);
  plan->client_ = std::move(client);
  plan->loaded_ = std::make_shared<LoadedPlan>(LoadedPlan::Load(
      std::move(arrays), plan->client_->num_devices(), static_cast<int32_t>(executables.size())));
  plan->backend_ = std::make_shared<PlanBackend>(plan->client_, plan->loaded_,
                                                 std::move(executables), std::move(disk));
  return plan;
}

std::shared_ptr<Run> Plan::Submit(std::vector<char*> arguments, std::vector<char*> results,
                                  const RunOptions& options,
                                  std::function<void(const std::shared_ptr<const RunReport>&)> done,
                                  std::vector<std::shared_ptr<DiskSource>> argument_sources,
                                  std::vector<std::shared_ptr<DiskExtent>> result_extents,
                                  std::vector<std::shared_ptr<void>> owners, Contents contents,
                                  bool helps) {
  const bool may_be_on_disk =
      loaded_->is_disk_given() || !argument_sources.empty() || !result_extents.empty();
  if (may_be_on_disk) {
    argument_sources.resize(arguments.size());
    result_extents.resize(results.size());
  }
  const size_t num_arguments = may_be_on_disk ? loaded_->argument_bytes().size() : 0;
  const size_t num_results = may_be_on_disk ? loaded_->result_bytes().size() : 0;
  for (size_t i = 0; i < arguments.size() && i < num_arguments; ++i) {
    const bool on_disk = loaded_->argument_on_disk(static_cast<int32_t>(i));
    CheckSource("arguments", i, argument_sources[i].get(), on_disk, loaded_->argument_bytes()[i]);
    if (!on_disk) continue;
    arguments[i] = argument_sources[i]->tag();
    contents.argument_stamps.resize(arguments.size(), kNoStamp);
    contents.argument_stamps[i] = argument_sources[i]->stamp();
  }
  for (size_t i = 0; i < results.size() && i < num_results; ++i) {
    const bool on_disk = loaded_->result_on_disk(static_cast<int32_t>(i));
    CheckSource("results", i, result_extents[i].get(), on_disk, loaded_->result_bytes()[i]);
    if (!on_disk) continue;
    results[i] = result_extents[i]->tag();
    result_extents[i]->MayChange();
  }
  CheckArrays("arguments", arguments, loaded_->argument_bytes());
  CheckArrays("results", results, loaded_->result_bytes());
  auto run = std::make_shared<Run>(loaded_, backend_, std::move(arguments), std::move(results),
                                   options, std::move(done));
  run->SetDisk(std::move(argument_sources), std::move(result_extents));
  run->Hold(std::move(owners));
  run->SetContents(std::move(contents));
  if (helps) {
    client_->launcher().SubmitAndHelp(run);
  } else {
    client_->launcher().Submit(run);
  }
  return run;
}

std::vector<std::pair<int32_t, int64_t>> Plan::residents() const { return backend_->residents(); }

void Plan::Release() { backend_->Release(); }

std::shared_ptr<const RunReport> Plan::last_report() const {
  MutexLock lock(mutex_);
  return last_report_;
}

void Plan::set_last_report(std::shared_ptr<const RunReport> report) {
  constexpr int64_t kShortNs = 1000000;
  is_short_.store(report->wall_ns < kShortNs, std::memory_order_relaxed);
  MutexLock lock(mutex_);
  last_report_ = std::move(report);
}

PlanRegistration::PlanRegistration(BoundPlan plan) : key_(NewKey()) {
  Registry& registry = GlobalRegistry();
  MutexLock lock(registry.mutex);
  registry.plans.emplace(key_, std::move(plan));
}

PlanRegistration::~PlanRegistration() {
  BoundPlan gone;  // destroyed after the lock
  Registry& registry = GlobalRegistry();
  MutexLock lock(registry.mutex);
  const auto found = registry.plans.find(key_);
  gone = std::move(found->second);
  registry.plans.erase(found);
}

BoundPlan FindPlan(const std::string& key) {
  Registry& registry = GlobalRegistry();
  MutexLock lock(registry.mutex);
  const auto found = registry.plans.find(key);
  return found == registry.plans.end() ? BoundPlan() : found->second;
}

size_t NumRegisteredPlans() {
  Registry& registry = GlobalRegistry();
  MutexLock lock(registry.mutex);
  return registry.plans.size();
}

}  // namespace jaxoffload

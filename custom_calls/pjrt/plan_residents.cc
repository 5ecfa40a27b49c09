#include "pjrt/plan_residents.h"

#include <unordered_map>

#include "base/stamp.h"

namespace jaxoffload {
namespace {

template <typename T>
T At(const std::vector<T>& values, int32_t index) {
  const auto at = static_cast<size_t>(index);
  return at < values.size() ? values[at] : T();
}

}  // namespace

PlanResidents::PlanResidents(std::shared_ptr<const LoadedPlan> plan, Platform& platform)
    : plan_(std::move(plan)), platform_(platform) {
  MutexLock lock(mutex_);
  std::unordered_map<int32_t, std::vector<int32_t>> versions;  // by argument
  for (int32_t version = 0; version < plan_->num_versions(); ++version) {
    if (plan_->space(version) == Space::kArgument)
      versions[plan_->index(version)].push_back(version);
  }
  for (size_t i = 0; i < plan_->residents().size(); ++i) {
    const int32_t version = plan_->residents()[i], owed = plan_->owed()[i];
    Part part;
    part.reload = plan_->writer(version);
    const int32_t brought = plan_->input(plan_->inputs(part.reload).begin);
    const int32_t source = plan_->SourceOf(version);
    if (brought != source && plan_->readers(brought).size() == 1) {
      part.load = plan_->writer(brought);
    }
    part.argument = plan_->index(source);
    const int32_t returned = plan_->returned()[i];
    part.gives_way = returned >= 0;
    if (part.gives_way && plan_->space(plan_->BroughtFrom(returned)) == Space::kResult) {
      part.updated = plan_->index(plan_->BroughtFrom(returned));
    }
    if (owed >= 0) {
      part.overwriter = plan_->writer(plan_->SuccessorOf(version));
      part.offload = plan_->writer(owed);
      part.result = plan_->index(owed);
    }
    part.place = {plan_->index(version), plan_->offset(version), plan_->bytes(version), kNoStamp,
                  plan_->offset(source)};
    part.is_read_elsewhere = IsReadElsewhere(part, versions[part.argument]);
    parts_.push_back(part);
  }
}

// An idle reload does not need what it would read. Whoever else reads any of those bytes does, be
// it under the name of another version.
//
// Args:
//   versions: in the part's argument.
bool PlanResidents::IsReadElsewhere(const Part& part, const std::vector<int32_t>& versions) const {
  const int64_t start = part.place.part_start, end = start + part.place.bytes;
  for (const int32_t version : versions) {
    if (plan_->offset(version) >= end || plan_->offset(version) + plan_->bytes(version) <= start) {
      continue;
    }
    const Range all = plan_->readers(version);
    for (int64_t r = all.begin; r < all.end; ++r) {
      const int32_t reader = plan_->reader(r);
      if (reader != part.reload && reader != part.load) return true;
    }
  }
  return false;
}

void PlanResidents::Find(RunContext& context) {
  MutexLock lock(mutex_);
  const Contents& contents = context.contents;
  std::vector<Residents::Wanted> wanted;
  for (Part& part : parts_) {
    part.place.stamp = At(contents.argument_stamps, part.argument);
    part.found = Residents::Found::kNo;
    part.is_owed = part.result >= 0 && At(contents.result_owners, part.result) != nullptr;
    wanted.push_back({part.place, part.overwriter >= 0, part.is_read_elsewhere, part.gives_way});
  }
  const std::vector<Residents::Found> found =
      platform_.residents().Keep(plan_->arena_bytes(), context.arguments, wanted, Payer());
  for (size_t i = 0; i < parts_.size(); ++i) {
    Part& part = parts_[i];
    part.found = found[i];
    if (part.is_owed) context.is_idle[part.offload] = kUnseen;
    if (found[i] == Residents::Found::kNo) continue;
    context.is_idle[part.reload] = found[i] == Residents::Found::kOwed ? kUnseen : kSeen;
    if (part.load >= 0) context.is_idle[part.load] = kUnseen;
  }
}

void PlanResidents::Leave(RunContext& context) {
  MutexLock lock(mutex_);
  for (Part& part : parts_) {
    const int32_t result = part.overwriter >= 0 ? part.result : part.updated;
    if (result >= 0) part.place.stamp = At(context.contents.result_stamps, result);
    if (context.is_stopped) {  // it may have left a copy half done
      Restore(part, context);
    } else if (part.is_owed || part.gives_way ||
               (part.overwriter < 0 && part.found == Residents::Found::kNo)) {
      // What was found and stayed is there as it was, and may be owed to its array.
      if (part.is_owed) Owe(part, context);
      if (part.place.stamp != kNoStamp) platform_.residents().Add(part.place);
    }
    part.place.owed_to = nullptr;
    part.place.owner.reset();
    // A run that fails before it has looked leaves nothing as it was found.
    part.found = Residents::Found::kNo;
    part.is_owed = false;
  }
}

// The result's array is the donated argument's, too.
void PlanResidents::Owe(Part& part, const RunContext& context) {
  part.place.owed_to = context.results[part.result];
  part.place.owner = At(context.contents.result_owners, part.result);
}

void PlanResidents::Restore(Part& part, RunContext& context) {
  // What nothing writes over was not forgotten when the run began; what gave way is in the array.
  if (part.overwriter < 0 || part.found == Residents::Found::kNo) return;
  const bool was_owed = part.found == Residents::Found::kOwed;
  if (!context.begun[part.overwriter]) {
    if (was_owed) Owe(part, context);
    platform_.residents().Add(part.place);
  } else if (was_owed) {
    context.lost_results.resize(context.results.size(), 0);
    context.lost_results[part.result] = 1;
  }
}

std::vector<std::pair<int32_t, int64_t>> PlanResidents::List() const {
  MutexLock lock(mutex_);
  std::vector<std::pair<int32_t, int64_t>> found;
  for (const Part& part : parts_) {
    if (platform_.residents().Has(part.place)) {
      found.emplace_back(part.argument, part.place.bytes);
    }
  }
  return found;
}

void PlanResidents::Forget() {
  MutexLock lock(mutex_);
  std::vector<Resident> these;
  for (const Part& part : parts_) these.push_back(part.place);
  platform_.residents().Forget(these, Payer());
}

Residents::Pay PlanResidents::Payer() {
  return [this](const Resident& each) { platform_.Pay(each); };
}

}  // namespace jaxoffload

// What a loaded plan knows of versions that stay in their places after a run.

#include "plan/loaded_plan.h"

namespace jaxoffload {

bool LoadedPlan::IsBroughtBack(int32_t first, int32_t last) const {
  if (last >= num_versions() || last == first || writer_[last] < 0) return false;
  const bool is_same = space(last) == Space::kDevice && index(last) == index(first) &&
                       offset(last) == offset(first) && bytes(last) == bytes(first);
  if (!is_same || SuccessorOf(first) >= 0 || SuccessorOf(last) >= 0 ||
      kind(writer_[last]) != Kind::kReload) {
    return false;
  }
  const int32_t old = BroughtFrom(first), now = BroughtFrom(last);
  if (now == old) return true;
  if (space(old) != Space::kArgument || space(now) != Space::kResult ||
      offset(now) != offset(old)) {
    return false;
  }
  for (size_t i = 0; i < a_.donated.size(); i += 2) {
    if (a_.donated[i] == index(old) && a_.donated[i + 1] == index(now)) return true;
  }
  return false;
}

int32_t LoadedPlan::BroughtFrom(int32_t version) const {
  return input(inputs(writer_[version]).begin);
}

int32_t LoadedPlan::SuccessorOf(int32_t version) const {
  const Range all = readers(version);
  for (int64_t r = all.begin; r < all.end; ++r) {
    const Range written = outputs(reader(r));
    for (int64_t o = written.begin; o < written.end; ++o) {
      if (overwritten(o) == version && output(o) != version) return output(o);
    }
  }
  return -1;
}

int32_t LoadedPlan::SourceOf(int32_t resident) const {
  int32_t source = BroughtFrom(resident);
  if (space(source) == Space::kHost && kind(writer_[source]) == Kind::kLoad) {
    source = BroughtFrom(source);
  }
  return space(source) == Space::kArgument ? source : -1;
}

}  // namespace jaxoffload

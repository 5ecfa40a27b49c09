#include "tiers/residents.h"

#include <utility>

#include "base/stamp.h"

namespace jaxoffload {

std::vector<uint8_t> Residents::Keep(const std::vector<int64_t>& used,
                                     const std::vector<Resident>& wanted) {
  MutexLock lock(mutex_);
  std::vector<uint8_t> is_there;
  std::map<std::pair<int32_t, int64_t>, Resident> kept;
  for (const Resident& each : wanted) {
    is_there.push_back(IsThere(each));
    if (is_there.back()) kept.emplace(std::make_pair(each.device, each.start), each);
  }
  for (const auto& [key, each] : found_) {
    const bool is_beyond =
        each.device >= static_cast<int32_t>(used.size()) || each.start >= used[each.device];
    if (is_beyond) kept.emplace(key, each);
  }
  found_ = std::move(kept);
  return is_there;
}

void Residents::Add(const Resident& found) {
  MutexLock lock(mutex_);
  found_.insert_or_assign({found.device, found.start}, found);
}

void Residents::ForgetBeyond(int32_t device, int64_t bytes) {
  MutexLock lock(mutex_);
  for (auto at = found_.begin(); at != found_.end();) {
    const Resident& each = at->second;
    at = each.device == device && each.start + each.bytes > bytes ? found_.erase(at) : ++at;
  }
}

void Residents::Forget(const std::vector<Resident>& these) {
  MutexLock lock(mutex_);
  for (const Resident& each : these) {
    if (IsThere(each)) found_.erase({each.device, each.start});
  }
}

bool Residents::Has(const Resident& wanted) const {
  MutexLock lock(mutex_);
  return IsThere(wanted);
}

bool Residents::empty() const {
  MutexLock lock(mutex_);
  return found_.empty();
}

bool Residents::IsThere(const Resident& wanted) const {
  if (wanted.stamp == kNoStamp) return false;
  const auto found = found_.find({wanted.device, wanted.start});
  return found != found_.end() && found->second == wanted;
}

}  // namespace jaxoffload

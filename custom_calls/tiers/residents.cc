#include "tiers/residents.h"

#include <algorithm>
#include <exception>
#include <set>
#include <stdexcept>
#include <utility>

#include "base/stamp.h"

namespace jaxoffload {

std::vector<Residents::Found> Residents::Keep(const std::vector<int64_t>& used,
                                              const std::vector<char*>& read,
                                              const std::vector<Wanted>& wanted, const Pay& pay) {
  MutexLock lock(mutex_);
  if (found_.empty() && lost_.empty()) return std::vector<Found>(wanted.size(), Found::kNo);
  const auto is_read = [&](const Resident& each) {
    return each.owed_to != nullptr &&
           std::find(read.begin(), read.end(), each.owed_to) != read.end();
  };
  for (const Resident& each : lost_) {
    if (is_read(each) && !each.owner.expired()) throw std::runtime_error(each.lost);
  }
  std::set<Map::key_type> wanted_ones, may_be_owed, giving_way;
  for (const Wanted& each : wanted) {
    if (Find(each.place) == nullptr) continue;
    const Map::key_type key(each.place.device, each.place.start);
    wanted_ones.insert(key);
    if (!each.is_read_elsewhere) may_be_owed.insert(key);
    if (each.gives_way) giving_way.insert(key);
  }
  // Everything is paid before anything is forgotten, so that nothing has changed if it fails.
  const auto is_in_the_way = [&](const Resident& each) {
    return each.device < static_cast<int32_t>(used.size()) && each.start < used[each.device];
  };
  for (auto& [key, each] : found_) {
    const bool is_unwanted = wanted_ones.count(key) == 0 || giving_way.count(key) != 0;
    const bool loses_its_place = is_unwanted && is_in_the_way(each);
    if (loses_its_place || (may_be_owed.count(key) == 0 && is_read(each))) PayOne(each, pay);
  }
  for (auto at = found_.begin(); at != found_.end();) {
    const bool goes = wanted_ones.count(at->first) == 0 && is_in_the_way(at->second);
    at = goes ? found_.erase(at) : ++at;
  }
  std::vector<Found> answer;
  for (const Wanted& each : wanted) {
    const Resident* const found = Find(each.place);
    answer.push_back(found == nullptr            ? Found::kNo
                     : found->owed_to != nullptr ? Found::kOwed
                                                 : Found::kYes);
  }
  for (const Wanted& each : wanted) {
    if ((each.changes || each.gives_way) && Find(each.place) != nullptr) {
      found_.erase({each.place.device, each.place.start});
    }
  }
  return answer;
}

void Residents::Add(const Resident& found) {
  MutexLock lock(mutex_);
  found_.insert_or_assign({found.device, found.start}, found);
}

void Residents::ForgetBeyond(int32_t device, int64_t bytes, const Pay& pay) {
  MutexLock lock(mutex_);
  // Nobody can ask for what is lost of an array that is gone.
  const auto is_gone = [](const Resident& each) { return each.owner.expired(); };
  lost_.erase(std::remove_if(lost_.begin(), lost_.end(), is_gone), lost_.end());
  for (auto at = found_.begin(); at != found_.end();) {
    Resident& each = at->second;
    if (each.device != device || each.start + each.bytes <= bytes) {
      ++at;
      continue;
    }
    try {
      PayOne(each, pay);
    } catch (const std::exception& e) {
      each.lost = std::string("bytes that were left on the device are lost: ") + e.what();
      lost_.push_back(each);
    }
    at = found_.erase(at);
  }
}

void Residents::Forget(const std::vector<Resident>& these, const Pay& pay) {
  MutexLock lock(mutex_);
  for (const Resident& each : these) {
    if (Find(each) == nullptr) continue;
    const auto at = found_.find({each.device, each.start});
    PayOne(at->second, pay);
    found_.erase(at);
  }
}

void Residents::Settle(const char* array, const Pay& pay) {
  MutexLock lock(mutex_);
  for (const Resident& each : lost_) {
    if (each.owed_to == array && !each.owner.expired()) throw std::runtime_error(each.lost);
  }
  for (auto& [key, each] : found_) {
    if (each.owed_to == array) PayOne(each, pay);
  }
}

bool Residents::Has(const Resident& wanted) const {
  MutexLock lock(mutex_);
  return Find(wanted) != nullptr;
}

bool Residents::Owes(const char* array) const {
  MutexLock lock(mutex_);
  const auto is_it = [&](const Resident& each) {
    return each.owed_to == array && !each.owner.expired();
  };
  return std::any_of(lost_.begin(), lost_.end(), is_it) ||
         std::any_of(found_.begin(), found_.end(),
                     [&](const auto& entry) { return is_it(entry.second); });
}

size_t Residents::num_lost() const {
  MutexLock lock(mutex_);
  return lost_.size();
}

bool Residents::empty() const {
  MutexLock lock(mutex_);
  return found_.empty();
}

const Resident* Residents::Find(const Resident& wanted) const {
  if (wanted.stamp == kNoStamp) return nullptr;
  const auto found = found_.find({wanted.device, wanted.start});
  return found != found_.end() && found->second.IsSame(wanted) ? &found->second : nullptr;
}

void Residents::PayOne(Resident& resident, const Pay& pay) {
  if (resident.owed_to == nullptr) return;
  const std::shared_ptr<void> owner = resident.owner.lock();
  if (owner != nullptr) pay(resident);
  resident.owed_to = nullptr;
}

}  // namespace jaxoffload

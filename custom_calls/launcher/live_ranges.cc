#include "launcher/live_ranges.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace jaxoffload {

LiveRanges::LiveRanges(const LoadedPlan& plan, const std::vector<char*>& address, bool by_streams)
    : plan_(plan),
      address_(address),
      by_streams_(by_streams),
      state_(plan.num_versions(), State::kAbsent),
      readers_left_(plan.num_versions()),
      completed_(plan.num_vertices(), false),
      turn_(plan.num_vertices()),
      next_turn_(plan.num_vertices(), -1),
      to_come_(plan.num_vertices(), -1),
      device_bytes_(plan.arena_bytes().size(), 0) {
  MutexLock lock(mutex_);
  for (int32_t version = 0; version < plan.num_versions(); ++version) {
    longest_ = std::max(longest_, plan.bytes(version));
    readers_left_[version] = static_cast<int32_t>(plan.readers(version).size());
    if (plan.space(version) != Space::kArgument) continue;
    state_[version] = State::kIntact;
    if (readers_left_[version] > 0) Insert(version);
  }
  std::iota(turn_.begin(), turn_.end(), 0);
  for (int32_t v = plan.num_vertices(); v-- > 0;) {
    const int32_t first = plan.first_of_sum(v);
    if (first >= 0) next_turn_[v] = std::exchange(to_come_[first], v);
  }
}

void LiveRanges::Insert(int32_t version_id) {
  if (plan_.bytes(version_id) == 0) return;
  live_.emplace(std::make_pair(Begin(version_id), version_id), version_id);
  if (plan_.space(version_id) != Space::kDevice) return;
  int64_t& bytes = device_bytes_[plan_.index(version_id)];
  bytes += plan_.bytes(version_id);
  peak_device_bytes_ = std::max(peak_device_bytes_, bytes);
}

void LiveRanges::Remove(int32_t version_id) {
  if (live_.erase({Begin(version_id), version_id}) == 0) return;
  if (plan_.space(version_id) != Space::kDevice) return;
  device_bytes_[plan_.index(version_id)] -= plan_.bytes(version_id);
}

bool LiveRanges::Start(int32_t vertex_id, std::string* error) {
  MutexLock lock(mutex_);
  const int32_t sum = plan_.first_of_sum(vertex_id);
  if (sum >= 0) {
    turn_[vertex_id] = to_come_[sum];
    to_come_[sum] = next_turn_[to_come_[sum]];
  }
  if (!CheckReads(vertex_id, error)) return false;
  const Range outputs = plan_.outputs(vertex_id);
  for (int64_t o = outputs.begin; o < outputs.end; ++o) {
    if (!CheckWrite(vertex_id, o, error)) return false;
    const int64_t entry = OutputEntry(vertex_id, o);
    if (plan_.overwritten(entry) >= 0) Remove(plan_.overwritten(entry));
    state_[plan_.output(entry)] = State::kBeingWritten;
    Insert(plan_.output(entry));
  }
  return true;
}

bool LiveRanges::CheckReads(int32_t vertex_id, std::string* error) {
  const Range inputs = plan_.inputs(vertex_id);
  for (int64_t i = inputs.begin; i < inputs.end; ++i) {
    const int32_t version = Input(vertex_id, i);
    if (state_[version] == State::kIntact || IsUnderWay(version, vertex_id)) continue;
    *error = "race: " + plan_.Describe(vertex_id) + " reads " + DescribeVersion(version) +
             " before its writer, " + plan_.Describe(plan_.writer(version)) + ", has completed";
    return false;
  }
  return true;
}

bool LiveRanges::CheckWrite(int32_t vertex_id, int64_t output, std::string* error) {
  const int64_t entry = OutputEntry(vertex_id, output);
  const int32_t version = plan_.output(entry);
  if (plan_.bytes(version) == 0) return true;
  const int32_t overwritten = plan_.overwritten(entry);
  const uintptr_t first =
      Begin(version) > static_cast<uintptr_t>(longest_) ? Begin(version) - longest_ : 0;
  for (auto it = live_.lower_bound({first, -1}); it != live_.end(); ++it) {
    const int32_t other = it->second;
    if (Begin(other) >= End(version)) break;
    if (!Overlap(other, version)) continue;
    const bool in_place =
        other == overwritten && Begin(other) == Begin(version) && readers_left_[other] == 1;
    if (in_place) continue;
    *error = "race: " + plan_.Describe(vertex_id) + " writes " + DescribeVersion(version) +
             ", which overlaps " + DescribeVersion(other);
    if (plan_.writer(other) >= 0) *error += " of " + plan_.Describe(plan_.writer(other));
    *error += ": " + WhyLive(other, other == overwritten ? vertex_id : -1);
    return false;
  }
  return true;
}

void LiveRanges::Complete(int32_t vertex_id) {
  MutexLock lock(mutex_);
  completed_[vertex_id] = true;
  const Range outputs = plan_.outputs(vertex_id);
  for (int64_t o = outputs.begin; o < outputs.end; ++o) {
    const int32_t version = plan_.output(OutputEntry(vertex_id, o));
    state_[version] = State::kIntact;
    if (readers_left_[version] == 0 && plan_.space(version) != Space::kResult) Remove(version);
  }
  const Range inputs = plan_.inputs(vertex_id);
  for (int64_t i = inputs.begin; i < inputs.end; ++i) {
    const int32_t version = Input(vertex_id, i);
    const bool last = --readers_left_[version] == 0;
    if (last && plan_.space(version) != Space::kResult) Remove(version);
  }
}

int64_t LiveRanges::peak_device_bytes() const {
  MutexLock lock(mutex_);
  return peak_device_bytes_;
}

std::string LiveRanges::DescribeVersion(int32_t version_id) const {
  static const char* const kNames[] = {"device ", "argument ", "result ", "the host arena",
                                       "the disk"};
  const Space space = plan_.space(version_id);
  std::string text = "bytes [" + std::to_string(plan_.offset(version_id)) + ", " +
                     std::to_string(plan_.offset(version_id) + plan_.bytes(version_id)) + ") of " +
                     kNames[static_cast<int>(space)];
  if (space != Space::kHost && space != Space::kDisk)
    text += std::to_string(plan_.index(version_id));
  return text + " (version " + std::to_string(version_id) + ")";
}

std::string LiveRanges::WhyLive(int32_t version_id, int32_t apart_from) const {
  if (plan_.space(version_id) == Space::kResult) return "it is a result";
  if (state_[version_id] == State::kBeingWritten) return "it is being written";
  const Range readers = plan_.readers(version_id);
  for (int64_t r = readers.begin; r < readers.end; ++r) {
    const int32_t reader = plan_.reader(r);
    if (!completed_[reader] && reader != apart_from) {
      return plan_.Describe(reader) + " has still to read it";
    }
  }
  return "it is overwritten in place at another address";
}

}  // namespace jaxoffload

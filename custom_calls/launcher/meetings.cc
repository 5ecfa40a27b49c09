#include "launcher/meetings.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/thread.h"

namespace jaxoffload {

// The thread that tells meetings how time passes. It counts its own short waits instead of asking a
// clock: a process that was stopped for minutes has not waited for as long when it goes on.
class Watch {
 public:
  // Throws std::runtime_error if no thread can be started.
  void Add(std::weak_ptr<Meetings> meetings) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (!is_running_) StartThread([this] { Main(); }).detach();
    is_running_ = true;
    watched_.push_back(std::move(meetings));
    added_.NotifyOne();
  }

  static Watch& Global() {
    static Watch* const watch = new Watch;  // its thread outlives statics
    return *watch;
  }

 private:
  static constexpr int64_t kTickMs = 50;

  void Main() {
    for (;;) {
      std::vector<std::weak_ptr<Meetings>> watched = Take();
      std::this_thread::sleep_for(std::chrono::milliseconds(kTickMs));
      for (std::weak_ptr<Meetings>& each : watched) {
        const std::shared_ptr<Meetings> meetings = each.lock();
        if (meetings == nullptr || !meetings->Pass(kTickMs)) continue;
        MutexLock lock(mutex_);
        watched_.push_back(std::move(each));
      }
    }
  }

  std::vector<std::weak_ptr<Meetings>> Take() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    while (watched_.empty()) added_.Wait(mutex_);
    return std::exchange(watched_, {});
  }

  Mutex mutex_;
  CondVar added_;
  std::vector<std::weak_ptr<Meetings>> watched_ GUARDED_BY(mutex_);
  bool is_running_ GUARDED_BY(mutex_) = false;
};

Meetings::Meetings(int32_t num_devices, std::vector<int64_t> argument_bytes,
                   std::vector<int64_t> result_bytes, int64_t patience_ms)
    : num_devices_(num_devices),
      argument_bytes_(std::move(argument_bytes)),
      result_bytes_(std::move(result_bytes)),
      patience_ms_(patience_ms) {}

std::shared_ptr<Meetings> Meetings::Make(int32_t num_devices, std::vector<int64_t> argument_bytes,
                                         std::vector<int64_t> result_bytes, int64_t patience_ms) {
  return std::shared_ptr<Meetings>(
      new Meetings(num_devices, std::move(argument_bytes), std::move(result_bytes), patience_ms));
}

void Meetings::Place(const std::vector<Part>& parts, int32_t rank,
                     const std::vector<int64_t>& planned, const char* what,
                     std::vector<char*>& all) const {
  if (parts.size() * num_devices_ != planned.size()) {
    throw std::invalid_argument(std::to_string(parts.size()) + " " + what + " on " +
                                std::to_string(num_devices_) + " devices, the plan has " +
                                std::to_string(planned.size()) + " on all");
  }
  all.resize(planned.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t at = i * num_devices_ + rank;
    if (parts[i].bytes != planned[at]) {
      throw std::invalid_argument(std::string(what) + "[" + std::to_string(i) + "] has " +
                                  std::to_string(parts[i].bytes) + " bytes, the plan has " +
                                  std::to_string(planned[at]));
    }
    all[at] = parts[i].address;
  }
}

std::optional<Meetings::Whole> Meetings::Come(int64_t run_id, int32_t rank,
                                              const std::vector<Part>& arguments,
                                              const std::vector<Part>& results, End end) {
  std::string error;
  std::vector<End> failed;
  {
    MutexLock lock(mutex_);
    Meeting& meeting = meetings_[run_id];
    meeting.has_come.resize(num_devices_);
    try {
      if (rank < 0 || rank >= num_devices_) {
        throw std::invalid_argument("device " + std::to_string(rank) + " of " +
                                    std::to_string(num_devices_));
      }
      if (meeting.has_come[rank]) {
        throw std::invalid_argument("device " + std::to_string(rank) + " has come twice");
      }
      meeting.has_come[rank] = true;
      meeting.waited_ms = 0;
      if (meeting.error.empty()) {
        Place(arguments, rank, argument_bytes_, "arguments", meeting.brought.arguments);
        Place(results, rank, result_bytes_, "results", meeting.brought.results);
        if (!is_watched_) Watch::Global().Add(weak_from_this());
        is_watched_ = true;
      }
    } catch (const std::exception& e) {
      meeting.error = e.what();
    }
    meeting.brought.ends.push_back(std::move(end));
    const bool is_whole =
        std::all_of(meeting.has_come.begin(), meeting.has_come.end(), [](bool has) { return has; });
    error = meeting.error;
    if (!error.empty()) {
      failed.swap(meeting.brought.ends);
      if (is_whole) meetings_.erase(run_id);
    } else if (is_whole) {
      Whole whole = std::move(meeting.brought);
      meetings_.erase(run_id);
      return whole;
    }
  }
  for (const End& each : failed) each(error);
  return std::nullopt;
}

bool Meetings::Pass(int64_t ms) {
  std::vector<std::pair<std::vector<End>, std::string>> failed;
  bool are_waiting = false;
  {
    MutexLock lock(mutex_);
    for (auto& [run_id, meeting] : meetings_) {
      if (!meeting.error.empty()) continue;
      meeting.waited_ms += ms;
      if (meeting.waited_ms < patience_ms_) {
        are_waiting = true;
        continue;
      }
      std::string missing;
      for (int32_t rank = 0; rank < num_devices_; ++rank) {
        if (!meeting.has_come[rank])
          missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
      }
      meeting.error = "of " + std::to_string(num_devices_) + " devices number " + missing +
                      " did not come to this call within " + std::to_string(patience_ms_) +
                      " ms after the others: its program failed before, with an error of its own, "
                      "or takes longer than XLA_FLAGS=--xla_cpu_collective_call_terminate_timeout_"
                      "seconds= allows";
      failed.emplace_back(std::exchange(meeting.brought.ends, {}), meeting.error);
    }
    is_watched_ = are_waiting;
  }
  for (const auto& [ends, error] : failed) {
    for (const End& end : ends) end(error);
  }
  return are_waiting;
}

int32_t Meetings::num_waiting() const {
  MutexLock lock(mutex_);
  return static_cast<int32_t>(
      std::count_if(meetings_.begin(), meetings_.end(),
                    [](const auto& each) { return each.second.error.empty(); }));
}

}  // namespace jaxoffload

#include "launcher/run.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

namespace jaxoffload {

void CopyBytes(char* to, const char* from, int64_t bytes, const std::atomic<bool>& abort) {
  if (to == from) return;
  constexpr int64_t kPiece = int64_t{16} << 20;  // about 2 ms
  for (int64_t done = 0; done < bytes; done += kPiece) {
    if (abort.load(std::memory_order_relaxed)) return;
    std::memcpy(to + done, from + done, std::min(kPiece, bytes - done));
  }
}

namespace {

constexpr char kCancelled[] = "the run was cancelled";

}  // namespace

Run::Run(std::shared_ptr<const LoadedPlan> plan, std::shared_ptr<Backend> backend,
         std::vector<char*> arguments, std::vector<char*> results, const RunOptions& options,
         std::function<void(const std::shared_ptr<const RunReport>&)> done)
    : plan_(std::move(plan)),
      backend_(std::move(backend)),
      options_(options),
      unmet_(new std::atomic<int32_t>[plan_->num_vertices()]),
      next_(plan_->num_vertices()),
      next_issued_(plan_->num_vertices()),
      pending_(plan_->num_vertices() + 1),
      start_ns_(plan_->num_vertices(), -1),
      end_ns_(plan_->num_vertices(), -1),
      lane_end_ns_(plan_->lanes().size(), -1),
      draft_(std::make_shared<RunReport>()) {
  if (done) callback_ = std::make_shared<Callback>(Callback{std::move(done), nullptr});
  context_.arguments = std::move(arguments);
  context_.results = std::move(results);
  context_.address.resize(plan_->num_versions());
  context_.is_idle.assign(plan_->num_vertices(), 0);
  context_.begun.assign(plan_->num_vertices(), 0);
  context_.check = options.check;
  for (int32_t v = 0; v < plan_->num_vertices(); ++v) {
    unmet_[v].store(plan_->indegree(v), std::memory_order_relaxed);
  }
  ready_.reserve(plan_->lanes().size());
  for (int32_t lane = 0; lane < plan_->lanes().size(); ++lane) {
    ready_.emplace_back(*plan_, lane, options_.policy, options_.seed);
  }
  draft_->lane_busy_ns.assign(plan_->lanes().size(), 0);
  draft_->lane.resize(plan_->num_vertices());
  draft_->touched_results.assign(plan_->result_bytes().size(), 0);
  draft_->error_message.reserve(sizeof(kCancelled));
}

void Run::PrepareCallback() {
  if (callback_ == nullptr) return;
  callback_task_ = CallbackThreads::Global().Prepare(
      [callback = callback_] { callback->function(callback->report); });
}

bool Run::WaitFor(std::chrono::milliseconds limit) {
  MutexLock lock(mutex_);
  if (!done_) ended_.WaitFor(mutex_, limit);
  return done_;
}

void Run::Wait() {
  MutexLock lock(mutex_);
  while (!done_) ended_.Wait(mutex_);
}

void Run::WaitTelling(std::chrono::milliseconds limit, const std::function<void()>& tell) {
  int32_t before = -1;
  while (!WaitFor(limit)) {
    const int32_t now = num_ended_.load(std::memory_order_relaxed);
    if (now == before) {
      tell();
      return Wait();
    }
    before = now;
  }
}

std::shared_ptr<const RunReport> Run::report() const {
  MutexLock lock(mutex_);
  return report_;
}

bool Run::Begin() {
  start_ = Clock::now();
  try {
    backend_->Begin(context_);
    Bind();
    if (options_.check) {
      live_ranges_ = std::make_unique<LiveRanges>(*plan_, context_.address, is_windowed_);
    }
  } catch (const std::exception& e) {
    FailWith(-1, e);
    return false;
  }
  return plan_->num_vertices() > 0;
}

void Run::Bind() {
  for (int32_t version = 0; version < plan_->num_versions(); ++version) {
    char* base = nullptr;
    switch (plan_->space(version)) {
      case Space::kDevice:
        base = backend_->DeviceBase(plan_->index(version));
        break;
      case Space::kArgument:
        base = context_.arguments[plan_->index(version)];
        break;
      case Space::kResult:
        base = context_.results[plan_->index(version)];
        break;
      case Space::kHost:
        base = backend_->HostBase();
        break;
      case Space::kDisk:
        base = backend_->DiskBase();
        break;
    }
    // Of an empty range the base may be null, and nothing is read there.
    context_.address[version] = base == nullptr ? nullptr : base + plan_->offset(version);
  }
}

void Run::Execute(int32_t vertex_id) {
  if (context_.abort.load(std::memory_order_relaxed)) return;
  if (options_.max_delay_us > 0) Delay(vertex_id, 0);
  std::string error;
  try {
    if (live_ranges_ && !live_ranges_->Start(vertex_id, &error)) {
      Fail(vertex_id, std::move(error));
      return;
    }
    start_ns_[vertex_id] = Now();
    context_.begun[vertex_id] = 1;
    if (backend_->Execute(vertex_id, context_, &error)) {
      if (!is_windowed_) End(vertex_id);
      return;
    }
    Fail(vertex_id, std::move(error));
  } catch (const std::exception& e) {  // no memory, for the most part
    FailWith(vertex_id, e);
  }
  start_ns_[vertex_id] = end_ns_[vertex_id] = -1;
}

void Run::Await(int32_t vertex_id) {
  if (start_ns_[vertex_id] < 0) return;  // it was never put on its stream
  std::string error;
  if (!backend_->Await(vertex_id, context_, &error)) {
    start_ns_[vertex_id] = -1;
    Fail(vertex_id, std::move(error));
    return;
  }
  // It starts when the one ahead of it on the stream has ended.
  int64_t& lane_end = lane_end_ns_[plan_->lane(vertex_id)];
  start_ns_[vertex_id] = std::max(start_ns_[vertex_id], lane_end);
  End(vertex_id);
  lane_end = end_ns_[vertex_id];
}

void Run::End(int32_t vertex_id) {
  end_ns_[vertex_id] = Now();
  num_ended_.fetch_add(1, std::memory_order_relaxed);
  if (live_ranges_) live_ranges_->Complete(vertex_id);
  if (options_.max_delay_us > 0) Delay(vertex_id, 1);
}

void Run::Fail(int32_t vertex_id, std::string message) {
  if (!failed_.exchange(true, std::memory_order_relaxed)) {
    error_vertex_ = vertex_id;
    error_message_ = message.empty() ? "unknown cause" : std::move(message);
  }
  context_.abort.store(true, std::memory_order_relaxed);
}

void Run::FailWith(int32_t vertex_id, const std::exception& cause) {
  std::string message = "out of memory";  // short enough to need none
  try {
    message = cause.what();
  } catch (const std::exception&) {
  }
  Fail(vertex_id, std::move(message));
}

void Run::Delay(int32_t vertex_id, uint64_t salt) const {
  const uint64_t hash = Mix(Mix(options_.seed, vertex_id), salt);
  if (hash % 2 == 0) return;  // half of them do not sleep, so that some overtake others
  const int64_t sleep_us = static_cast<int64_t>((hash >> 8) % (options_.max_delay_us + 1));
  std::this_thread::sleep_for(std::chrono::microseconds(sleep_us));
}

void Run::NoteTouchedResults(int32_t vertex_id, RunReport* report) const {
  const Range outputs = plan_->outputs(vertex_id);
  for (int64_t o = outputs.begin; o < outputs.end; ++o) {
    const int32_t version = plan_->output(o);
    if (plan_->space(version) == Space::kResult) report->touched_results[plan_->index(version)] = 1;
  }
}

void Run::End() {
  // What comes later comes too late: the backend and the caller must be told the same.
  context_.is_stopped = context_.abort.load(std::memory_order_relaxed);
  backend_->End(context_);
  // Before anyone is told of the end: who waits for it may count on their being let go.
  context_.argument_sources.clear();
  context_.result_extents.clear();
  owners_.clear();
  context_.contents = Contents();
  RunReport* const report = draft_.get();
  for (size_t j = 0; j < context_.lost_results.size(); ++j) {
    if (context_.lost_results[j]) report->touched_results[j] = 1;
  }
  report->wall_ns = Now();
  report->ended_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                         std::chrono::steady_clock::now().time_since_epoch())
                         .count();
  for (int32_t v = 0; v < plan_->num_vertices(); ++v) {
    report->lane[v] = plan_->lane(v);
    // What is left on a device and owed to a result has changed it once the run has succeeded.
    const bool is_copied = !context_.is_idle[v] || !context_.is_stopped;
    if (context_.begun[v] && is_copied) NoteTouchedResults(v, report);
    if (end_ns_[v] < 0) {
      start_ns_[v] = -1;
      continue;
    }
    report->lane_busy_ns[plan_->lane(v)] += end_ns_[v] - start_ns_[v];
    // What a vertex reads was written by another, so outputs are enough.
    for (int64_t o = plan_->outputs(v).begin; o < plan_->outputs(v).end; ++o) {
      const int32_t version = plan_->output(o);
      if (plan_->space(version) != Space::kDevice) continue;
      report->peak_device_bytes =
          std::max(report->peak_device_bytes, plan_->offset(version) + plan_->bytes(version));
    }
    if (IsKernel(plan_->kind(v))) continue;
    const int64_t bytes = plan_->bytes(plan_->input(plan_->inputs(v).begin));
    if (context_.is_idle[v]) {
      if (plan_->kind(v) == Kind::kReload) report->bytes_found += bytes;
      if (plan_->kind(v) == Kind::kOffload) report->bytes_left += bytes;
      continue;
    }
    if (plan_->kind(v) == Kind::kOffload) report->bytes_offloaded += bytes;
    if (plan_->kind(v) == Kind::kReload) report->bytes_reloaded += bytes;
    if (IsBetweenDevices(plan_->kind(v))) report->bytes_transferred += bytes;
    if (plan_->kind(v) == Kind::kLoad) report->bytes_loaded += bytes;
    if (plan_->kind(v) == Kind::kStore) report->bytes_stored += bytes;
  }
  report->rows_loaded = context_.rows_loaded.load(std::memory_order_relaxed);
  report->bytes_loaded += context_.row_bytes_loaded.load(std::memory_order_relaxed);
  report->rows_stored = context_.rows_stored.load(std::memory_order_relaxed);
  report->bytes_stored += context_.row_bytes_stored.load(std::memory_order_relaxed);
  report->start_ns = std::move(start_ns_);
  report->end_ns = std::move(end_ns_);
  if (live_ranges_) report->peak_live_bytes = live_ranges_->peak_device_bytes();
  report->copied_outputs = context_.copied_outputs.load(std::memory_order_relaxed);
  report->realigned_bytes = context_.realigned_bytes.load(std::memory_order_relaxed);
  report->cancelled = context_.is_stopped && cancelled_.load(std::memory_order_relaxed);
  report->error_vertex = error_vertex_;
  if (!error_message_.empty()) {
    report->error_message = std::move(error_message_);
  } else if (context_.is_stopped) {
    report->error_message = kCancelled;  // there is room for it
  }
  MutexLock lock(mutex_);
  report_ = std::move(draft_);
}

void Run::NotifyDone() {
  backend_.reset();
  std::shared_ptr<const RunReport> report;
  {
    MutexLock lock(mutex_);
    done_ = true;
    report = report_;
    ended_.NotifyAll();
  }
  if (helped_lane_ >= 0) helped_.Stop();
  if (callback_ == nullptr) return;
  callback_->report = std::move(report);
  callback_.reset();
  CallbackThreads::Global().Post(std::move(callback_task_));
}

}  // namespace jaxoffload

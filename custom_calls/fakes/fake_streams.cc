#include "fake_streams.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>

namespace fake_cuda {
namespace {

struct Handles {
  std::mutex mutex;
  std::set<void*> streams;
  std::set<void*> events;
  std::vector<void*> all;  // those that were destroyed, too
};

Handles& All() {
  static auto* const handles = new Handles;
  return *handles;
}

uint64_t NextRandom() {
  static std::atomic<uint64_t> count{0};
  // Weyl's sequence: streams differ, and a seed repeats the delays of each.
  return (++count + static_cast<uint64_t>(Setting("FAKE_CUDA_SEED", 0))) * 0x9e3779b97f4a7c15u;
}

}  // namespace

Stream::Stream(Context* context) : context_(context), random_(NextRandom()) {
  std::thread([this] { Main(); }).detach();
}

uint64_t Stream::Add(std::function<void()> work) {
  const bool is_held = Setting("FAKE_CUDA_HOLD", 0) != 0;
  const int delay = Setting("FAKE_CUDA_DELAY_US", 0);
  const std::lock_guard<std::mutex> lock(mutex_);
  random_ = random_ * 6364136223846793005u + 1442695040888963407u;
  const int delay_us = delay == 0 ? 0 : static_cast<int>((random_ >> 33) % (delay + 1));
  work_.push_back({std::move(work), is_held, delay_us});
  changed_.notify_all();
  return ++added_;
}

void Stream::Await(uint64_t number) {
  std::unique_lock<std::mutex> lock(mutex_);
  asked_ = std::max(asked_, number);
  changed_.notify_all();
  changed_.wait(lock, [&] { return done_ >= number; });
}

void Stream::AwaitAll() {
  uint64_t number;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    number = added_;
  }
  Await(number);
}

void Stream::Destroy() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_destroyed_ = true;
  asked_ = added_;
  changed_.notify_all();
}

void Stream::Main() {
  for (;;) {
    Work work;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] {
        if (work_.empty()) return is_destroyed_;
        return !work_.front().is_held || done_ < asked_;
      });
      if (work_.empty()) return;
      work = std::move(work_.front());
      work_.pop_front();
    }
    if (work.delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(work.delay_us));
    work.run();
    work.run = nullptr;
    const std::lock_guard<std::mutex> lock(mutex_);
    ++done_;
    changed_.notify_all();
  }
}

Context* ContextOf(int device) {
  static auto* const contexts = [] {
    auto* const made = new Context[kMaxDevices];
    for (int d = 0; d < kMaxDevices; ++d) made[d].device = d;
    return made;
  }();
  return &contexts[device];
}

Context* FindContext(void* handle) {
  for (int device = 0; device < kMaxDevices; ++device) {
    Context* const context = ContextOf(device);
    if (context == handle) return context->is_retained ? context : nullptr;
  }
  return nullptr;
}

Context*& Current() {
  thread_local Context* current = nullptr;
  return current;
}

void LeaveCurrent(int device) {
  ContextOf(device)->is_retained = true;
  Current() = ContextOf(device);
}

int Lost(int device) { return ContextOf(device)->lost; }

void Lose(int device, int code) {
  int works = 0;
  ContextOf(device)->lost.compare_exchange_strong(works, code);
}

Stream* NewStream(Context* context) {
  auto* const stream = new Stream(context);
  Handles& handles = All();
  const std::lock_guard<std::mutex> lock(handles.mutex);
  handles.streams.insert(stream);
  handles.all.push_back(stream);
  return stream;
}

Event* NewEvent(Context* context) {
  auto* const event = new Event(context);
  Handles& handles = All();
  const std::lock_guard<std::mutex> lock(handles.mutex);
  handles.events.insert(event);
  handles.all.push_back(event);
  return event;
}

Stream* FindStream(void* handle) {
  Handles& handles = All();
  const std::lock_guard<std::mutex> lock(handles.mutex);
  return handles.streams.count(handle) == 0 ? nullptr : static_cast<Stream*>(handle);
}

Event* FindEvent(void* handle) {
  Handles& handles = All();
  const std::lock_guard<std::mutex> lock(handles.mutex);
  return handles.events.count(handle) == 0 ? nullptr : static_cast<Event*>(handle);
}

void Destroy(Stream* stream) {
  Handles& handles = All();
  {
    const std::lock_guard<std::mutex> lock(handles.mutex);
    handles.streams.erase(stream);
  }
  stream->Destroy();
}

void Destroy(Event* event) {
  Handles& handles = All();
  const std::lock_guard<std::mutex> lock(handles.mutex);
  handles.events.erase(event);
}

std::vector<Stream*> StreamsOf(const Context* context) {
  Handles& handles = All();
  const std::lock_guard<std::mutex> lock(handles.mutex);
  std::vector<Stream*> found;
  for (void* const handle : handles.streams) {
    auto* const stream = static_cast<Stream*>(handle);
    if (stream->context() == context) found.push_back(stream);
  }
  return found;
}

int64_t NumLiveHandles() {
  Handles& handles = All();
  const std::lock_guard<std::mutex> lock(handles.mutex);
  return static_cast<int64_t>(handles.streams.size() + handles.events.size());
}

Stream& ComputeStream(int device) {
  static std::mutex mutex;
  static Stream* streams[kMaxDevices] = {};
  const std::lock_guard<std::mutex> lock(mutex);
  if (streams[device] == nullptr) streams[device] = new Stream(ContextOf(device));
  return *streams[device];
}

uint64_t Compute(int device, std::function<void()> work) {
  return ComputeStream(device).Add(std::move(work));
}
void AwaitCompute(int device, uint64_t number) { ComputeStream(device).Await(number); }
void AwaitCompute(int device) { ComputeStream(device).AwaitAll(); }

}  // namespace fake_cuda

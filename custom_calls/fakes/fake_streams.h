// Contexts, streams and events of the fake driver. None is ever deleted: what is used after it was
// destroyed is recognized.

#ifndef JAXOFFLOAD_FAKES_FAKE_STREAMS_H_
#define JAXOFFLOAD_FAKES_FAKE_STREAMS_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

#include "fake_cuda.h"

namespace fake_cuda {

class Stream;

struct Context {
  int device = 0;
  std::atomic<bool> is_retained{false};
  // The first error of work that was under way; every later call on the context returns it.
  std::atomic<int> lost{0};
};

// Does its work in order, on a thread of its own, late, and of no other stream's order.
class Stream {
 public:
  explicit Stream(Context* context);
  Context* context() const { return context_; }
  // The work's number. It is done some time, or under FAKE_CUDA_HOLD when it is waited for.
  uint64_t Add(std::function<void()> work);
  void Await(uint64_t number);
  void AwaitAll();
  // The thread ends with the work that there is.
  void Destroy();

 private:
  struct Work {
    std::function<void()> run;
    bool is_held;
    int delay_us;
  };
  void Main();

  Context* const context_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> work_;
  uint64_t added_ = 0;
  uint64_t asked_ = 0;  // up to here it is waited for
  uint64_t done_ = 0;
  bool is_destroyed_ = false;
  uint64_t random_;
};

struct Event {
  explicit Event(Context* c) : context(c) {}
  Context* const context;
  std::mutex mutex;
  // What it was recorded behind last; null: it never was.
  Stream* stream = nullptr;
  uint64_t number = 0;
};

Context* ContextOf(int device);
// Null for what is no context that somebody has retained.
Context* FindContext(void* handle);
Context*& Current();

// Handles that are alive. Find returns null for another kind, and for what was destroyed.
Stream* NewStream(Context* context);
Event* NewEvent(Context* context);
Stream* FindStream(void* handle);
Event* FindEvent(void* handle);
void Destroy(Stream* stream);
void Destroy(Event* event);
std::vector<Stream*> StreamsOf(const Context* context);
int64_t NumLiveHandles();

Stream& ComputeStream(int device);

}  // namespace fake_cuda

#endif  // JAXOFFLOAD_FAKES_FAKE_STREAMS_H_

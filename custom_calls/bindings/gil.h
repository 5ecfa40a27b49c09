// Letting the GIL go and taking it, also while the interpreter ends.

#ifndef JAXOFFLOAD_BINDINGS_GIL_H_
#define JAXOFFLOAD_BINDINGS_GIL_H_

#include <Python.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace jaxoffload {

// Until Python 3.14 a daemon thread that asks for the GIL while the interpreter ends is unwound by
// force, which C++ answers by ending the process. So once the end has begun, threads that come
// back from work without the GIL stay away for good; those already past that gate are waited for.
inline struct ExitState {
  std::atomic<bool> exiting{false};
  std::atomic<int> num_returning{0};
  std::thread::id thread;  // the one that ends the interpreter; written before `exiting`
} exit_state;

// Lets go of the GIL for a scope.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    ++exit_state.num_returning;
    if (exit_state.exiting && std::this_thread::get_id() != exit_state.thread) {
      --exit_state.num_returning;
      for (;;) pause();
    }
    PyEval_RestoreThread(state_);
    --exit_state.num_returning;
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

// Holds the GIL for a scope of a thread that Python may not know.
class WithGil {
 public:
  WithGil() {
    ++exit_state.num_returning;
    held_ = !exit_state.exiting;
    if (held_) state_ = PyGILState_Ensure();
    --exit_state.num_returning;
  }
  ~WithGil() {
    if (held_) PyGILState_Release(state_);
  }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

  // False once the interpreter has begun to end.
  bool held() const { return held_; }

 private:
  bool held_;
  PyGILState_STATE state_;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_BINDINGS_GIL_H_

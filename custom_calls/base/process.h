// Which process this is. A forked child has the memory of the process that it was forked off, and
// its files, but none of its threads; what was made there may not be used here without care.

#ifndef JAXOFFLOAD_BASE_PROCESS_H_
#define JAXOFFLOAD_BASE_PROCESS_H_

#include <sys/types.h>
#include <unistd.h>

#include <stdexcept>

namespace jaxoffload {

// The process in which an object was made.
class HomeProcess {
 public:
  // Whether the caller is in a child that was forked off it.
  bool IsForked() const { return getpid() != pid_; }
  // Throws std::runtime_error there.
  void CheckNotForked() const {
    if (!IsForked()) return;
    throw std::runtime_error(
        "jaxoffload was used before this process was forked, and its threads do not survive a "
        "fork. Start processes with multiprocessing's 'spawn' or 'forkserver' method.");
  }
  pid_t pid() const { return pid_; }

 private:
  const pid_t pid_ = getpid();
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_BASE_PROCESS_H_

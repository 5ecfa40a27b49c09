// What a forked child does: see base/process.h.

#ifndef JAXOFFLOAD_TESTS_FORK_H_
#define JAXOFFLOAD_TESTS_FORK_H_

#include <sys/wait.h>
#include <unistd.h>

#include "tests/check.h"

namespace jaxoffload::testing {

// Runs `body` in a forked child, whose checks must hold and which must come to its end.
template <typename F>
void MustPassInChild(F&& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // where a wait for a thread that is not there would last for ever
    body();
    _exit(0);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(WIFSIGNALED(status) ? WTERMSIG(status) : 0, 0);
  CHECK_EQ(WEXITSTATUS(status), 0);
}

}  // namespace jaxoffload::testing

#endif  // JAXOFFLOAD_TESTS_FORK_H_

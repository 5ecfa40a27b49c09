// Memory that runs out on one thread, for what must not need any.

#ifndef JAXOFFLOAD_TESTS_NO_MEMORY_H_
#define JAXOFFLOAD_TESTS_NO_MEMORY_H_

namespace jaxoffload::testing {

// While it is true, operator new throws std::bad_alloc on this thread (main.cc).
extern thread_local bool no_memory;

}  // namespace jaxoffload::testing

#endif  // JAXOFFLOAD_TESTS_NO_MEMORY_H_

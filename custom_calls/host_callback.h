// "jaxoffload_callback": a vertex that calls back into Python, as a custom call of the CPU plugin.
// Nothing here knows Python; bindings/ says what is called.

#ifndef JAXOFFLOAD_HOST_CALLBACK_H_
#define JAXOFFLOAD_HOST_CALLBACK_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace jaxoffload {

struct HostView {
  char* data;
  int64_t bytes;
};

// Calls what has a number; returns what went wrong, or "". Any thread, several at once; must not
// throw.
using HostCallback = std::function<std::string(
    int64_t number, const std::vector<HostView>& operands, const std::vector<HostView>& results)>;

// Once, before any program with such a call runs.
void SetHostCallback(HostCallback callback);

void* HostCallbackHandler();  // XLA_FFI_Handler*

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_HOST_CALLBACK_H_

// The XLA FFI handlers of "jaxoffload_run", by platform.

#ifndef JAXOFFLOAD_FFI_H_
#define JAXOFFLOAD_FFI_H_

#include <string>
#include <utility>
#include <vector>

namespace jaxoffload {

// Platform, as XLA calls it, and XLA_FFI_Handler* of each.
std::vector<std::pair<std::string, void*>> FfiHandlers();

// (major, minor) of the FFI headers that this was built with.
std::pair<int, int> FfiApiVersion();

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_FFI_H_

// The XLA FFI handlers of "jaxoffload_run", by platform.

#ifndef JAXOFFLOAD_FFI_H_
#define JAXOFFLOAD_FFI_H_

#include <string>
#include <utility>
#include <vector>

namespace jaxoffload {

struct FfiTarget {
  std::string platform;   // as XLA calls it
  void* instantiate;      // XLA_FFI_Handler*
  void* execute;          // XLA_FFI_Handler*
  void* type_id;          // XLA_FFI_TypeId* of what instantiation makes
  const void* type_info;  // XLA_FFI_TypeInfo* of it
};
std::vector<FfiTarget> FfiTargets();

// XLA_FFI_Handler* of "jaxoffload_stamps", on CPU: of some operands, that are not read, the first
// of as many new stamps, uint32[2], the lower half first. A loop asks for those of what it does not
// change, and its calls know by them that it is the same in every iteration.
void* StampsHandler();

// Says how a thread is known on which programs are called, and which is not XLA's. Once, before any
// program runs.
void SetIsCallersThread(bool (*is_callers)());

// (major, minor) of the FFI headers that this was built with.
std::pair<int, int> FfiApiVersion();

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_FFI_H_

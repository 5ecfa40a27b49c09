// Makes jaxlib's FFI handlers (LAPACK, for one) usable by the plugin.
//
// The FFI registry is per library: what jaxlib has registered for its own client the plugin does
// not know. The plugin takes handlers through its FFI extension, but only if their FFI API is not
// newer than its own, and refuses others in silence: compiling then fails with "No FFI handler
// registered". jaxlib 0.10's handlers are newer (0.3) and use nothing of the news, so each gets a
// trampoline: a function that forwards the call frame and, in the answer to XLA's question about
// the handler's version, lowers the minor version to one that every plugin takes.

#ifndef JAXOFFLOAD_PJRT_FFI_TRAMPOLINES_H_
#define JAXOFFLOAD_PJRT_FFI_TRAMPOLINES_H_

#include <string>

#include "pjrt/api.h"

namespace jaxoffload {

// Trampolines in the table: handlers that one process can register. jaxlib 0.10 has 61.
constexpr int kNumTrampolines = 512;

// Registers an XLA_FFI_Handler* under a target name on the platform "Host". A name that this
// process has registered already is left alone. Throws std::runtime_error: the plugin has no FFI
// extension, or the table is full.
void RegisterFfiHandler(const PJRT_Api* api, const std::string& name, void* handler);

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PJRT_FFI_TRAMPOLINES_H_

// The XLA FFI handler of "jaxoffload_run_devices": one run of a plan for several CPU devices,
// called by the programs of all of them.

#ifndef JAXOFFLOAD_FFI_DEVICES_H_
#define JAXOFFLOAD_FFI_DEVICES_H_

#include "ffi.h"

namespace jaxoffload {

FfiTarget DevicesTarget();

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_FFI_DEVICES_H_

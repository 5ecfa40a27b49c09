// How a custom call's run is launched: the attribute "launch" of the calls, a dictionary.

#ifndef JAXOFFLOAD_LAUNCH_ATTRIBUTE_H_
#define JAXOFFLOAD_LAUNCH_ATTRIBUTE_H_

#include <cstdint>

#include "launcher/policy.h"
#include "launcher/run_options.h"
#include "xla/ffi/api/ffi.h"

namespace jaxoffload {

struct LaunchAttribute {
  int64_t policy;
  int64_t seed;
  int64_t max_delay_us;
  int64_t check;

  // Throws std::invalid_argument: no policy has that number.
  RunOptions Options() const {
    RunOptions options;
    options.policy = PolicyOf(policy);
    options.seed = static_cast<uint64_t>(seed);
    options.max_delay_us = max_delay_us;
    options.check = check != 0;
    return options;
  }
};

}  // namespace jaxoffload

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxoffload::LaunchAttribute,
                                      xla::ffi::StructMember<int64_t>("policy"),
                                      xla::ffi::StructMember<int64_t>("seed"),
                                      xla::ffi::StructMember<int64_t>("max_delay_us"),
                                      xla::ffi::StructMember<int64_t>("check"));

#endif  // JAXOFFLOAD_LAUNCH_ATTRIBUTE_H_

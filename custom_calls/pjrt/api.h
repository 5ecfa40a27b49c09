// The PJRT C API of one plugin: loaded with dlopen, its errors as exceptions, its objects with
// owners. The only place that knows how to call it; the structs are those of pjrt_c_api.h.

#ifndef JAXOFFLOAD_PJRT_API_H_
#define JAXOFFLOAD_PJRT_API_H_

#include <cstring>
#include <string>

#include "pjrt_c_api.h"

namespace jaxoffload {

// A zeroed argument struct of a C API function, as the API wants it.
#define JO_PJRT_ARGS(function, name)   \
  function##_Args name;                \
  std::memset(&name, 0, sizeof(name)); \
  name.struct_size = function##_Args_STRUCT_SIZE

// Loads a plugin once a process and returns its function table, which is never unloaded: XLA's
// threads and static objects do not survive a dlclose. Throws std::runtime_error.
const PJRT_Api* LoadPlugin(const std::string& path);

// The table of a plugin that somebody else loaded and initialized. Throws std::runtime_error.
const PJRT_Api* FindPlugin(const std::string& path);

// The text of an error, which it destroys.
std::string TakeMessage(const PJRT_Api* api, PJRT_Error* error);

// Throws std::runtime_error("<doing>: <XLA's message>") if there is an error.
void Check(const PJRT_Api* api, PJRT_Error* error, const char* doing);

// Waits for an event, and destroys it. Returns its error, null for none.
PJRT_Error* AwaitAndDestroy(const PJRT_Api* api, PJRT_Event* event);

void DestroyBuffer(const PJRT_Api* api, PJRT_Buffer* buffer);

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PJRT_API_H_

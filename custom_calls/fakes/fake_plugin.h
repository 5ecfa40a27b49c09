// What the two halves of the fake plugin share: buffers, events and executions are in one each.

#ifndef JAXOFFLOAD_FAKES_FAKE_PLUGIN_H_
#define JAXOFFLOAD_FAKES_FAKE_PLUGIN_H_

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "pjrt_c_api.h"

namespace fake_plugin {

#define REAL_ARGS(function, name)      \
  function##_Args name;                \
  std::memset(&name, 0, sizeof(name)); \
  name.struct_size = function##_Args_STRUCT_SIZE

// XLA's CPU plugin, and its client.
extern const PJRT_Api* real;
extern PJRT_Client* client;
extern std::vector<PJRT_Device*> devices;
int IndexOf(const PJRT_Device* device);

PJRT_Error* NewError(std::string text, PJRT_Error_Code code);
// An error of the CPU plugin's, which is destroyed, as one of this one's, or as its text.
PJRT_Error* Translate(PJRT_Error* error);
std::string TakeText(PJRT_Error* error);
// An error that no caller who keeps to the rules sees.
PJRT_Error* RefuseCall(const std::string& what);

// The end of an execution: the number of the compute stream's work.
struct End {
  void Set(std::string failure);
  std::mutex mutex;
  std::condition_variable changed;
  int device = 0;
  uint64_t number = 0;
  bool is_set = false;
  std::string failure;  // empty: it did not fail
};
PJRT_Event* NewEvent(std::shared_ptr<End> end);

struct Buffer {
  char* address = nullptr;
  PJRT_Buffer_Type type = PJRT_Buffer_Type_INVALID;
  std::vector<int64_t> dims;
  int device = 0;
  std::shared_ptr<char> memory;  // null: somebody else's
  bool is_donated = false;
};
size_t Bytes(PJRT_Buffer_Type type, const std::vector<int64_t>& dims);
bool TakeMemory(Buffer* buffer);
PJRT_Buffer* NewBuffer(Buffer buffer);
// Null for one that was destroyed.
Buffer* FindBuffer(PJRT_Buffer* buffer);

// What takes the place of XLA's own functions.
PJRT_Error* Execute(PJRT_LoadedExecutable_Execute_Args* args);
PJRT_Error* ExecutableDestroy(PJRT_LoadedExecutable_Destroy_Args* args);

}  // namespace fake_plugin

#endif  // JAXOFFLOAD_FAKES_FAKE_PLUGIN_H_

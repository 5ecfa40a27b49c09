// Where the programs of several devices meet before a run of all: each brings the addresses of what
// it has of arguments and results, the last one starts the run.
//
// No thread waits for another device: whoever comes is told of the end by its `End`. Where one
// device's program fails before it comes here, nobody says so to the others; a thread that looks
// after all meetings ends them with an error once nobody has come for as long as they may wait.

#ifndef JAXOFFLOAD_LAUNCHER_MEETINGS_H_
#define JAXOFFLOAD_LAUNCHER_MEETINGS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"

namespace jaxoffload {

class Meetings : public std::enable_shared_from_this<Meetings> {
 public:
  // Is told once, on any thread, "" or what went wrong.
  using End = std::function<void(const std::string& error)>;

  // What all devices brought: number `i` of device `rank` is `i * num_devices + rank`.
  struct Whole {
    std::vector<char*> arguments;
    std::vector<char*> results;
    std::vector<End> ends;
  };

  // argument_bytes, result_bytes: of all devices, as in `Whole`.
  // patience_ms: how long a meeting waits after whoever came last.
  static std::shared_ptr<Meetings> Make(int32_t num_devices, std::vector<int64_t> argument_bytes,
                                        std::vector<int64_t> result_bytes, int64_t patience_ms);

  struct Part {
    char* address;
    int64_t bytes;
  };
  // A device comes to a meeting. The last one is given what all brought, others nothing. Where what
  // it brings is not as planned, or others have given up on it, `end` of everybody there is told.
  std::optional<Whole> Come(int64_t run_id, int32_t rank, const std::vector<Part>& arguments,
                            const std::vector<Part>& results, End end);

  int32_t num_waiting() const;  // meetings that are not whole

 private:
  friend class Watch;
  struct Meeting {
    Whole brought;
    std::vector<bool> has_come;
    int64_t waited_ms = 0;
    std::string error;  // everybody who comes is told
  };

  Meetings(int32_t num_devices, std::vector<int64_t> argument_bytes,
           std::vector<int64_t> result_bytes, int64_t patience_ms);
  void Place(const std::vector<Part>& parts, int32_t rank, const std::vector<int64_t>& planned,
             const char* what, std::vector<char*>& all) const;
  // Time has passed; whether anybody still waits.
  bool Pass(int64_t ms);

  const int32_t num_devices_;
  const std::vector<int64_t> argument_bytes_, result_bytes_;
  const int64_t patience_ms_;
  mutable Mutex mutex_;
  std::map<int64_t, Meeting> meetings_ GUARDED_BY(mutex_);  // by run_id
  bool is_watched_ GUARDED_BY(mutex_) = false;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_LAUNCHER_MEETINGS_H_

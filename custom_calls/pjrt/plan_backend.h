// Runs the vertices of one plan on a PJRT client: kernels by PJRT_LoadedExecutable_Execute into
// places of our choice, copies by the platform (platform.h).
//
// **How XLA writes where the plan says.** A kernel is compiled as f(*inputs, *places): `places` are
// dummies for the outputs that do not overwrite an input, donated, as the overwritten inputs are.
// XLA writes each output into the memory of the parameter that it aliases. The platform makes a
// buffer over memory of ours that may be donated; what Execute returns is again a buffer over that
// memory, and is kept to be donated the next time.
//
// **Slots.** A slot holds the buffer over one place, made when first needed and used from then on.
// Versions that have the same place and shape share one: a plan that is free of races never uses
// them at the same time. Places in the caller's arrays move from run to run; their slots are made
// anew when the address differs. A donated argument and its result have one place. To make a buffer
// takes as long as to copy many KiB, so small ones that are not donated have a place of the
// plan's own that stays (`is_kept`): arguments are copied there when a run begins, results from
// there when they are written.
//
// **When XLA does not write in place** (it refused the alias, or the address is not aligned to 64
// bytes) the output is copied to its place and counted in RunContext::copied_outputs. That is
// looked at after every execution: XLA decides anew each time.
//
// **Under way.** On a platform with a window, Execute leaves a kernel on XLA's compute stream, and
// Await waits for the event that XLA gave for it, which also tells whether it failed.

#ifndef JAXOFFLOAD_PJRT_PLAN_BACKEND_H_
#define JAXOFFLOAD_PJRT_PLAN_BACKEND_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/patience.h"
#include "launcher/backend.h"
#include "pjrt/client.h"
#include "pjrt/plan_residents.h"
#include "plan/loaded_plan.h"
#include "tiers/disk_engine.h"

namespace jaxoffload {

class PlanBackend : public Backend {
 public:
  // Throws std::invalid_argument if the plan does not fit the executables, std::runtime_error if
  // an arena cannot grow to the plan's size.
  PlanBackend(std::shared_ptr<Client> client, std::shared_ptr<const LoadedPlan> plan,
              std::vector<std::shared_ptr<Executable>> executables,
              std::shared_ptr<DiskExtent> disk);
  ~PlanBackend() override;
  PlanBackend(const PlanBackend&) = delete;
  PlanBackend& operator=(const PlanBackend&) = delete;

  char* DeviceBase(int32_t device) override { return platform_.ArenaBase(device); }
  char* HostBase() override { return host_; }
  char* DiskBase() override { return disk_ == nullptr ? nullptr : disk_->tag(); }
  void Begin(RunContext& context) override;
  bool Execute(int32_t vertex_id, RunContext& context, std::string* error) override;
  bool IsQuick(int32_t vertex_id) const override;
  bool Await(int32_t vertex_id, RunContext& context, std::string* error) override;
  bool IsInOrder(int32_t lane) const override;
  void End(RunContext& context) override;

  // What is on the devices now of what its runs have left there: parts of arguments, and bytes.
  std::vector<std::pair<int32_t, int64_t>> residents() const { return residents_.List(); }
  // Forgets it. If nothing else is there, gives the arenas' memory back, once no run is active.
  void Release();

 private:
  // Whose memory a slot is in, and so when its address is known.
  enum class Owner { kArena, kHostTier, kCaller };
  struct Slot {
    PJRT_Buffer* buffer = nullptr;
    char* address = nullptr;
    int32_t version = -1;  // one of those that share it: for dtype and dims
    int32_t device = 0;    // or `host_device`
    Owner owner = Owner::kArena;
    // The place is not aligned: `address` is a place of the host tier, freed in End.
    bool is_scratch = false;
    bool is_kept = false;  // see above
  };
  // A kernel vertex, ready to be executed; ranges are of the flat arrays below.
  struct Call {
    Client* client = nullptr;  // of its buffers, too
    PJRT_LoadedExecutable* executable = nullptr;
    PJRT_Device* device = nullptr;  // null: the one that it was compiled for
    Range parameters{0, 0};
    Range outputs{0, 0};
    Patience patience;  // for its end: XLA executes it on a thread of its own
  };

  void AddCall(int32_t vertex_id);
  void CheckOutput(int32_t vertex_id, int64_t position, int32_t version_id) const;
  // Stands for the device of the host's kernels, which may be another client's.
  int32_t host_device() const { return client_->num_devices(); }
  Client& client_of(int32_t device) const {
    return device == host_device() ? *client_->host() : *client_;
  }
  int32_t SlotOf(int32_t version_id, int32_t device);
  int32_t DonatedArgumentOf(int32_t version_id) const;
  void CheckPlace(int32_t version_id, int32_t device) const;
  bool IsForBoth(int32_t version_id) const;
  bool MayBeKept(const Slot& slot) const;
  void KeepSmallSlots();
  // The caller's place of a slot.
  char* PlaceOf(const Slot& slot, const RunContext& context) const;
  void FillKept(RunContext& context);
  void TakeFromKept(int64_t output, RunContext& context);
  PJRT_Error* Import(Slot& slot);
  void Drop(Slot& slot);
  void BindArenas();
  void MoveTo(Slot& slot, char* base);
  void PlaceSlot(Slot& slot, char* place, RunContext& context);
  // Whether what an idle vertex would bring is what is there, as far as that is seen.
  bool IsThere(int32_t vertex_id, const RunContext& context, std::string* error) const;
  const DiskSource& SourceOf(int32_t version, const RunContext& context) const;
  bool MoveRows(int32_t vertex_id, RunContext& context, std::string* error);
  bool ExecuteLoad(int32_t from, int32_t to, RunContext& context, std::string* error);
  bool ExecuteStore(int32_t from, int32_t to, RunContext& context, std::string* error);
  bool ExecuteKernel(int32_t vertex_id, RunContext& context, std::string* error);
  // Of a platform without a window.
  static PJRT_Error* AwaitKernel(Call& call, std::chrono::steady_clock::time_point& last,
                                 PJRT_Event* complete);
  // Takes the outputs of an execution into their slots. False, with *error set, on failure.
  // `complete` is its end, null when that has passed; waited for if an output must be copied.
  bool TakeOutputs(const Call& call, PJRT_Event** complete, RunContext& context,
                   std::string* error);
  void CopyMisplaced(const Call& call, const std::vector<char*>& found, RunContext& context);
  void DropDonated(const Call& call);

  const std::shared_ptr<Client> client_;
  Platform& platform_;
  const PJRT_Api* const api_;
  const std::shared_ptr<const LoadedPlan> plan_;
  const std::vector<std::shared_ptr<Executable>> executables_;
  const std::shared_ptr<DiskExtent> disk_;
  PlanResidents residents_;
  PJRT_ExecuteOptions execute_options_;
  char* host_ = nullptr;          // the plan's part of the host block, during a run
  alignas(64) char nowhere_[64];  // where an empty array of the host's kernels is
  bool uses_disk_ = false;
  std::unique_ptr<FixedMemory> fixed_;

  // Of slots in arenas and donated arguments: device, argument or -1, offset, dtype, dims. Empty
  // after construction.
  std::map<std::tuple<int32_t, int32_t, int64_t, int32_t, std::vector<int64_t>>, int32_t>
      slot_of_place_;
  std::vector<Slot> slots_;
  std::vector<int32_t> slot_of_version_;       // for kernels of devices
  std::vector<int32_t> host_slot_of_version_;  // for the host's, which run at the same time
  std::vector<int32_t> movable_slots_;         // those in the caller's arrays
  std::vector<int32_t> kept_arguments_;        // those copied from there
  std::unique_ptr<char[]> kept_;
  std::vector<Call> calls_;  // by vertex
  std::vector<int32_t> parameter_slot_;
  std::vector<PJRT_Buffer*> parameters_;  // written before each execution, by the lane's thread
  std::vector<int32_t> output_slot_;
  std::vector<int32_t> donor_slot_;  // whose buffer each output takes over
  std::vector<int32_t> output_version_;
  std::vector<PJRT_Buffer*> outputs_;

  std::vector<std::chrono::steady_clock::time_point> kernel_end_;  // of the last one, by lane

  // On a platform with a window: the ends of kernels that are under way, by vertex. Written by the
  // lane's thread before the vertex goes to its awaiter.
  std::vector<PJRT_Event*> complete_;
  // A kernel that was under way has failed, so that buffers over its outputs are of no use.
  std::atomic<bool> has_bad_slots_{false};
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PJRT_PLAN_BACKEND_H_

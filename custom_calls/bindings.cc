// Python's view: arrays in, exceptions out, and the GIL let go around everything that can wait.
// Nothing here is on a hot path (nanobind compiles it for size). Documented in
// jaxoffload/_native.pyi.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "cuda/driver.h"
#include "ffi.h"
#include "host_callback.h"
#include "pjrt/client.h"
#include "pjrt/plan.h"
#include "planner/order_check.h"
#include "planner/place_intervals.h"
#include "tiers/disk_store.h"
#include "tiers/host_block.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace jaxoffload {
namespace {

// Until Python 3.14 a daemon thread that asks for the GIL while the interpreter ends is unwound by
// force, which C++ answers by ending the process. So once the end has begun, threads that come
// back from work without the GIL stay away for good; those already past that gate are waited for.
struct ExitState {
  std::atomic<bool> exiting{false};
  std::atomic<int> num_returning{0};
  std::thread::id thread;  // the one that ends the interpreter; written before `exiting`
} exit_state;

// Lets go of the GIL for a scope.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    ++exit_state.num_returning;
    if (exit_state.exiting && std::this_thread::get_id() != exit_state.thread) {
      --exit_state.num_returning;
      for (;;) pause();
    }
    PyEval_RestoreThread(state_);
    --exit_state.num_returning;
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

// Holds the GIL for a scope of a thread that Python may not know.
class WithGil {
 public:
  WithGil() {
    ++exit_state.num_returning;
    held_ = !exit_state.exiting;
    if (held_) state_ = PyGILState_Ensure();
    --exit_state.num_returning;
  }
  ~WithGil() {
    if (held_) PyGILState_Release(state_);
  }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

  // False once the interpreter has begun to end.
  bool held() const { return held_; }

 private:
  bool held_;
  PyGILState_STATE state_;
};

template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::vector<T> ToVector(const Array<T>& array) {
  return std::vector<T>(array.data(), array.data() + array.size());
}

// A read-only view of an array that the report owns.
template <typename T>
nb::object View(nb::handle owner, const std::vector<T>& values) {
  return nb::cast(
      nb::ndarray<nb::numpy, const T, nb::ndim<1>>(values.data(), {values.size()}, owner));
}

// An array that owns its values.
template <typename T>
nb::object Owned(std::vector<T> values) {
  auto kept = std::make_unique<std::vector<T>>(std::move(values));
  const nb::capsule owner(kept.get(), [](void* p) noexcept {
    std::unique_ptr<std::vector<T>>(static_cast<std::vector<T>*>(p));
  });
  return View(owner, *kept.release());
}

template <typename T, typename... Others>
void RequireEqualSizes(const char* what, const Array<T>& first, const Array<Others>&... others) {
  if (((others.size() == first.size()) && ...)) return;
  throw std::invalid_argument(std::string(what) + ": the arrays differ in length");
}

// Memory of the host tier with an address that numpy can look at.
class HostBuffer {
 public:
  explicit HostBuffer(int64_t bytes) : bytes_(bytes) {
    if (bytes < 0) {
      throw std::invalid_argument("HostBuffer: nbytes=" + std::to_string(bytes) + " is negative");
    }
    data_.reset(HostBlock::Global().Allocate(bytes),
                [](char* data) { HostBlock::Global().Free(data); });
  }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  // Of the memory, which runs hold beside Python's object, so that they never need the GIL.
  const std::shared_ptr<char>& data() const { return data_; }
  uintptr_t address() const { return reinterpret_cast<uintptr_t>(data_.get()); }
  int64_t bytes() const { return bytes_; }

 private:
  const int64_t bytes_;
  std::shared_ptr<char> data_;
};

nb::list Words(const std::vector<HostView>& views) {
  static char nothing[1];  // where there are no bytes, for which XLA may give no address
  // Without an owner nanobind would copy them.
  const nb::capsule owner(nothing, [](void*) noexcept {});
  nb::list found;
  for (const HostView& view : views) {
    char* const data = view.bytes == 0 ? nothing : view.data;
    found.append(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(
        reinterpret_cast<uint8_t*>(data), {static_cast<size_t>(view.bytes)}, owner));
  }
  return found;
}

// Has programs' callbacks call `function(number, operands, results)`, which gets their bytes for as
// long as it runs, and returns what went wrong, or "".
void CallBack(nb::callable function) {
  // Never released: threads may call it until the process ends.
  SetHostCallback([function = function.release()](int64_t number,
                                                  const std::vector<HostView>& operands,
                                                  const std::vector<HostView>& results) {
    const WithGil gil;
    if (!gil.held()) return std::string("the interpreter is ending");
    try {
      return nb::cast<std::string>(function(number, Words(operands), Words(results)));
    } catch (const std::exception& e) {
      return std::string(e.what());
    }
  });
}

// For classes that a function makes (nb::new_): object.__new__ would make one with nothing in it,
// on which nanobind ends the process. It alone asks the type for memory.
PyObject* RefuseToAllocate(PyTypeObject* type, Py_ssize_t) {
  PyErr_Format(PyExc_TypeError, "object.__new__(%s) is not safe, call %s()", type->tp_name,
               type->tp_name);
  return nullptr;
}

PyType_Slot only_made[] = {{Py_tp_alloc, reinterpret_cast<void*>(&RefuseToAllocate)}, {0, nullptr}};

// Clients that exist, for the end of the interpreter.
struct Clients {
  Mutex mutex;
  std::vector<std::weak_ptr<Client>> list GUARDED_BY(mutex);
};

Clients& AllClients() {
  static Clients* const clients = new Clients;
  return *clients;
}

std::shared_ptr<Client> Remember(std::shared_ptr<Client> client) {
  Clients& clients = AllClients();
  MutexLock lock(clients.mutex);
  auto& list = clients.list;
  list.erase(std::remove_if(list.begin(), list.end(), [](const auto& c) { return c.expired(); }),
             list.end());
  list.push_back(client);
  return client;
}

std::shared_ptr<Client> NewClient(const std::string& plugin_path, int32_t num_devices) {
  return Remember(Client::Create(plugin_path, num_devices));
}

std::shared_ptr<Client> AdoptClient(const std::string& plugin_path, uintptr_t client,
                                    std::vector<int32_t> ordinals, const std::string& driver_path) {
  return Remember(Client::Adopt(plugin_path, reinterpret_cast<PJRT_Client*>(client),
                                std::move(ordinals), driver_path));
}

// Called by Python's atexit: no lane may be running when static objects of XLA are destroyed, and
// no thread may be about to ask for the GIL when the interpreter goes away.
void ShutdownClients() {
  const WithoutGil without_gil;
  DiskStore::KeepBytes();
  exit_state.thread = std::this_thread::get_id();
  exit_state.exiting = true;
  std::vector<std::shared_ptr<Client>> alive;
  {
    Clients& clients = AllClients();
    MutexLock lock(clients.mutex);
    for (const std::weak_ptr<Client>& each : clients.list) {
      if (std::shared_ptr<Client> client = each.lock()) alive.push_back(std::move(client));
    }
  }
  for (const std::shared_ptr<Client>& client : alive) client->Shutdown();
  // Bounded, for such a thread may be behind one that never lets go of the GIL.
  for (int i = 0; i < 2000 && exit_state.num_returning > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

RunOptions MakeOptions(int32_t policy, uint64_t seed, int64_t max_delay_us, bool check) {
  if (policy < 0 || policy > 2) {
    throw std::invalid_argument("run: policy=" + std::to_string(policy) +
                                " is unknown. Use 0 (work conserving), 1 (fixed) or 2 (random).");
  }
  constexpr int64_t kHour = int64_t{3600} * 1000000;
  if (max_delay_us < 0 || max_delay_us > kHour) {
    throw std::invalid_argument("run: max_delay_us=" + std::to_string(max_delay_us) +
                                " is not between 0 and an hour.");
  }
  RunOptions options;
  options.policy = static_cast<Policy>(policy);
  options.seed = seed;
  options.max_delay_us = max_delay_us;
  options.check = check;
  return options;
}

// An entry is an address whose memory the caller keeps, a HostBuffer, or for what is on disk a
// `Source`.
template <typename Source>
struct Places {
  explicit Places(const std::vector<nb::object>& entries) {
    for (const nb::object& entry : entries) {
      std::shared_ptr<Source> source;
      if (nb::isinstance<Source>(entry)) {
        source = nb::cast<std::shared_ptr<Source>>(entry);
        addresses.push_back(source->tag());
      } else if (nb::isinstance<HostBuffer>(entry)) {
        owners.push_back(nb::cast<HostBuffer&>(entry).data());
        addresses.push_back(static_cast<char*>(owners.back().get()));
      } else {
        addresses.push_back(reinterpret_cast<char*>(nb::cast<uintptr_t>(entry)));
      }
      sources.push_back(std::move(source));
    }
  }

  std::vector<char*> addresses;
  std::vector<std::shared_ptr<Source>> sources;
  std::vector<std::shared_ptr<void>> owners;
};

unsigned long main_thread = 0;  // Python's identifier of it

// Waits with the GIL released, and takes it now and then to see whether the user pressed Ctrl-C.
// `ended`, if any, is called with the report however the run has ended.
std::shared_ptr<const RunReport> RunAndWait(Plan& plan, const std::vector<nb::object>& arguments,
                                            const std::vector<nb::object>& results, int32_t policy,
                                            uint64_t seed, int64_t max_delay_us, bool check,
                                            const nb::object& ended) {
  const RunOptions options = MakeOptions(policy, seed, max_delay_us, check);
  const Places<DiskSource> from(arguments);
  const Places<DiskExtent> to(results);
  std::vector<std::shared_ptr<void>> owners = from.owners;
  owners.insert(owners.end(), to.owners.begin(), to.owners.end());
  // Signals are Python's main thread's business; others need not wake up for them.
  const bool is_main = PyThread_get_thread_ident() == main_thread;
  bool interrupted = false;
  std::shared_ptr<Run> run;
  {
    const WithoutGil without_gil;
    run = plan.Submit(from.addresses, to.addresses, options, nullptr, from.sources, to.sources,
                      std::move(owners));
    while (!interrupted && !run->WaitFor(std::chrono::milliseconds(50))) {
      if (!is_main) continue;
      nb::gil_scoped_acquire acquire;
      interrupted = PyErr_CheckSignals() != 0;
    }
    if (interrupted) {
      run->Cancel();
      run->Wait();
    }
    plan.set_last_report(run->report());
  }
  std::optional<nb::python_error> interruption;
  if (interrupted) interruption.emplace();  // takes what is pending, so that Python can be called
  if (!ended.is_none()) ended(std::const_pointer_cast<RunReport>(run->report()));
  if (interruption) throw *interruption;
  return run->report();
}

void BindClient(nb::module_& m) {
  nb::class_<Client>(m, "Client", nb::is_weak_referenceable(), nb::type_slots(only_made))
      .def(nb::new_(&NewClient), "plugin_path"_a, "num_devices"_a = 1, nb::call_guard<WithoutGil>())
      .def_static("adopt", &AdoptClient, "plugin_path"_a, "client"_a, "ordinals"_a,
                  "driver_path"_a = "", nb::call_guard<WithoutGil>())
      .def_prop_ro("platform_name", &Client::platform_name)
      .def_prop_ro("platform_version", &Client::platform_version)
      .def_prop_ro("num_devices", &Client::num_devices)
      .def_prop_ro("attributes",
                   [](const Client& client) {
                     nb::dict found;
                     for (const auto& [name, value] : client.attributes()) {
                       found[name.c_str()] = nb::cast(value);
                     }
                     return found;
                   })
      .def(
          "compile",
          [](Client& client, const nb::bytes& code, const nb::bytes& options) {
            const std::string code_text(code.c_str(), code.size());
            const std::string options_text(options.c_str(), options.size());
            const WithoutGil without_gil;
            return client.Compile(code_text, options_text);
          },
          "code"_a, "options"_a)
      .def(
          "adopt_executable",
          [](Client& client, uintptr_t executable, const nb::object& /*owner*/) {
            return client.AdoptExecutable(reinterpret_cast<PJRT_LoadedExecutable*>(executable));
          },
          "executable"_a, "owner"_a, nb::keep_alive<0, 3>())
      .def(
          "register_ffi_handlers",
          [](Client& client, const std::vector<std::pair<std::string, nb::capsule>>& handlers) {
            std::vector<std::pair<std::string, void*>> pointers;
            for (const auto& [name, capsule] : handlers) {
              pointers.emplace_back(name, capsule.data());
            }
            client.RegisterFfiHandlers(pointers);
          },
          "handlers"_a)
      .def("trim", &Client::Trim, nb::call_guard<WithoutGil>())
      .def(
          "throttle_copies",
          [](Client& client, int64_t bytes_per_second) {
            if (bytes_per_second < 0) throw std::invalid_argument("bytes_per_second is negative");
            return client.platform().Throttle(bytes_per_second);
          },
          "bytes_per_second"_a)
      .def(
          "arena_bytes",
          [](Client& client, int32_t device) {
            if (device < 0 || device >= client.num_devices()) {
              throw std::invalid_argument("arena_bytes: no device " + std::to_string(device));
            }
            return client.platform().leased_bytes(device);
          },
          "device"_a = 0)
      .def(
          "arena_resident_bytes",
          [](Client& client, int32_t device) {
            if (device < 0 || device >= client.num_devices()) {
              throw std::invalid_argument("arena_resident_bytes: no device " +
                                          std::to_string(device));
            }
            return client.platform().resident_bytes(device);
          },
          "device"_a = 0);

  nb::class_<Executable>(m, "Executable", nb::is_weak_referenceable())
      .def_prop_ro("num_outputs", &Executable::num_outputs)
      .def_prop_ro("temp_bytes", &Executable::temp_bytes)
      .def_prop_ro("argument_bytes", &Executable::argument_bytes)
      .def_prop_ro("output_bytes", &Executable::output_bytes)
      .def_prop_ro("alias_bytes", &Executable::alias_bytes)
      .def_prop_ro("code_bytes", &Executable::code_bytes)
      .def_prop_ro("fingerprint", [](const Executable& e) {
        return nb::bytes(e.fingerprint().data(), e.fingerprint().size());
      });
}

void BindReport(nb::module_& m) {
  nb::class_<RunReport>(m, "RunReport")
      .def_prop_ro("start_ns",
                   [](nb::handle_t<RunReport> self) {
                     return View(self, nb::cast<RunReport&>(self).start_ns);
                   })
      .def_prop_ro("end_ns",
                   [](nb::handle_t<RunReport> self) {
                     return View(self, nb::cast<RunReport&>(self).end_ns);
                   })
      .def_prop_ro(
          "lane",
          [](nb::handle_t<RunReport> self) { return View(self, nb::cast<RunReport&>(self).lane); })
      .def_prop_ro("lane_busy_ns",
                   [](nb::handle_t<RunReport> self) {
                     return View(self, nb::cast<RunReport&>(self).lane_busy_ns);
                   })
      .def_ro("wall_ns", &RunReport::wall_ns)
      .def_ro("ended_ns", &RunReport::ended_ns)
      .def_ro("peak_device_bytes", &RunReport::peak_device_bytes)
      .def_ro("peak_live_bytes", &RunReport::peak_live_bytes)
      .def_ro("bytes_offloaded", &RunReport::bytes_offloaded)
      .def_ro("bytes_reloaded", &RunReport::bytes_reloaded)
      .def_ro("bytes_transferred", &RunReport::bytes_transferred)
      .def_ro("bytes_loaded", &RunReport::bytes_loaded)
      .def_ro("bytes_stored", &RunReport::bytes_stored)
      .def_ro("copied_outputs", &RunReport::copied_outputs)
      .def_ro("realigned_bytes", &RunReport::realigned_bytes)
      .def_ro("cancelled", &RunReport::cancelled)
      .def_ro("touched_results", &RunReport::touched_results)
      .def_ro("error_vertex", &RunReport::error_vertex)
      .def_ro("error_message", &RunReport::error_message);
}

std::shared_ptr<Plan> NewPlan(
    std::shared_ptr<Client> client, const std::vector<nb::object>& executables,
    const Array<uint8_t>& kind, const Array<int32_t>& lane, const Array<double>& priority,
    const Array<int32_t>& executable, const Array<int64_t>& succ_offsets,
    const Array<int32_t>& succ, const Array<uint8_t>& space, const Array<int32_t>& index,
    const Array<int64_t>& offset, const Array<int64_t>& bytes, const Array<int32_t>& dtype,
    const Array<int64_t>& dims_offsets, const Array<int64_t>& dims,
    const Array<int64_t>& input_offsets, const Array<int32_t>& inputs,
    const Array<int64_t>& output_offsets, const Array<int32_t>& outputs,
    const Array<int32_t>& overwritten, std::vector<int64_t> arena_bytes, int64_t host_bytes,
    std::vector<int64_t> argument_bytes, std::vector<int64_t> result_bytes,
    std::vector<std::string> descriptions, const std::vector<std::pair<int32_t, int32_t>>& donated,
    int64_t disk_bytes, const nb::object& disk, const std::vector<bool>& argument_on_disk,
    const std::vector<bool>& result_on_disk) {
  PlanArrays a;
  a.kind = ToVector(kind);
  a.lane = ToVector(lane);
  a.priority = ToVector(priority);
  a.executable = ToVector(executable);
  a.succ_offsets = ToVector(succ_offsets);
  a.succ = ToVector(succ);
  a.space = ToVector(space);
  a.index = ToVector(index);
  a.offset = ToVector(offset);
  a.bytes = ToVector(bytes);
  a.dtype = ToVector(dtype);
  a.dims_offsets = ToVector(dims_offsets);
  a.dims = ToVector(dims);
  a.input_offsets = ToVector(input_offsets);
  a.inputs = ToVector(inputs);
  a.output_offsets = ToVector(output_offsets);
  a.outputs = ToVector(outputs);
  a.overwritten = ToVector(overwritten);
  a.arena_bytes = std::move(arena_bytes);
  a.host_bytes = host_bytes;
  a.argument_bytes = std::move(argument_bytes);
  a.result_bytes = std::move(result_bytes);
  a.descriptions = std::move(descriptions);
  for (const auto& [argument, result] : donated) {
    a.donated.push_back(argument);
    a.donated.push_back(result);
  }
  a.disk_bytes = disk_bytes;
  a.argument_on_disk.assign(argument_on_disk.begin(), argument_on_disk.end());
  a.result_on_disk.assign(result_on_disk.begin(), result_on_disk.end());
  std::shared_ptr<DiskExtent> extent;
  if (!disk.is_none()) extent = nb::cast<std::shared_ptr<DiskExtent>>(disk);
  std::vector<std::shared_ptr<Executable>> list;
  for (const nb::object& each : executables) {
    list.push_back(each.is_none() ? nullptr : nb::cast<std::shared_ptr<Executable>>(each));
  }
  const WithoutGil without_gil;
  return Plan::Create(std::move(client), std::move(list), std::move(a), std::move(extent));
}

void BindPlan(nb::module_& m) {
  nb::class_<Plan>(m, "Plan", nb::is_weak_referenceable(), nb::type_slots(only_made))
      .def(nb::new_(&NewPlan), nb::kw_only(), "client"_a, "executables"_a, "kind"_a, "lane"_a,
           "priority"_a, "executable"_a, "succ_offsets"_a, "succ"_a, "space"_a, "index"_a,
           "offset"_a, "bytes"_a, "dtype"_a, "dims_offsets"_a, "dims"_a, "input_offsets"_a,
           "inputs"_a, "output_offsets"_a, "outputs"_a, "overwritten"_a, "arena_bytes"_a,
           "host_bytes"_a, "argument_bytes"_a, "result_bytes"_a,
           "descriptions"_a = std::vector<std::string>(),
           "donated"_a = std::vector<std::pair<int32_t, int32_t>>(), "disk_bytes"_a = 0,
           "disk"_a = nb::none(), "argument_on_disk"_a = std::vector<bool>(),
           "result_on_disk"_a = std::vector<bool>())
      .def_prop_ro("num_vertices", [](const Plan& p) { return p.loaded().num_vertices(); })
      .def_prop_ro("num_versions", [](const Plan& p) { return p.loaded().num_versions(); })
      .def_prop_ro("arena_bytes", [](const Plan& p) { return p.loaded().arena_bytes(); })
      .def_prop_ro("host_bytes", [](const Plan& p) { return p.loaded().host_bytes(); })
      .def_prop_ro("argument_bytes", [](const Plan& p) { return p.loaded().argument_bytes(); })
      .def_prop_ro("result_bytes", [](const Plan& p) { return p.loaded().result_bytes(); })
      .def("run", &RunAndWait, "arguments"_a, "results"_a, nb::kw_only(), "policy"_a = 0,
           "seed"_a = 0, "max_delay_us"_a = 0, "check"_a = false, "ended"_a = nb::none())
      .def("last_report",
           [](const Plan& plan) { return std::const_pointer_cast<RunReport>(plan.last_report()); });

  nb::class_<PlanRegistration>(m, "PlanRegistration", nb::is_weak_referenceable())
      .def(nb::new_([](std::shared_ptr<Plan> plan,
                       const std::vector<std::pair<int32_t, nb::object>>& bound) {
             BoundPlan made;
             if (!bound.empty()) made.arguments.resize(plan->loaded().argument_bytes().size());
             for (const auto& [argument, entry] : bound) {
               if (argument < 0 || argument >= static_cast<int32_t>(made.arguments.size())) {
                 throw std::invalid_argument("PlanRegistration: bound has argument " +
                                             std::to_string(argument) + ", which the plan has not");
               }
               Places<DiskSource> place({entry});
               BoundArgument& mine = made.arguments[argument];
               mine = {true, place.addresses[0], nullptr, place.sources[0]};
               if (!place.owners.empty()) mine.owner = std::move(place.owners[0]);
             }
             made.plan = std::move(plan);
             return std::make_shared<PlanRegistration>(std::move(made));
           }),
           "plan"_a, "bound"_a = std::vector<std::pair<int32_t, nb::object>>())
      .def_prop_ro("key", &PlanRegistration::key);
  m.def("num_registered_plans", &NumRegisteredPlans);
}

void BindHostBuffer(nb::module_& m) {
  nb::class_<HostBuffer>(m, "HostBuffer", nb::is_weak_referenceable())
      .def(nb::init<int64_t>(), "nbytes"_a)
      .def_prop_ro("address", &HostBuffer::address)
      .def_prop_ro("nbytes", &HostBuffer::bytes)
      .def("__len__", &HostBuffer::bytes)
      .def_prop_ro("__array_interface__", [](const HostBuffer& buffer) {
        nb::dict found;
        found["version"] = 3;
        found["shape"] = nb::make_tuple(buffer.bytes());
        found["typestr"] = "|u1";
        found["data"] = nb::make_tuple(buffer.address(), false);
        return found;
      });
  m.def("host_stats", [] {
    const HostBlock::Stats stats = HostBlock::Global().stats();
    nb::dict found;
    found["in_use_bytes"] = stats.in_use_bytes;
    found["peak_bytes"] = stats.peak_bytes;
    found["kept_bytes"] = stats.kept_bytes;
    found["hole_bytes"] = stats.hole_bytes;
    found["largest_hole_bytes"] = stats.largest_hole_bytes;
    found["num_allocated"] = stats.num_allocated;
    found["num_freed"] = stats.num_freed;
    found["pinned_bytes"] = stats.pinned_bytes;
    found["num_pin_failures"] = stats.num_pin_failures;
    found["num_unpin_failures"] = stats.num_unpin_failures;
    found["num_fixed_requests"] = FixedMemory::num_requests();
    return found;
  });
  m.def(
      "host_is_pinned",
      [](uintptr_t address, int64_t bytes) {
        return HostBlock::Global().IsPinned(reinterpret_cast<const char*>(address), bytes);
      },
      "address"_a, "nbytes"_a);
  m.def(
      "place_intervals",
      [](const std::vector<int64_t>& lower, const std::vector<int64_t>& upper,
         const std::vector<int64_t>& size, int64_t capacity, int64_t max_steps) {
        const nb::gil_scoped_release released;
        return PlaceIntervals(lower, upper, size, capacity, max_steps);
      },
      "lower"_a, "upper"_a, "size"_a, "capacity"_a, "max_steps"_a);
  m.def(
      "next_writers",
      [](const Array<int64_t>& memory, const Array<int64_t>& start, const Array<int64_t>& end,
         const Array<int64_t>& time) {
        RequireEqualSizes("next_writers", memory, start, end, time);
        const WrittenRanges ranges{memory.data(), start.data(), end.data(), time.data(),
                                   static_cast<int64_t>(memory.size())};
        std::vector<int64_t> pairs;
        {
          const WithoutGil without_gil;
          pairs = NextWriters(ranges);
        }
        return Owned(std::move(pairs));
      },
      "memory"_a, "start"_a, "end"_a, "time"_a);
  m.def(
      "reaches",
      [](int64_t num_vertices, const Array<int64_t>& tail, const Array<int64_t>& head,
         const Array<int64_t>& from, const Array<int64_t>& to) {
        RequireEqualSizes("reaches: edges", tail, head);
        RequireEqualSizes("reaches: pairs", from, to);
        std::vector<uint8_t> found;
        {
          const WithoutGil without_gil;
          found = Reaches(num_vertices, tail.data(), head.data(), static_cast<int64_t>(tail.size()),
                          from.data(), to.data(), static_cast<int64_t>(from.size()));
        }
        return Owned(std::move(found));
      },
      "num_vertices"_a, "tail"_a, "head"_a, "start"_a, "end"_a);
  m.def("host_release", [] { HostBlock::Global().ReleaseFree(); }, nb::call_guard<WithoutGil>());
  m.def(
      "host_set_cap", [](int64_t bytes) { HostBlock::Global().SetCap(bytes); }, "nbytes"_a,
      nb::call_guard<WithoutGil>());
}

[[noreturn]] void ThrowOsError(int code, const std::string& what) {
  PyErr_SetObject(PyExc_OSError, nb::make_tuple(code, what).ptr());
  throw nb::python_error();
}

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void CheckRange(const DiskSource& source, int64_t offset, int64_t bytes) {
  if (offset >= 0 && bytes <= source.bytes() - offset) return;
  throw std::invalid_argument("offset=" + std::to_string(offset) + " and " + std::to_string(bytes) +
                              " bytes reach beyond the " + std::to_string(source.bytes()) +
                              " that are there.");
}

void ReadInto(const DiskSource& source, const Bytes& buffer, int64_t offset) {
  CheckRange(source, offset, static_cast<int64_t>(buffer.size()));
  std::string error;
  bool ok;
  {
    const WithoutGil without_gil;
    const std::atomic<bool> abort{false};
    ok = source.Read(offset, reinterpret_cast<char*>(buffer.data()), buffer.size(), abort, &error);
  }
  if (!ok) ThrowOsError(EIO, error);
}

void WriteFrom(DiskExtent& extent, const ConstBytes& buffer, int64_t offset) {
  CheckRange(extent, offset, static_cast<int64_t>(buffer.size()));
  std::string error;
  bool ok;
  {
    const WithoutGil without_gil;
    const std::atomic<bool> abort{false};
    ok = extent.Write(offset, reinterpret_cast<const char*>(buffer.data()), buffer.size(), abort,
                      &error);
  }
  if (!ok) ThrowOsError(EIO, error);
}

void BindDisk(nb::module_& m) {
  nb::class_<DiskSource>(m, "DiskSource", nb::is_weak_referenceable())
      .def_prop_ro("bytes", &DiskSource::bytes)
      .def("read_into", &ReadInto, "buffer"_a, "offset"_a = 0);
  nb::class_<DiskExtent, DiskSource>(m, "DiskExtent")
      .def("write", &WriteFrom, "buffer"_a, "offset"_a = 0);
  nb::class_<FileRange, DiskSource>(m, "FileRange");
  nb::class_<DiskFile>(m, "DiskFile", nb::is_weak_referenceable(), nb::type_slots(only_made))
      .def(nb::new_([](const std::string& path) {
             try {
               return DiskFile::Open(path);
             } catch (const DiskError& e) {
               ThrowOsError(e.code(), e.what());
             }
           }),
           "path"_a)
      .def_prop_ro("bytes", &DiskFile::bytes)
      .def(
          "range",
          [](DiskFile& file, int64_t offset, int64_t bytes) {
            try {
              return file.Range(offset, bytes);
            } catch (const DiskError& e) {
              ThrowOsError(e.code(), e.what());
            }
          },
          "offset"_a, "bytes"_a);
  nb::class_<DiskStore>(m, "DiskStore", nb::is_weak_referenceable(), nb::type_slots(only_made))
      .def(nb::new_([](const std::vector<std::string>& paths, const std::string& engine,
                       int queue_depth, int64_t request_bytes) {
             DiskOptions options;
             options.engine = engine;
             options.queue_depth = queue_depth;
             options.request_bytes = request_bytes;
             try {
               return DiskStore::Open(paths, options);
             } catch (const DiskError& e) {
               ThrowOsError(e.code(), e.what());
             }
           }),
           "paths"_a, nb::kw_only(), "engine"_a = "auto",
           "queue_depth"_a = DiskOptions().queue_depth,
           "request_bytes"_a = DiskOptions().request_bytes)
      .def_prop_ro("engine", &DiskStore::engine)
      .def_prop_ro("engine_reason", &DiskStore::reason)
      .def_prop_ro("direct", &DiskStore::direct)
      .def("stats",
           [](const DiskStore& store) {
             const DiskStore::Stats stats = store.stats();
             nb::dict found;
             found["reserved_bytes"] = stats.reserved_bytes;
             found["bytes_read"] = stats.bytes_read;
             found["bytes_written"] = stats.bytes_written;
             return found;
           })
      .def(
          "reserve",
          [](DiskStore& store, int64_t bytes) {
            std::shared_ptr<DiskExtent> extent;
            int code = 0;
            std::string what;
            {
              const WithoutGil without_gil;
              try {
                extent = store.Reserve(bytes);
              } catch (const DiskError& e) {
                code = e.code();
                what = e.what();
              }
            }
            if (code != 0) ThrowOsError(code, what);
            return extent;
          },
          "bytes"_a);
}

NB_MODULE(_native, m) {
  // Caches of the package hold clients and plans until the interpreter is gone.
  nb::set_leak_warnings(false);
  main_thread = nb::cast<unsigned long>(
      nb::module_::import_("threading").attr("main_thread")().attr("ident"));
  BindClient(m);
  BindReport(m);
  BindPlan(m);
  BindHostBuffer(m);
  BindDisk(m);
  m.def(
      "cuda_driver",
      [](const std::string& path) {
        const std::shared_ptr<CudaDriver> driver = CudaDriver::Load(path);
        nb::list devices;
        for (int device = 0; device < driver->num_devices(); ++device) {
          size_t free = 0;
          size_t total = 0;
          driver->MemoryInfo(device, &free, &total);
          nb::dict found;
          found["name"] = driver->device_name(device);
          found["free_bytes"] = free;
          found["total_bytes"] = total;
          devices.append(found);
        }
        nb::dict found;
        found["version"] = driver->version();
        found["devices"] = devices;
        return found;
      },
      "path"_a = "");
  m.def("ffi_targets", [] {
    nb::dict found;
    for (const FfiTarget& target : FfiTargets()) {
      nb::dict handlers;
      handlers["instantiate"] = nb::capsule(target.instantiate);
      handlers["execute"] = nb::capsule(target.execute);
      nb::dict type;
      type["type_id"] = nb::capsule(target.type_id);
      type["type_info"] = nb::capsule(target.type_info);
      found[target.platform.c_str()] = nb::make_tuple(handlers, type);
    }
    return found;
  });
  m.def("set_host_callback", &CallBack, "function"_a);
  m.def("host_callback_handler", [] { return nb::capsule(HostCallbackHandler()); });
  m.attr("ffi_api_version") = nb::cast(FfiApiVersion());
  m.def("_shutdown", &ShutdownClients);
  nb::module_::import_("atexit").attr("register")(m.attr("_shutdown"));
}

}  // namespace
}  // namespace jaxoffload

// Plans, their runs, and what is told of a run.

#include "pjrt/plan.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "bindings/host_buffer.h"

namespace jaxoffload {
namespace {

RunOptions MakeOptions(int32_t policy, uint64_t seed, int64_t max_delay_us, bool check) {
  constexpr int64_t kHour = int64_t{3600} * 1000000;
  if (max_delay_us < 0 || max_delay_us > kHour) {
    throw std::invalid_argument("run: max_delay_us=" + std::to_string(max_delay_us) +
                                " is not between 0 and an hour.");
  }
  RunOptions options;
  options.policy = PolicyOf(policy);
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
        source = Held<Source>(entry);
        addresses.push_back(source->tag());
      } else if (nb::isinstance<HostBuffer>(entry)) {
        const HostBuffer& buffer = nb::cast<HostBuffer&>(entry);
        owners.push_back(buffer.data());
        stamps.resize(addresses.size() + 1);
        stamps.back() = buffer.stamp();
        owner_of.resize(addresses.size() + 1);
        owner_of.back() = buffer.data();
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
  // Of HostBuffers; null for others, or beyond their ends.
  std::vector<std::shared_ptr<Stamp>> stamps;
  std::vector<std::shared_ptr<void>> owner_of;
};

unsigned long main_thread = 0;  // Python's identifier of it

// Waits with the GIL released, and takes it now and then to see whether the user pressed Ctrl-C.
// Executes the kernels of short runs itself if it may: to wake a lane takes as long.
// `ended`, if any, is called with the report however the run has ended.
std::shared_ptr<const RunReport> RunAndWait(Plan& plan, const std::vector<nb::object>& arguments,
                                            const std::vector<nb::object>& results, int32_t policy,
                                            uint64_t seed, int64_t max_delay_us, bool check,
                                            bool may_help, const nb::object& ended) {
  const RunOptions options = MakeOptions(policy, seed, max_delay_us, check);
  const Places<DiskSource> from(arguments);
  const Places<DiskExtent> to(results);
  std::vector<std::shared_ptr<void>> owners = from.owners;
  owners.insert(owners.end(), to.owners.begin(), to.owners.end());
  Contents contents;
  for (const auto& stamp : from.stamps) {
    contents.argument_stamps.push_back(stamp ? stamp->value() : kNoStamp);
  }
  for (const auto& stamp : to.stamps) {
    if (stamp) stamp->Renew();  // from now on other bytes may be there
    if (stamp && !plan.loaded().owed().empty()) stamp->MayBeOwed();
    contents.result_stamps.push_back(stamp ? stamp->value() : kNoStamp);
  }
  contents.result_owners = to.owner_of;
  // Signals are Python's main thread's business; others need not wake up for them.
  const bool is_main = PyThread_get_thread_ident() == main_thread;
  constexpr auto kPatience = std::chrono::milliseconds(50);
  bool interrupted = false;
  std::shared_ptr<Run> run;
  {
    const WithoutGil without_gil;
    run = plan.Submit(from.addresses, to.addresses, options, nullptr, from.sources, to.sources,
                      std::move(owners), std::move(contents), may_help && plan.IsShort());
    while (!interrupted && !run->WaitFor(kPatience)) {
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
    const std::vector<bool>& result_on_disk, bool is_alone, const Array<int32_t>& residents,
    const Array<int32_t>& owed, const Array<int32_t>& returned,
    const Array<int32_t>& first_of_sum) {
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
  a.is_alone = is_alone;
  a.residents = ToVector(residents);
  a.owed = ToVector(owed);
  a.returned = ToVector(returned);
  a.first_of_sum = ToVector(first_of_sum);
  a.argument_on_disk.assign(argument_on_disk.begin(), argument_on_disk.end());
  a.result_on_disk.assign(result_on_disk.begin(), result_on_disk.end());
  std::shared_ptr<DiskExtent> extent;
  if (!disk.is_none()) extent = Held<DiskExtent>(disk);
  std::vector<std::shared_ptr<Executable>> list;
  for (const nb::object& each : executables) {
    list.push_back(each.is_none() ? nullptr : Held<Executable>(each));
  }
  const WithoutGil without_gil;
  return Plan::Create(std::move(client), std::move(list), std::move(a), std::move(extent));
}

std::shared_ptr<PlanRegistration> NewRegistration(
    std::shared_ptr<Plan> plan, const std::vector<std::pair<int32_t, nb::object>>& bound,
    const std::vector<std::pair<int32_t, uint32_t>>& fixed) {
  BoundPlan made;
  for (const auto& [argument, number] : fixed) {
    if (argument < 0 || argument >= static_cast<int32_t>(plan->loaded().argument_bytes().size())) {
      throw std::invalid_argument("PlanRegistration: fixed has argument " +
                                  std::to_string(argument) + ", which the plan has not");
    }
    made.fixed.push_back({argument, number});
  }
  if (!bound.empty()) made.arguments.resize(plan->loaded().argument_bytes().size());
  for (const auto& [argument, entry] : bound) {
    if (argument < 0 || argument >= static_cast<int32_t>(made.arguments.size())) {
      throw std::invalid_argument("PlanRegistration: bound has argument " +
                                  std::to_string(argument) + ", which the plan has not");
    }
    Places<DiskSource> place({entry});
    BoundArgument& mine = made.arguments[argument];
    mine = {true, place.addresses[0], nullptr, nullptr, place.sources[0]};
    if (!place.owners.empty()) mine.owner = std::move(place.owners[0]);
    if (!place.stamps.empty()) mine.stamp = place.stamps[0];
  }
  made.plan = std::move(plan);
  return std::make_shared<PlanRegistration>(std::move(made));
}

// A read-only view of an array of the report's.
template <auto kField>
nb::object ViewOf(nb::handle_t<RunReport> report) {
  return View(report, nb::cast<RunReport&>(report).*kField);
}

void BindReport(nb::module_& m) {
  nb::class_<RunReport>(m, "RunReport")
      .def_prop_ro("start_ns", &ViewOf<&RunReport::start_ns>)
      .def_prop_ro("end_ns", &ViewOf<&RunReport::end_ns>)
      .def_prop_ro("lane", &ViewOf<&RunReport::lane>)
      .def_prop_ro("lane_busy_ns", &ViewOf<&RunReport::lane_busy_ns>)
      .def_ro("wall_ns", &RunReport::wall_ns)
      .def_ro("ended_ns", &RunReport::ended_ns)
      .def_ro("peak_device_bytes", &RunReport::peak_device_bytes)
      .def_ro("peak_live_bytes", &RunReport::peak_live_bytes)
      .def_ro("bytes_offloaded", &RunReport::bytes_offloaded)
      .def_ro("bytes_reloaded", &RunReport::bytes_reloaded)
      .def_ro("bytes_transferred", &RunReport::bytes_transferred)
      .def_ro("bytes_loaded", &RunReport::bytes_loaded)
      .def_ro("rows_loaded", &RunReport::rows_loaded)
      .def_ro("rows_stored", &RunReport::rows_stored)
      .def_ro("bytes_stored", &RunReport::bytes_stored)
      .def_ro("bytes_found", &RunReport::bytes_found)
      .def_ro("bytes_left", &RunReport::bytes_left)
      .def_ro("copied_outputs", &RunReport::copied_outputs)
      .def_ro("realigned_bytes", &RunReport::realigned_bytes)
      .def_ro("cancelled", &RunReport::cancelled)
      .def_ro("touched_results", &RunReport::touched_results)
      .def_ro("error_vertex", &RunReport::error_vertex)
      .def_ro("error_message", &RunReport::error_message);
}

}  // namespace

void BindPlan(nb::module_& m) {
  main_thread = nb::cast<unsigned long>(
      nb::module_::import_("threading").attr("main_thread")().attr("ident"));
  BindReport(m);
  nb::class_<Plan>(m, "Plan", nb::is_weak_referenceable(), nb::type_slots(only_made))
      .def(nb::new_(&NewPlan), nb::kw_only(), "client"_a, "executables"_a, "kind"_a, "lane"_a,
           "priority"_a, "executable"_a, "succ_offsets"_a, "succ"_a, "space"_a, "index"_a,
           "offset"_a, "bytes"_a, "dtype"_a, "dims_offsets"_a, "dims"_a, "input_offsets"_a,
           "inputs"_a, "output_offsets"_a, "outputs"_a, "overwritten"_a, "arena_bytes"_a,
           "host_bytes"_a, "argument_bytes"_a, "result_bytes"_a,
           "descriptions"_a = std::vector<std::string>(),
           "donated"_a = std::vector<std::pair<int32_t, int32_t>>(), "disk_bytes"_a = 0,
           "disk"_a = nb::none(), "argument_on_disk"_a = std::vector<bool>(),
           "result_on_disk"_a = std::vector<bool>(), "is_alone"_a = false, "residents"_a, "owed"_a,
           "returned"_a, "first_of_sum"_a)
      .def_prop_ro("num_vertices", [](const Plan& p) { return p.loaded().num_vertices(); })
      .def_prop_ro("num_versions", [](const Plan& p) { return p.loaded().num_versions(); })
      .def_prop_ro("arena_bytes", [](const Plan& p) { return p.loaded().arena_bytes(); })
      .def_prop_ro("host_bytes", [](const Plan& p) { return p.loaded().host_bytes(); })
      .def_prop_ro("argument_bytes", [](const Plan& p) { return p.loaded().argument_bytes(); })
      .def_prop_ro("result_bytes", [](const Plan& p) { return p.loaded().result_bytes(); })
      .def("run", &RunAndWait, "arguments"_a, "results"_a, nb::kw_only(), "policy"_a = 0,
           "seed"_a = 0, "max_delay_us"_a = 0, "check"_a = false, "may_help"_a = true,
           "ended"_a = nb::none())
      .def("residents", &Plan::residents, nb::call_guard<WithoutGil>())
      .def("release", &Plan::Release, nb::call_guard<WithoutGil>())
      .def("last_report",
           [](const Plan& plan) { return std::const_pointer_cast<RunReport>(plan.last_report()); });

  nb::class_<PlanRegistration>(m, "PlanRegistration", nb::is_weak_referenceable())
      .def(nb::new_(&NewRegistration), "plan"_a,
           "bound"_a = std::vector<std::pair<int32_t, nb::object>>(),
           "fixed"_a = std::vector<std::pair<int32_t, uint32_t>>())
      .def_prop_ro("key", &PlanRegistration::key);
  nb::list policies;
  for (const char* name : kPolicyNames) policies.append(name);
  m.attr("policy_names") = nb::tuple(policies);
  m.def("num_registered_plans", &NumRegisteredPlans);
}

}  // namespace jaxoffload

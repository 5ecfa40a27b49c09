// The module, and what of XLA's and CUDA's is shown to Python.

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "cuda/driver.h"
#include "ffi.h"
#include "ffi_devices.h"
#include "host_callback.h"

namespace jaxoffload {
namespace {

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

nb::dict DescribeCudaDriver(const std::string& path) {
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
}

nb::tuple Describe(const FfiTarget& target) {
  nb::dict handlers;
  handlers["instantiate"] = nb::capsule(target.instantiate);
  handlers["execute"] = nb::capsule(target.execute);
  nb::dict type;
  type["type_id"] = nb::capsule(target.type_id);
  type["type_info"] = nb::capsule(target.type_info);
  return nb::make_tuple(handlers, type);
}

nb::dict DescribeFfiTargets() {
  nb::dict found;
  for (const FfiTarget& target : FfiTargets()) found[target.platform.c_str()] = Describe(target);
  return found;
}

}  // namespace

NB_MODULE(_native, m) {
  // Caches of the package hold clients and plans until the interpreter is gone.
  nb::set_leak_warnings(false);
  BindClient(m);
  BindPlan(m);
  BindPlanner(m);
  BindMemGraph(m);
  BindHost(m);
  BindDisk(m);
  BindGraph(m);
  BindLeaves(m);
  // XLA's threads are Python's while they call back only.
  SetIsCallersThread([] { return PyGILState_GetThisThreadState() != nullptr; });
  m.def("cuda_driver", &DescribeCudaDriver, "path"_a = "");
  m.def("ffi_targets", &DescribeFfiTargets);
  m.def("devices_target", [] { return Describe(DevicesTarget()); });
  m.def("stamps_handler", [] { return nb::capsule(StampsHandler()); });
  m.def("set_host_callback", &CallBack, "function"_a);
  m.def("host_callback_handler", [] { return nb::capsule(HostCallbackHandler()); });
  m.attr("ffi_api_version") = nb::cast(FfiApiVersion());
}

}  // namespace jaxoffload

// Clients, their executables, and the end of both with the interpreter.

#include "pjrt/client.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/mutex.h"
#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "tiers/disk_store.h"

namespace jaxoffload {
namespace {

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
                                    std::vector<int32_t> ordinals, std::shared_ptr<Client> host,
                                    const std::string& driver_path) {
  return Remember(Client::Adopt(plugin_path, reinterpret_cast<PJRT_Client*>(client),
                                std::move(ordinals), std::move(host), driver_path));
}

std::vector<std::shared_ptr<Client>> AliveClients() {
  std::vector<std::shared_ptr<Client>> alive;
  Clients& clients = AllClients();
  MutexLock lock(clients.mutex);
  for (const std::weak_ptr<Client>& each : clients.list) {
    if (std::shared_ptr<Client> client = each.lock()) alive.push_back(std::move(client));
  }
  return alive;
}

// Called by Python's atexit: no lane may be running when static objects of XLA are destroyed, and
// no thread may be about to ask for the GIL when the interpreter goes away.
void ShutdownClients() {
  const WithoutGil without_gil;
  DiskStore::KeepBytes();
  exit_state.thread = std::this_thread::get_id();
  exit_state.exiting = true;
  const std::vector<std::shared_ptr<Client>> alive = AliveClients();
  for (const std::shared_ptr<Client>& client : alive) client->Shutdown();
  // Bounded, for such a thread may be behind one that never lets go of the GIL.
  for (int i = 0; i < 2000 && exit_state.num_returning > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void CheckDevice(const Client& client, const char* caller, int32_t device) {
  if (device >= 0 && device < client.num_devices()) return;
  throw std::invalid_argument(std::string(caller) + ": no device " + std::to_string(device));
}

}  // namespace

void SettleAll(const char* array) {
  for (const std::shared_ptr<Client>& client : AliveClients()) client->Settle(array);
}

void BindClient(nb::module_& m) {
  nb::class_<Client>(m, "Client", nb::is_weak_referenceable(), nb::type_slots(only_made))
      .def(nb::new_(&NewClient), "plugin_path"_a, "num_devices"_a = 1, nb::call_guard<WithoutGil>())
      .def_static("adopt", &AdoptClient, "plugin_path"_a, "client"_a, "ordinals"_a,
                  "host"_a.none() = nb::none(), "driver_path"_a = "", nb::call_guard<WithoutGil>())
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
          "load",
          [](Client& client, const nb::bytes& serialized) {
            const std::string bytes(serialized.c_str(), serialized.size());
            const WithoutGil without_gil;
            return client.Load(bytes);
          },
          "serialized"_a)
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
          [](Client& client, int64_t bytes_per_second, bool shared) {
            if (bytes_per_second < 0) throw std::invalid_argument("bytes_per_second is negative");
            return client.platform().Throttle(bytes_per_second, shared);
          },
          "bytes_per_second"_a, "shared"_a = false)
      .def(
          "arena_bytes",
          [](Client& client, int32_t device) {
            CheckDevice(client, "arena_bytes", device);
            return client.platform().leased_bytes(device);
          },
          "device"_a = 0)
      .def(
          "arena_resident_bytes",
          [](Client& client, int32_t device) {
            CheckDevice(client, "arena_resident_bytes", device);
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
      .def_prop_ro("fingerprint",
                   [](const Executable& e) {
                     return nb::bytes(e.fingerprint().data(), e.fingerprint().size());
                   })
      .def("serialize", [](const Executable& e) {
        std::string bytes;
        {
          const WithoutGil without_gil;
          bytes = e.Serialize();
        }
        return nb::bytes(bytes.data(), bytes.size());
      });

  m.def("_shutdown", &ShutdownClients);
  nb::module_::import_("atexit").attr("register")(m.attr("_shutdown"));
}

}  // namespace jaxoffload

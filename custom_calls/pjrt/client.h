// A PJRT client, with the platform and the launcher that its plans share: on CPU one of our own
// beside JAX's, on CUDA that of JAX.

#ifndef JAXOFFLOAD_PJRT_CLIENT_H_
#define JAXOFFLOAD_PJRT_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/process.h"
#include "launcher/launcher.h"
#include "pjrt/api.h"
#include "pjrt/platform.h"

namespace jaxoffload {

class CudaDriver;
class Executable;

class Client : public std::enable_shared_from_this<Client> {
 public:
  using Attribute = std::variant<std::string, int64_t, std::vector<int64_t>, double, bool>;

  // A client of our own for CPU. Throws std::runtime_error: the plugin cannot be loaded, or has an
  // unfit version.
  static std::shared_ptr<Client> Create(const std::string& plugin_path, int32_t num_devices);
  // Somebody else's client of the plugin for CUDA, who keeps it alive until Shutdown. `ordinals`:
  // the devices to use, by the driver's number, in the order of plans' devices. `host`: one of ours
  // for CPU, which runs the host's own kernels; null where there are none. `driver_path`: see
  // CudaDriver::Load. Throws std::runtime_error.
  static std::shared_ptr<Client> Adopt(const std::string& plugin_path, PJRT_Client* client,
                                       std::vector<int32_t> ordinals, std::shared_ptr<Client> host,
                                       const std::string& driver_path);
  // Waits for the runs in the queue. Must not be called from a lane.
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  std::string platform_name() const;
  std::string platform_version() const;
  // What the plugin tells about itself, "stablehlo_current_version" for one.
  std::vector<std::pair<std::string, Attribute>> attributes() const;

  // Compiles StableHLO (text, bytecode, or a portable artifact) with a serialized
  // CompileOptionsProto. Any thread; compilations go on side by side. Throws std::runtime_error
  // with XLA's message, and in a forked child, where XLA would wait for threads that are not there.
  std::shared_ptr<Executable> Compile(const std::string& code, const std::string& options);

  // Loads what `Executable::Serialize` gave, in this process or another with the same plugin on the
  // same kind of CPU. The bytes are machine code, which is trusted: take them from where nobody
  // else writes. Any thread. Throws as Compile does.
  std::shared_ptr<Executable> Load(const std::string& serialized);

  // One that somebody else has compiled on this client, and keeps alive.
  std::shared_ptr<Executable> AdoptExecutable(PJRT_LoadedExecutable* loaded);

  // Makes FFI handlers known to the plugin, which has a registry of its own: see ffi_trampolines.h.
  // A name that is registered already is left alone.
  void RegisterFfiHandlers(const std::vector<std::pair<std::string, void*>>& handlers);

  // Gives the device arenas' memory back, once no run is active. Waits for that.
  void Trim();
  // Copies what runs have left on the devices and owe to an array in host memory; beside a run,
  // too. Throws std::runtime_error: it is lost, or on a GPU and this is a forked child.
  void Settle(const char* array);

  // Ends the launcher; later runs are refused. For the end of the process.
  void Shutdown() { launcher_.Shutdown(); }

  // Whether this is a forked child, where nothing of XLA's may be used, or destroyed: that would
  // wait for threads that are not there.
  bool IsForked() const { return home_.IsForked(); }

  const PJRT_Api* api() const { return api_; }
  PJRT_Client* get() const { return client_; }
  // Devices of plans.
  int32_t num_devices() const { return num_devices_; }
  // The client whose device number `num_devices` is for the host's own kernels: this one on CPU;
  // null if there is none.
  Client* host() { return is_ours_ ? this : host_.get(); }
  PJRT_Device* device(int32_t device) const { return devices_[device]; }
  Platform& platform() { return *platform_; }
  // The driver behind the platform; null on CPU.
  const std::shared_ptr<CudaDriver>& driver() const { return driver_; }
  Launcher& launcher() { return launcher_; }

 private:
  // Calls it between two runs, and waits for that.
  void RunAlone(std::function<void()> task);

  Client(const PJRT_Api* api, PJRT_Client* client, bool is_ours, int32_t num_devices,
         std::vector<PJRT_Device*> devices, std::unique_ptr<Platform> platform,
         std::shared_ptr<CudaDriver> driver, std::shared_ptr<Client> host);

  const HomeProcess home_;
  const PJRT_Api* const api_;
  PJRT_Client* const client_;
  const bool is_ours_;
  const int32_t num_devices_;
  const std::vector<PJRT_Device*> devices_;
  const std::unique_ptr<Platform> platform_;
  const std::shared_ptr<CudaDriver> driver_;
  const std::shared_ptr<Client> host_;
  // Last: destroyed first, so that no lane outlives what its vertices use.
  Launcher launcher_;
};

// A compiled program.
class Executable {
 public:
  enum class Origin { kCompiled, kLoaded, kAdopted };

  Executable(std::shared_ptr<Client> client, PJRT_LoadedExecutable* loaded, Origin origin);
  ~Executable();
  Executable(const Executable&) = delete;
  Executable& operator=(const Executable&) = delete;

  PJRT_LoadedExecutable* get() const { return loaded_; }
  const std::shared_ptr<Client>& client() const { return client_; }

  // Bytes for Client::Load. Throws std::runtime_error: the plugin cannot, or this was not compiled
  // here. XLA would serialize a loaded executable without its code, and load that without a word.
  std::string Serialize() const;

  int64_t num_outputs() const { return static_cast<int64_t>(output_types_.size()); }
  PJRT_Buffer_Type output_type(int64_t output) const { return output_types_[output]; }
  const std::vector<int64_t>& output_dims(int64_t output) const { return output_dims_[output]; }
  // The device it was compiled for; others need PJRT_LoadedExecutable_Execute's execute_device.
  PJRT_Device* device() const { return device_; }

  // XLA's own figures, bytes.
  int64_t temp_bytes() const { return temp_bytes_; }
  int64_t argument_bytes() const { return argument_bytes_; }
  int64_t output_bytes() const { return output_bytes_; }
  int64_t alias_bytes() const { return alias_bytes_; }
  int64_t code_bytes() const { return code_bytes_; }
  // Empty where the plugin has none.
  const std::string& fingerprint() const { return fingerprint_; }

 private:
  struct Deleter {
    const PJRT_Api* api;
    void operator()(PJRT_Executable* executable) const;
  };
  using Handle = std::unique_ptr<PJRT_Executable, Deleter>;

  // The program behind the loaded one.
  Handle Program() const;
  void ReadMetadata();

  const std::shared_ptr<Client> client_;
  PJRT_LoadedExecutable* const loaded_;
  const Origin origin_;
  PJRT_Device* device_ = nullptr;
  std::vector<PJRT_Buffer_Type> output_types_;
  std::vector<std::vector<int64_t>> output_dims_;
  int64_t temp_bytes_ = 0;
  int64_t argument_bytes_ = 0;
  int64_t output_bytes_ = 0;
  int64_t alias_bytes_ = 0;
  int64_t code_bytes_ = 0;
  std::string fingerprint_;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PJRT_CLIENT_H_

#include "pjrt/client.h"

#include <stdexcept>

#include "cuda/platform.h"
#include "pjrt/ffi_trampolines.h"

namespace jaxoffload {
namespace {

PJRT_NamedValue Option(const char* name, PJRT_NamedValue_Type type) {
  PJRT_NamedValue value;
  std::memset(&value, 0, sizeof(value));
  value.struct_size = PJRT_NamedValue_STRUCT_SIZE;
  value.name = name;
  value.name_size = std::strlen(name);
  value.type = type;
  value.value_size = 1;
  return value;
}

Client::Attribute ToAttribute(const PJRT_NamedValue& value) {
  switch (value.type) {
    case PJRT_NamedValue_kString:
      return std::string(value.string_value, value.value_size);
    case PJRT_NamedValue_kInt64:
      return value.int64_value;
    case PJRT_NamedValue_kInt64List:
      return std::vector<int64_t>(value.int64_array_value,
                                  value.int64_array_value + value.value_size);
    case PJRT_NamedValue_kFloat:
      return static_cast<double>(value.float_value);
    case PJRT_NamedValue_kBool:
      return value.bool_value;
  }
  return std::string();
}

}  // namespace

std::shared_ptr<Client> Client::Create(const std::string& plugin_path, int32_t num_devices) {
  if (num_devices < 1 || num_devices > 64) {
    throw std::invalid_argument("Client: num_devices=" + std::to_string(num_devices) +
                                " must be between 1 and 64");
  }
  const PJRT_Api* const api = LoadPlugin(plugin_path);
  // Synchronous: a vertex would run on its lane's own thread. The plugin of today takes the option
  // and executes on threads of its own all the same (PlanBackend::AwaitKernel). One device for each
  // compute lane, the host's too, for executions of one device wait for each other.
  const int32_t num_lanes = num_devices + 1;
  PJRT_NamedValue options[] = {Option("cpu_device_count", PJRT_NamedValue_kInt64),
                               Option("asynchronous", PJRT_NamedValue_kBool)};
  options[0].int64_value = num_lanes;
  options[1].bool_value = false;
  JO_PJRT_ARGS(PJRT_Client_Create, create);
  create.create_options = options;
  create.num_options = 2;
  Check(api, api->PJRT_Client_Create(&create), "creating the XLA client");
  JO_PJRT_ARGS(PJRT_Client_AddressableDevices, devices);
  devices.client = create.client;
  Check(api, api->PJRT_Client_AddressableDevices(&devices), "listing the XLA client's devices");
  if (static_cast<int32_t>(devices.num_addressable_devices) < num_lanes) {
    throw std::runtime_error("Client: num_devices=" + std::to_string(num_devices) +
                             ", and one for the host, but the plugin has " +
                             std::to_string(devices.num_addressable_devices));
  }
  const std::vector<PJRT_Device*> used(devices.addressable_devices,
                                       devices.addressable_devices + num_lanes);
  return std::shared_ptr<Client>(new Client(api, create.client, true, num_devices, used,
                                            std::make_unique<CpuPlatform>(api, create.client, used),
                                            nullptr, nullptr));
}

std::shared_ptr<Client> Client::Adopt(const std::string& plugin_path, PJRT_Client* client,
                                      std::vector<int32_t> ordinals, std::shared_ptr<Client> host,
                                      const std::string& driver_path) {
  if (client == nullptr) throw std::invalid_argument("Client: client=0 is no address of a client");
  const PJRT_Api* const api = FindPlugin(plugin_path);
  JO_PJRT_ARGS(PJRT_Client_AddressableDevices, devices);
  devices.client = client;
  Check(api, api->PJRT_Client_AddressableDevices(&devices), "listing the XLA client's devices");
  std::vector<PJRT_Device*> used;
  for (const int32_t ordinal : ordinals) {
    for (size_t d = 0; d < devices.num_addressable_devices; ++d) {
      JO_PJRT_ARGS(PJRT_Device_LocalHardwareId, id);
      id.device = devices.addressable_devices[d];
      Check(api, api->PJRT_Device_LocalHardwareId(&id), "asking for a device's number");
      if (id.local_hardware_id == ordinal) used.push_back(id.device);
    }
  }
  if (ordinals.empty() || used.size() != ordinals.size()) {
    throw std::invalid_argument("Client: ordinals has a device that the XLA client does not have");
  }
  if (host != nullptr && host->host() != host.get()) {
    throw std::invalid_argument("Client: host is no client for CPU");
  }
  std::shared_ptr<CudaDriver> driver = CudaDriver::Load(driver_path);
  auto platform = std::make_unique<CudaPlatform>(api, client, used, std::move(ordinals), driver);
  const auto num_devices = static_cast<int32_t>(used.size());
  return std::shared_ptr<Client>(new Client(api, client, false, num_devices, used,
                                            std::move(platform), std::move(driver),
                                            std::move(host)));
}

Client::Client(const PJRT_Api* api, PJRT_Client* client, bool is_ours, int32_t num_devices,
               std::vector<PJRT_Device*> devices, std::unique_ptr<Platform> platform,
               std::shared_ptr<CudaDriver> driver, std::shared_ptr<Client> host)
    : api_(api),
      client_(client),
      is_ours_(is_ours),
      num_devices_(num_devices),
      devices_(std::move(devices)),
      platform_(std::move(platform)),
      driver_(std::move(driver)),
      host_(std::move(host)),
      launcher_(Lanes(num_devices), platform_->window()) {}

Client::~Client() {
  launcher_.Shutdown();
  if (!is_ours_ || IsForked()) return;
  JO_PJRT_ARGS(PJRT_Client_Destroy, args);
  args.client = client_;
  PJRT_Error* const error = api_->PJRT_Client_Destroy(&args);
  if (error != nullptr) TakeMessage(api_, error);
}

std::string Client::platform_name() const {
  JO_PJRT_ARGS(PJRT_Client_PlatformName, args);
  args.client = client_;
  Check(api_, api_->PJRT_Client_PlatformName(&args), "asking for the platform's name");
  return std::string(args.platform_name, args.platform_name_size);
}

std::string Client::platform_version() const {
  JO_PJRT_ARGS(PJRT_Client_PlatformVersion, args);
  args.client = client_;
  Check(api_, api_->PJRT_Client_PlatformVersion(&args), "asking for the platform's version");
  return std::string(args.platform_version, args.platform_version_size);
}

std::vector<std::pair<std::string, Client::Attribute>> Client::attributes() const {
  JO_PJRT_ARGS(PJRT_Plugin_Attributes, args);
  Check(api_, api_->PJRT_Plugin_Attributes(&args), "asking for the plugin's attributes");
  std::vector<std::pair<std::string, Attribute>> found;
  for (size_t i = 0; i < args.num_attributes; ++i) {
    const PJRT_NamedValue& value = args.attributes[i];
    found.emplace_back(std::string(value.name, value.name_size), ToAttribute(value));
  }
  const PJRT_Api_Version& version = api_->pjrt_api_version;
  found.emplace_back("pjrt_c_api_version",
                     std::vector<int64_t>{version.major_version, version.minor_version});
  return found;
}

std::shared_ptr<Executable> Client::Compile(const std::string& code, const std::string& options) {
  home_.CheckNotForked();
  static const char kFormat[] = "mlir";
  PJRT_Program program;
  std::memset(&program, 0, sizeof(program));
  program.struct_size = PJRT_Program_STRUCT_SIZE;
  program.code = const_cast<char*>(code.data());  // the API has one struct for in and out
  program.code_size = code.size();
  program.format = kFormat;
  program.format_size = sizeof(kFormat) - 1;
  JO_PJRT_ARGS(PJRT_Client_Compile, args);
  args.client = client_;
  args.program = &program;
  args.compile_options = options.data();
  args.compile_options_size = options.size();
  Check(api_, api_->PJRT_Client_Compile(&args), "compiling a kernel");
  return std::make_shared<Executable>(shared_from_this(), args.executable,
                                      Executable::Origin::kCompiled);
}

std::shared_ptr<Executable> Client::Load(const std::string& serialized) {
  home_.CheckNotForked();
  if (api_->PJRT_Executable_DeserializeAndLoad == nullptr) {
    throw std::runtime_error("loading a kernel: the plugin cannot");
  }
  JO_PJRT_ARGS(PJRT_Executable_DeserializeAndLoad, args);
  args.client = client_;
  args.serialized_executable = serialized.data();
  args.serialized_executable_size = serialized.size();
  Check(api_, api_->PJRT_Executable_DeserializeAndLoad(&args), "loading a kernel");
  return std::make_shared<Executable>(shared_from_this(), args.loaded_executable,
                                      Executable::Origin::kLoaded);
}

std::shared_ptr<Executable> Client::AdoptExecutable(PJRT_LoadedExecutable* loaded) {
  if (loaded == nullptr) {
    throw std::invalid_argument("Client: executable=0 is no address of an executable");
  }
  return std::make_shared<Executable>(shared_from_this(), loaded, Executable::Origin::kAdopted);
}

void Client::RegisterFfiHandlers(const std::vector<std::pair<std::string, void*>>& handlers) {
  for (const auto& [name, handler] : handlers) RegisterFfiHandler(api_, name, handler);
}

namespace {

// A run without vertices whose Begin has the arenas to itself.
class AloneBackend : public Backend {
 public:
  explicit AloneBackend(std::function<void()> task) : task_(std::move(task)) {}
  char* DeviceBase(int32_t) override { return nullptr; }
  char* HostBase() override { return nullptr; }
  void Begin(RunContext&) override { task_(); }
  bool Execute(int32_t, RunContext&, std::string*) override { return true; }
  void End(RunContext&) override {}

 private:
  const std::function<void()> task_;
};

}  // namespace

void Client::Trim() {
  if (IsForked()) return;  // no run has used anything here, nor will
  RunAlone([this] { platform().Trim(); });
}

void Client::Settle(const char* array) {
  Residents& residents = platform().residents();
  if (!residents.Owes(array)) return;
  if (IsForked() && platform().window() > 0) {
    throw std::runtime_error(
        "the array is on the GPU, which a forked process cannot use. Read it before the fork, or "
        "call release() of the function that made it.");
  }
  // No run writes to a place that is known here: those that are under way have asked for theirs.
  residents.Settle(array, [this](const Resident& each) { platform().Pay(each); });
}

void Client::RunAlone(std::function<void()> task) {
  PlanArrays empty;
  empty.succ_offsets = empty.input_offsets = empty.output_offsets = empty.dims_offsets = {0};
  auto plan = std::make_shared<LoadedPlan>(LoadedPlan::Load(std::move(empty), num_devices(), 0));
  auto run = std::make_shared<Run>(plan, std::make_shared<AloneBackend>(std::move(task)),
                                   std::vector<char*>(), std::vector<char*>(), RunOptions());
  launcher_.Submit(run);
  run->Wait();
  const std::string& error = run->report()->error_message;
  if (!error.empty()) throw std::runtime_error(error);
}

Executable::Executable(std::shared_ptr<Client> client, PJRT_LoadedExecutable* loaded, Origin origin)
    : client_(std::move(client)), loaded_(loaded), origin_(origin) {
  ReadMetadata();
}

Executable::~Executable() {
  if (origin_ == Origin::kAdopted || client_->IsForked()) return;
  JO_PJRT_ARGS(PJRT_LoadedExecutable_Destroy, args);
  args.executable = loaded_;
  PJRT_Error* const error = client_->api()->PJRT_LoadedExecutable_Destroy(&args);
  if (error != nullptr) TakeMessage(client_->api(), error);
}

void Executable::Deleter::operator()(PJRT_Executable* executable) const {
  JO_PJRT_ARGS(PJRT_Executable_Destroy, args);
  args.executable = executable;
  PJRT_Error* const error = api->PJRT_Executable_Destroy(&args);
  if (error != nullptr) TakeMessage(api, error);
}

Executable::Handle Executable::Program() const {
  const PJRT_Api* const api = client_->api();
  JO_PJRT_ARGS(PJRT_LoadedExecutable_GetExecutable, get);
  get.loaded_executable = loaded_;
  Check(api, api->PJRT_LoadedExecutable_GetExecutable(&get), "reading a kernel's program");
  return Handle(get.executable, Deleter{api});
}

std::string Executable::Serialize() const {
  const PJRT_Api* const api = client_->api();
  if (origin_ != Origin::kCompiled) {
    throw std::runtime_error("serializing a kernel: only one that was compiled here has its code");
  }
  if (client_->IsForked()) throw std::runtime_error("serializing a kernel: in a forked child");
  if (api->PJRT_Executable_Serialize == nullptr) {
    throw std::runtime_error("serializing a kernel: the plugin cannot");
  }
  const Handle executable = Program();
  JO_PJRT_ARGS(PJRT_Executable_Serialize, args);
  args.executable = executable.get();
  Check(api, api->PJRT_Executable_Serialize(&args), "serializing a kernel");
  const std::unique_ptr<PJRT_SerializedExecutable, void (*)(PJRT_SerializedExecutable*)> owner(
      args.serialized_executable, args.serialized_executable_deleter);
  return std::string(args.serialized_bytes, args.serialized_bytes_size);
}

void Executable::ReadMetadata() {
  const PJRT_Api* const api = client_->api();
  JO_PJRT_ARGS(PJRT_LoadedExecutable_AddressableDevices, devices);
  devices.executable = loaded_;
  Check(api, api->PJRT_LoadedExecutable_AddressableDevices(&devices), "reading a kernel's devices");
  if (devices.num_addressable_devices > 1) {
    throw std::runtime_error("compiling a kernel: it is for several devices, but a vertex has one");
  }
  if (devices.num_addressable_devices == 1) device_ = devices.addressable_devices[0];

  const Handle executable = Program();

  JO_PJRT_ARGS(PJRT_Executable_OutputElementTypes, types);
  types.executable = executable.get();
  Check(api, api->PJRT_Executable_OutputElementTypes(&types), "reading a kernel's output types");
  output_types_.assign(types.output_types, types.output_types + types.num_output_types);

  JO_PJRT_ARGS(PJRT_Executable_OutputDimensions, dims);
  dims.executable = executable.get();
  Check(api, api->PJRT_Executable_OutputDimensions(&dims), "reading a kernel's output shapes");
  const int64_t* next = dims.dims;
  for (size_t output = 0; output < dims.num_outputs; ++output) {
    output_dims_.emplace_back(next, next + dims.dim_sizes[output]);
    next += dims.dim_sizes[output];
  }

  JO_PJRT_ARGS(PJRT_Executable_GetCompiledMemoryStats, stats);
  stats.executable = executable.get();
  Check(api, api->PJRT_Executable_GetCompiledMemoryStats(&stats), "reading a kernel's memory use");
  temp_bytes_ = stats.temp_size_in_bytes;
  argument_bytes_ = stats.argument_size_in_bytes;
  output_bytes_ = stats.output_size_in_bytes;
  alias_bytes_ = stats.alias_size_in_bytes;
  code_bytes_ = stats.generated_code_size_in_bytes;

  JO_PJRT_ARGS(PJRT_Executable_Fingerprint, fingerprint);
  fingerprint.executable = executable.get();
  PJRT_Error* const error = api->PJRT_Executable_Fingerprint(&fingerprint);
  if (error != nullptr) {
    TakeMessage(api, error);  // optional in the API
  } else {
    fingerprint_.assign(fingerprint.executable_fingerprint,
                        fingerprint.executable_fingerprint_size);
  }
}

}  // namespace jaxoffload

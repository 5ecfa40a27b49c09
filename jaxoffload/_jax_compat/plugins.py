"""PJRT plugins and clients, devices that are there or not, and what jaxlib registers."""

import contextlib
import functools
import importlib.util
import os
from typing import Any

import jax
import numpy as np
from jax._src import compiler as _compiler
from jax._src import xla_bridge as _xla_bridge
from jax._src.lib import xla_client as _xla_client
from jaxlib.mlir.dialects import stablehlo as _stablehlo

from jaxoffload._jax_compat.lowering import make_ir_context


def clients() -> list[Any]:
    """The clients that JAX has made so far."""
    return list(getattr(_xla_bridge, "_backends", {}).values())


def cpu_plugin_path() -> str:
    """Path of the XLA CPU plugin's shared library, from the package xla-cpu-pjrt.

    Raises:
      ImportError: the package is not installed.
    """
    path = _library_of("xla_plugins.xla_cpu_pjrt", "xla_cpu_pjrt.so")
    if path is not None:
        return path
    raise ImportError(
        "jaxoffload runs vertices on the XLA CPU plugin, which is not installed. "
        "Run: pip install xla-cpu-pjrt"
    )


def _library_of(package: str, file: str) -> str | None:
    """Path of a shared library in a package; None if either is not there."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = os.path.join(folder, file)
        if os.path.exists(path):
            return path
    return None


CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def cuda_plugin_path() -> str:
    """Path of the CUDA plugin that JAX loads: of the newest CUDA that is installed.

    Raises:
      ImportError: there is none.
    """
    for package in CUDA_PLUGINS:
        path = _library_of(package, "xla_cuda_plugin.so")
        if path is not None:
            return path
    raise ImportError("JAX's CUDA plugin is not installed. Run: pip install 'jaxoffload[cuda]'")


def cuda_version(path: str) -> int:
    """The major version of CUDA that a plugin is for."""
    return next(int(name[-2:]) for name in CUDA_PLUGINS if name.rpartition(".")[2] in path)


def compile_only_device(description: str) -> Any:
    """A device that is not there, for which the CUDA plugin compiles.

    Args:
      description: the text of a GpuTargetConfigProto.

    Raises:
      RuntimeError: it is not understood, or the plugin cannot be used.
    """
    from jax.experimental import topologies

    found = topologies.get_topology_desc(
        platform="cuda", target_config=description, topology="1x1x1"
    )
    return found.devices[0]


def gpu_description(device: Any) -> str:
    """The text of the GpuTargetConfigProto of a device of a CUDA client, there or not.

    Raises:
      RuntimeError: the client does not tell it.
    """
    topology = _xla_client.get_topology_for_devices([device])
    found = getattr(topology, "target_config", None)
    if not found:
        raise RuntimeError(f"{device} does not tell what its compiler has to know of it")
    return str(found)


def compile_only(device: Any, code: bytes) -> Any:
    """A portable StableHLO artifact, compiled for a device that is not there.

    Returns:
      An executable that can be looked at: `get_compiled_memory_stats`, `hlo_modules`, `serialize`.

    Raises:
      RuntimeError: XLA refuses it.
    """
    options = _xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    devices = _xla_client.DeviceList((device,))
    with make_ir_context() as context:
        module = _stablehlo.deserialize_portable_artifact(context, code)
        return device.client.compile(module, devices, options)


def compile_for_any(lowered: Any, devices: tuple[Any, ...]) -> Any:
    """A lowered function, compiled for whichever of several devices of one kind; JAX itself
    compiles for one, or for all together. It looks among what JAX keeps, as JAX does.

    Raises:
      RuntimeError: XLA refuses it.
    """
    options = _compiler.get_compile_options(1, 1, backend=devices[0].client)
    options.compile_portable_executable = True
    return _compiler.compile_or_get_cached(
        devices[0].client, lowered.compiler_ir("stablehlo"), np.array(devices[:1]), options, [],
        _xla_client.DeviceList(devices[:1]),
    )  # fmt: skip


def client_pointer(device: Any) -> int:
    """The PJRT_Client behind a device.

    Raises:
      RuntimeError: the device's client is not one of a PJRT plugin.
    """
    return _pointer(device.client, "unsafe_client_pointer", f"the PJRT client of {device}")


def executable_pointer(executable: Any) -> int:
    """The PJRT_LoadedExecutable behind a compiled program.

    Raises:
      RuntimeError: it is not one of a PJRT plugin.
    """
    what = "the PJRT executable of a compiled program"
    return _pointer(executable, "unsafe_executable_pointer", what)


def _pointer(thing: Any, name: str, what: str) -> int:
    found = getattr(thing, name, 0)
    found = found() if callable(found) else found
    if not found:
        raise RuntimeError(
            f"jax {jax.__version__} does not tell {what}. Install a version that jaxoffload "
            "supports: jax>=0.10,<0.13."
        )
    return found


def cpu_custom_call_targets() -> list[tuple[str, Any]]:
    """Handlers that jaxlib registers for its own CPU client (LAPACK, for one), by target name."""
    from jaxlib import lapack

    found = []
    for name, handler, *_ in lapack.registrations().get("cpu", ()):
        capsule = handler.get("execute") if isinstance(handler, dict) else handler
        if capsule is not None:
            found.append((name, capsule))
    return found


_OF_JAXS_CLIENT = ("xla_ffi_", "xla_buffer_", "jaxoffload")
"""How names of handlers begin that call back into that client, or are ours for it."""


def ffi_handler(name: str) -> Any:
    """What JAX's own CPU client, or the user (`jax.ffi.register_ffi_target`), has registered for
    custom calls of a name; None where there is nothing that works by itself on another client: a
    function is there, and nothing is to be done before it is called."""
    if name.startswith(_OF_JAXS_CLIENT):
        return None
    with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may name others only
        jax.devices("cpu")  # until then JAX keeps them elsewhere
    stages = _xla_client.custom_call_targets("Host").get(name, {})
    return stages["execute"] if set(stages) == {"execute"} else None


@functools.cache
def load_lapack() -> None:
    """Has jaxlib find LAPACK's functions, without which its handlers call address 0."""
    from jaxlib import lapack

    lapack.prepare_lapack_call("potrf_ffi", np.dtype(np.float32))


def xla_client() -> Any:
    """jaxlib's XLA client module."""
    return _xla_client

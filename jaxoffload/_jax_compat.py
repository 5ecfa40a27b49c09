"""The only file that touches private parts of JAX or asks for its version.

Supported: jax 0.10 to 0.12. What changes between them, or is not public, is wrapped here in a
function whose name says what we need; nothing else in the package imports `jax._src` or `jaxlib`.
"""

import contextlib
import functools
import importlib.util
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend as jex
import numpy as np
from jax._src import api_util as _api_util
from jax._src import array as _array
from jax._src import callback as _callback
from jax._src import checkify as _checkify
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import effects as _effects
from jax._src import source_info_util as _source_info_util
from jax._src import traceback_util as _traceback_util
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.interpreters import pxla as _pxla
from jax._src.lax import lax as _lax
from jax._src.lib import _jax
from jax._src.lib import xla_client as _xla_client
from jax.experimental import jet as _jet
from jaxlib.mlir import passmanager as _passes
from jaxlib.mlir.dialects import stablehlo as _stablehlo

from jaxoffload import sources

ClosedJaxpr = jex.core.ClosedJaxpr
Jaxpr = jex.core.Jaxpr
JaxprEqn = jex.core.JaxprEqn
Literal = jex.core.Literal
Primitive = jex.core.Primitive
DropVar = _core.DropVar
ShapedArray = _core.ShapedArray
Tracer = jax.core.Tracer
ArrayImpl = _array.ArrayImpl
"""The type of arrays that hold numbers. To compare types takes far less than `isinstance` with
`jax.Array`, which asks Python."""

_MOST_FRAMES = 100
"""Of a stack, those that are looked through for the user's own code."""


def hide_frames_of(file: str) -> None:
    """Keeps frames of `file` out of the source lines and tracebacks that users see."""
    _source_info_util.register_exclusion(file)
    _traceback_util.register_exclusion(file)


def clients() -> list[Any]:
    """The clients that JAX has made so far."""
    return list(getattr(_xla_bridge, "_backends", {}).values())


def source_line(source_info: Any) -> str:
    """The user's line that made an equation, "file.py:6:8 (f)".

    What an installed library made says who called it: "optax/_src/transform.py:294:15 (update_fn),
    called at train.py:12:8 (step)".
    """
    line = _source_info_util.summarize(source_info)
    if not sources.is_installed(line):
        return sources.short(line)
    # Outermost first; a library's own frames may be many.
    callers = _source_info_util.summarize(source_info, _MOST_FRAMES).split("\n")
    own = next((caller for caller in reversed(callers) if not sources.is_installed(caller)), None)
    short = sources.short(line)
    return short if own is None else f"{short}, called at {sources.short(own)}"


def at_line_of(eqn: JaxprEqn | None) -> Any:
    """A context in which equations are traced as if an equation's line had made them."""
    if eqn is None:
        return contextlib.nullcontext()
    return _source_info_util.user_context(eqn.source_info.traceback)


def physical(aval: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the bytes of an array or abstract value (a PRNG key is uint32 words)."""
    if not isinstance(aval, ShapedArray):
        aval = ShapedArray(aval.shape, aval.dtype)
    aval = _core.physical_aval(aval)
    return tuple(aval.shape), np.dtype(aval.dtype)


def byte_count(aval: Any) -> int:
    """Bytes of an array or abstract value; nothing for what has no memory (a token)."""
    if not hasattr(aval, "dtype"):
        return 0
    shape, dtype = physical(aval)
    return math.prod(shape) * dtype.itemsize


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of typed PRNG keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def is_key_dtype(value: Any) -> bool:
    """Whether something is a dtype of typed PRNG keys."""
    return isinstance(value, _dtypes.ExtendedDType) and is_key(value)


def name_arguments(function: Any, call: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Has JAX's messages about a function of flat arrays speak of the arguments of another.

    Args:
      call: what the user knows, or what wraps it.
      args, kwargs: pytrees of as many leaves as the function has arguments.
    """
    info = _api_util.debug_info("jit", call, args, kwargs)
    _api_util.save_wrapped_fun_debug_info(function, info)


def with_results(closed: Any, outvars: Sequence[Any]) -> Any:
    """A closed jaxpr that gives other variables of itself."""
    return closed.replace(jaxpr=closed.jaxpr.replace(outvars=list(outvars)))


def bits(dtype: Any) -> int:
    """Bits of an element, which below eight are fewer than those of NumPy's elements."""
    return _dtypes.itemsize_bits(dtype)


def is_array_like(x: Any) -> bool:
    """Whether a function of arrays may return it."""
    return _core.valid_jaxtype(x)


def is_extended(aval: Any) -> bool:
    """Whether a value's dtype is known to JAX only (PRNG keys, for one)."""
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)


def evaluate(eqn: JaxprEqn, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Applies one equation, with other params if need be, under the settings it was traced with."""
    context = getattr(eqn, "ctx", None)
    with context.manager if context is not None else contextlib.nullcontext():
        functions, bind_params = _bind_params(eqn.primitive, params)
        out = eqn.primitive.bind(*functions, *operands, **bind_params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _bind_params(primitive: Any, params: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    found = primitive.get_bind_params(params)
    return found if isinstance(found, tuple) else ((), found)


def effect_kind(effect: Any) -> str | None:
    """What an effect is: "named axis", "check", "ref", "other"; None where it is the function's own
    affair."""
    if isinstance(effect, _core.InternalMutableArrayEffect):
        return None
    kinds = {
        "named axis": _core.NamedAxisEffect,
        "check": _checkify.ErrorEffect,
        "ref": _effects.JaxprInputEffect,
    }
    return next((name for name, kind in kinds.items() if isinstance(effect, kind)), "other")


def in_manual_region() -> bool:
    """Whether what is called now is a device's part of a `shard_map`."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


_CONSTRAINTS = frozenset({"sharding_constraint", "reshard", "mesh_cast"})


def devices_of_constraint(eqn: JaxprEqn) -> int:
    """Over how many devices an equation constrains its operand to be spread; 1 for any other."""
    if eqn.primitive.name not in _CONSTRAINTS:
        return 1
    sharding = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
    mesh = getattr(sharding, "mesh", None)
    if mesh is not None:  # an abstract one knows no devices, and that of no axes no size
        return mesh.size or 1
    return len(getattr(sharding, "device_set", ())) or 1


pure_callback_p = _callback.pure_callback_p


def call_back(callback: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """What a `pure_callback` gives for arrays in host memory, called as JAX calls it."""
    return _callback.pure_callback_impl(
        *operands, result_avals=None, callback=callback, sharding=None, vmap_method=None
    )


def without_internal_refs(closed: Any) -> Any:
    """The same closed jaxpr, with the Refs that it makes for itself replaced by values."""
    if any(isinstance(e, _core.InternalMutableArrayEffect) for e in closed.effects):
        return _pxla._discharge_internal_refs(closed)
    return closed


def committed_to(arrays: Sequence[Any]) -> Any:
    """The device to which the first array that is committed is; None if none is."""
    found = (x for x in arrays if isinstance(x, jax.Array) and x.committed)
    return next((next(iter(x.devices())) for x in found), None)


def is_ref(x: Any) -> bool:
    """Whether a leaf is a mutable array."""
    return isinstance(x, jax.Ref)


def is_symbolic(x: Any) -> bool:
    """Whether a leaf's shape is not known yet."""
    return not all(isinstance(size, int) for size in getattr(x, "shape", ()))


def is_export(lowering_context: Any) -> bool:
    """Whether what is lowered is to be serialized."""
    return lowering_context.module_context.lowering_parameters.for_export


def is_jit_disabled() -> bool:
    """Whether functions are to be called as they are, to be looked at."""
    return _config.disable_jit.value


def refuses_transfers_to_device() -> bool:
    """Whether `jax.transfer_guard` disallows transfers that nobody asked for."""
    return _config.transfer_guard_host_to_device.value in ("disallow", "disallow_explicit")


def transfers_allowed() -> contextlib.AbstractContextManager[Any]:
    """Within it `jax.transfer_guard` allows what moves nothing."""
    if _config.transfer_guard_host_to_device.value is None:
        return contextlib.nullcontext()
    return jax.transfer_guard_host_to_device("allow")


def is_tracing() -> bool:
    """Whether what is called now is staged or transformed, and not computed at once."""
    return not isinstance(_core.trace_ctx.trace, _core.EvalTrace)


def equation_context(eqn: JaxprEqn) -> tuple[Any, ...]:
    """The settings that `evaluate` puts an equation under, to be compared."""
    context = getattr(eqn, "ctx", None)
    if context is None:
        return ()
    metadata = context.xla_metadata
    return (
        context.compute_type,
        context.threefry_partitionable,
        getattr(context, "cur_abstract_mesh", None),
        getattr(context, "remove_size_one_mesh_axis", None),
        None if metadata is None else tuple(sorted(metadata.items())),
    )


def is_on_host(eqn: JaxprEqn) -> bool:
    """Whether an equation was traced to run on the host's cores (`compute_on`)."""
    return getattr(getattr(eqn, "ctx", None), "compute_type", None) == "device_host"


def asks_for_host(eqn: JaxprEqn) -> bool:
    """Whether that is asked for an equation, or for what it calls."""
    by_name = eqn.primitive.name == "compute_on" and eqn.params["compute_type"] == "device_host"
    return by_name or is_on_host(eqn)


def put(eqn: JaxprEqn, on_host: bool) -> JaxprEqn:
    """An equation that is to run on the host's cores, or is not."""
    context = getattr(eqn, "ctx", None)
    if context is None or is_on_host(eqn) == on_host:
        return eqn
    with context.manager:  # which puts the setting back
        _config.compute_on_context_manager.set_local("device_host" if on_host else None)
        return eqn.replace(ctx=type(context)())


def trace_context() -> Any:
    """All settings of JAX on which tracing and lowering depend, hashable: jit's own key."""
    return _config.trace_context()


class LoweringSettings:
    """Settings of the place where it is made that lowering an equation depends on, beside those
    that the equation itself keeps."""

    def __init__(self) -> None:
        self._x64 = _config.enable_x64.value

    def restored(self) -> contextlib.AbstractContextManager[Any]:
        """Within it they are as they were."""
        return jax.enable_x64(self._x64)


Rules = Mapping[Any, tuple[Callable[..., Any], Callable[..., bool]]]
"""For each primitive a function of its operands and params that is lowered in its place, and
whether that holds for (*abstract values of the operands, params)."""


def lower(traced: Any, platform: str, rules: Rules) -> Any:
    """Lowers a traced function for a platform, some primitives by other rules.

    They hold in every body of a loop or a branch; what a rule itself calls is lowered by JAX.
    """
    overrides: Any = tuple((p, _rule(p, *rules[p])) for p in rules)
    parameters = _mlir.LoweringParameters(override_lowering_rules=overrides)
    return traced.lower(lowering_platforms=(platform,), _private_parameters=parameters)


@functools.cache  # JAX keeps what it lowered by the rules' identity.
def _rule(primitive: Any, function: Callable[..., Any], holds: Callable[..., bool]) -> Any:
    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        chosen = function if holds(*ctx.avals_in, params) else primitive.bind
        module = ctx.module_context.replace(
            lowering_parameters=_mlir.LoweringParameters(),
            lowering_cache={},
            cached_primitive_lowerings={},
        )
        several = primitive.multiple_results
        lowered = _mlir.lower_fun(lambda *xs: chosen(*xs, **params), multiple_results=several)
        return lowered(ctx.replace(module_context=module), *operands)

    return rule


def operation_named(context: Any, name: str) -> Any:
    """What is lowered within has this name in profiles and in XLA's messages."""
    location = _mlir.ir.Location
    return location.name(f"{context.name_stack}/{name}", childLoc=location.current)


_make_ir_context = _mlir.make_ir_context
_lowering = threading.local()


@contextlib.contextmanager
def one_ir_context() -> Iterator[None]:
    """Within it what this thread lowers shares one MLIR context: to make one for each function
    takes JAX 5 ms, most of what lowering a small one takes. Constants live as long as it does."""
    _mlir.make_ir_context = _context_of_this_thread
    outer = getattr(_lowering, "make", None)
    _lowering.make = functools.cache(_make_ir_context)
    try:
        yield
    finally:
        if outer is None:
            del _lowering.make
        else:
            _lowering.make = outer


def is_lowering_kernels() -> bool:
    """Whether what this thread lowers is part of a kernel: it is within `one_ir_context`."""
    return hasattr(_lowering, "make")


def _context_of_this_thread() -> Any:
    return getattr(_lowering, "make", _make_ir_context)()


def portable_stablehlo(lowered: Any, version: str) -> bytes:
    """A lowered function as StableHLO bytecode that a consumer of `version` ("1.13.7") can read.

    It says nothing of who called the function: the same program has the same bytes everywhere.
    """
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        strip = _passes.PassManager.parse("builtin.module(strip-debuginfo)")
        strip.enable_verifier(False)  # it waits for threads, which a forked child does not have
        strip.run(module.operation)
    code = _mlir.module_to_bytecode(module)
    oldest = min((version, _stablehlo.get_current_version()), key=_version_key)
    quietly = module.context.attach_diagnostic_handler(lambda _: True)
    try:
        return bytes(_stablehlo.serialize_portable_artifact(module, oldest))
    except ValueError:
        # Of CHLO, as erf, and of what its constants become: in a context of its own, for 6 ms.
        return bytes(_jax.mlir.serialize_portable_artifact(code, oldest))
    finally:
        quietly.detach()


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


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
    with _make_ir_context() as context:
        module = _stablehlo.deserialize_portable_artifact(context, code)
        return device.client.compile(module, devices, options)


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


def pointer_of(array: jax.Array) -> int:
    """Address of an array's bytes where it is. The array must be ready and on one device."""
    return array.unsafe_buffer_pointer()


def cpu_custom_call_targets() -> list[tuple[str, Any]]:
    """Handlers that jaxlib registers for its own CPU client (LAPACK, for one), by target name."""
    from jaxlib import lapack

    found = []
    for name, handler, *_ in lapack.registrations().get("cpu", ()):
        capsule = handler.get("execute") if isinstance(handler, dict) else handler
        if capsule is not None:
            found.append((name, capsule))
    return found


@functools.cache
def load_lapack() -> None:
    """Has jaxlib find LAPACK's functions, without which its handlers call address 0."""
    from jaxlib import lapack

    lapack.prepare_lapack_call("potrf_ffi", np.dtype(np.float32))


def is_deleted(array: jax.Array) -> bool:
    """Whether an array's memory is gone. A tracer has none."""
    return not isinstance(array, Tracer) and array.is_deleted()


def is_in_rows(array: jax.Array) -> bool:
    """Whether an array's bytes are in row-major order, as programs expect them by default."""
    layout = array.format.layout  # pyrefly: ignore[missing-attribute]
    return layout is None or tuple(layout.major_to_minor) == tuple(range(array.ndim))


def weakly_typed(array: jax.Array) -> jax.Array:
    """The same array with a weak type: it gives way in promotions, as Python's numbers do."""
    return _lax._convert_element_type(array, weak_type=True)


def arrays_over(words: Sequence[np.ndarray], avals: Sequence[Any], device: Any) -> list[jax.Array]:
    """Arrays over NumPy's memory, of which there is no copy where it is aligned.

    It is what `jax.device_put` comes down to, which looks at each array a dozen times.

    Args:
      avals: `ShapedArray`s, made under the mesh that is current.
      device: to which they are committed; None: to none, on the default device.
    """
    committed = device is not None
    device = device or _pxla.get_default_device()
    sharding = jax.sharding.SingleDeviceSharding(device)
    put = _pxla.batched_device_put
    with transfers_allowed():
        return [
            put(aval, sharding, [each], [device], committed)
            for each, aval in zip(words, avals, strict=True)
        ]


def keep_alive(lowering_context: Any, thing: Any) -> None:
    """Keeps `thing` alive for as long as the executable that is being lowered."""
    lowering_context.module_context.add_keepalive(thing)


def xla_client() -> Any:
    """jaxlib's XLA client module."""
    return _xla_client


def key_impl_name(dtype: Any) -> str:
    """The name of a key dtype's PRNG implementation, as `wrap_key_data` takes it."""
    return dtype._impl.name


def int64_attribute(value: int) -> Any:
    """An integer as an FFI attribute of type int64."""
    return np.int64(value)


def batched(jaxpr: Any, axis: Any, in_axes: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A closed jaxpr mapped over an axis, as batching rules are given it.

    Args:
      in_axes: for each operand the mapped dimension, or None.

    Returns:
      The mapped jaxpr, and the mapped dimension of each result, None where the axis makes no
      difference to it.
    """
    return _batching.batch_jaxpr2(jaxpr, axis, in_axes)


def register_batcher(primitive: Any, rule: Any) -> None:
    """Has `vmap` call `rule(axis, operands, dims, **params)`, which sees named axes."""
    _batching.fancy_primitive_batchers[primitive] = rule


def checked(
    jaxpr: Any, error: Any, enabled: Any, operands: Sequence[Any]
) -> tuple[list[Any], Any, Any]:
    """A closed jaxpr with `checkify`'s checks.

    Args:
      error: what has failed before.
      enabled: kinds of checks, as the rule was given them.
      operands: arrays or tracers, for their shapes.

    Returns:
      The values of `error`, which come before the operands; the checked jaxpr; and the structure
      of its results, (error, results).
    """
    values, tree = jax.tree.flatten(error)
    avals = [_core.typeof(x) for x in (*values, *operands)]
    context, kinds = enabled
    found, out_tree, _ = _checkify.jaxpr_to_checkify_jaxpr(*context, jaxpr, kinds, tree, *avals)
    return values, found, out_tree


def register_check(primitive: Any, rule: Any) -> None:
    """Has `checkify` call `rule(error, enabled, *operands, **params)`.

    From jax 0.11 on its rules are given a context, which numbers the checks, before all else.
    """
    count = 1 if hasattr(_checkify, "CheckifyContext") else 0

    def with_context(*args: Any, **params: Any) -> Any:
        context, (error, kinds, *operands) = args[:count], args[count:]
        return rule(error, (context, kinds), *operands, **params)

    _checkify.error_checks[primitive] = with_context


def register_jet(primitive: Any, rule: Any) -> None:
    """Has `jet` call `rule(primals, series, **params)`."""
    _jet.jet_rules[primitive] = rule


def jet(function: Any, primals: Sequence[Any], series: Sequence[Any]) -> Any:
    """Taylor coefficients of a function, in the form in which `jet`'s rules have them."""
    return _jet.jet(function, primals, series, factorial_scaled=False)


def lowered_operations(closed: Any) -> Any:
    """The same jaxpr with operations of JAX's own, where it has some that a library or a newer
    transformation (`jax_remat3`) defines in terms of others; types defined so stay."""
    jaxpr = getattr(closed, "jaxpr", closed)
    if not getattr(jaxpr, "is_high", False):
        return closed
    if any(getattr(aval, "is_high", False) for aval in (*closed.in_avals, *closed.out_avals)):
        return closed
    return _partial_eval.lower_jaxpr2(closed)


def collect_released_buffers() -> None:
    """Drops the references to host memory that deleted arrays still hold, which JAX does lazily."""
    _jax.collect_garbage()


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Numbers of constants and of carried values among a scan's operands.

    jax 0.10 writes them into the params, jax 0.11 a tree of the operands.
    """
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].update(tuple(range(len(eqn.invars)))).unpack()
    return len(list(consts)), len(list(carry))


def mean_nothing(value: Any) -> bool:
    """Whether a mesh, a sharding or an environment of named axes says nothing: one device, and no
    axis has a name."""
    if isinstance(value, jax.sharding.NamedSharding):
        mesh, spec = value.mesh, value.spec
        return mean_nothing(mesh) and not any(spec) and value.memory_kind is None
    if isinstance(value, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        return value.empty
    if isinstance(value, _core.AxisEnv):
        return not (value.axis_sizes or value.spmd_axis_names or value.explicit_mesh_axis_names)
    return type(value).__name__ == "UnspecifiedValue"


@functools.cache
def own_primitives(num_modules: int) -> frozenset[int]:
    """Ids of the primitives that JAX itself defines, in modules that are loaded.

    Args:
      num_modules: how many there are: another number asks anew.
    """
    found = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "jax":
            found.update(id(x) for x in vars(module).values() if isinstance(x, Primitive))
    return frozenset(found)


def is_own_primitive(primitive: Any) -> bool:
    """Whether JAX itself defines a primitive: its name and JAX's version then say what it does."""
    return id(primitive) in own_primitives(len(sys.modules))


def own_key_impl(impl: Any) -> str | None:
    """The name of an implementation of PRNG keys, if it is one of JAX's own."""
    if type(impl).__name__ != "PRNGImpl":
        return None
    modules = [getattr(part, "__module__", "") for part in impl if callable(part)]
    return impl.name if all(module.startswith("jax.") for module in modules) else None


def is_tree_of_params(value: Any) -> bool:
    """Whether a param is a tree of JAX's own that says which operands are what (`scan_counts`)."""
    return type(value).__module__ == "jax._src.flattree"


def placement(aval: Any) -> tuple[Any, ...]:
    """What an abstract value says beside shape, dtype and weak type, to be compared."""
    manual = getattr(aval, "mat", None)
    parts = ("varying", "unreduced", "reduced", "unreduced_kind")
    layout = getattr(aval, "layout", None)
    return (
        aval.sharding,
        aval.memory_space,
        getattr(aval, "vma", None),
        *(getattr(manual, part, None) for part in parts),
        None if type(layout).__name__.startswith("AutoLayout") else layout,
    )


def evaluate_alone(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Applies one equation of a device's part of a `shard_map` as if there were no mesh around it:
    what says where results are to be is left out."""
    params = {
        name: None if name in ("sharding", "out_sharding") else value
        for name, value in eqn.params.items()
    }
    context = getattr(eqn, "ctx", None)
    with (
        context.manager if context is not None else contextlib.nullcontext(),
        no_mesh(),
        at_line_of(eqn),
    ):
        functions, bind_params = _bind_params(eqn.primitive, params)
        out = eqn.primitive.bind(*functions, *operands, **bind_params)
    return list(out) if eqn.primitive.multiple_results else [out]


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """In which no mesh is around what is traced."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def sharding_in_type(array: Any) -> Any:
    """How an array, or what has its shape, is spread, where that is part of its type: over axes of
    a mesh that are explicit. None elsewhere."""
    sharding = getattr(array, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if isinstance(array, Tracer) or mesh is None or mesh.size == 1:
        return None
    explicit = jax.sharding.AxisType.Explicit
    return sharding if explicit in mesh.axis_types else None

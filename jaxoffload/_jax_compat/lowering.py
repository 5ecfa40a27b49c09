"""Jaxprs to StableHLO, by rules of ours where there are some."""

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax._src import config as _config
from jax._src import dispatch as _dispatch
from jax._src.interpreters import mlir as _mlir
from jax._src.lib import _jax
from jax._src.sharding_impls import ShardingContext as _ShardingContext
from jaxlib.mlir import passmanager as _passes
from jaxlib.mlir.dialects import stablehlo as _stablehlo


def is_export(lowering_context: Any) -> bool:
    """Whether what is lowered is to be serialized."""
    return lowering_context.module_context.lowering_parameters.for_export


def is_to_be_partitioned(lowering_context: Any) -> bool:
    """Whether XLA divides what is lowered among the devices of one mesh, all of this process, and
    can be asked how."""
    axes = lowering_context.module_context.axis_context
    if not isinstance(axes, _ShardingContext) or axes.device_assignment is None:
        return False
    mesh = axes.abstract_mesh
    return (
        axes.num_devices > 1
        and mesh is not None
        and mesh.size == axes.num_devices
        and not {d.process_index for d in axes.device_assignment} - {jax.process_index()}
        and _config.use_shardy_partitioner.value
    )


def needs_devices_to_be_lowered(primitive: Any) -> None:
    """Has JAX tell lowerings of a primitive which devices they are for."""
    _dispatch.prim_requires_devices_during_lowering.add(primitive)


def lower_partitioned(lowering_context: Any, call: Any, *operands: Any) -> Any:
    """Lowers a `custom_partitioning`. What JAX keeps for its callbacks would lead back to itself,
    and so keep what lives as long as the program until the garbage is collected."""
    module = lowering_context.module_context
    before = len(module.keepalives)
    made = _mlir.lower_fun(call, multiple_results=True)(lowering_context, *operands)
    needed = types.SimpleNamespace(platforms=module.platforms, backend=module.backend)
    for kept in module.keepalives[before:]:
        if getattr(kept, "module_context", None) is module:
            kept.module_context = needed
    return made


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


make_ir_context = _mlir.make_ir_context
"""JAX's own, whatever `one_ir_context` has put in its place."""
_new_ir_context = getattr(_mlir, "_create_ir_context", make_ir_context)
"""One that JAX uses for nothing else: it may be compiling what it has lowered in one of its own
while it asks for kernels (custom_partitioning). JAX 0.12 gives each of those several times."""
_USES = 10
"""How often kernels are lowered in one context before there is another: what programs leave in it,
constants among that, goes with it. JAX 0.12 does the same."""
_KEPT = 4
"""Contexts that wait to be used again: as many threads lower kernels at once."""
_kept: list[tuple[Any, int]] = []
"""Contexts that no thread uses now, and how often each may still be used. Not by thread: what is in
the locals of a thread that Python did not start cannot be let go with them (Python 3.11)."""


class _Lowering(threading.local):
    """What gives this thread its context while it lowers kernels."""

    make: Callable[[], Any] | None = None


_lowering = _Lowering()


@contextlib.contextmanager
def one_ir_context() -> Iterator[None]:
    """Within it what this thread lowers shares one MLIR context, in which other kernels may have
    been lowered before: to make one takes JAX 5 ms, most of what a small function takes."""
    _mlir.make_ir_context = _context_of_this_thread
    outer, used = _lowering.make, []

    def make() -> Any:
        if not used:
            try:
                used.append(_kept.pop())
            except IndexError:
                used.append((_new_ir_context(), _USES))
        return used[0][0]

    _lowering.make = make
    try:
        yield
    finally:
        _lowering.make = outer
        _kept.extend((context, uses - 1) for context, uses in used if uses > 1)
        del _kept[_KEPT:]


def is_lowering_kernels() -> bool:
    """Whether what this thread lowers is part of a kernel: it is within `one_ir_context`."""
    return _lowering.make is not None


def _context_of_this_thread() -> Any:
    found = (_lowering.make or make_ir_context)()
    # What is lowered while something else is gets one of its own: in the other's, JAX 0.10 would
    # put copies of it where the other goes on.
    return _new_ir_context() if found is _mlir.ir.Context.current else found


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
        try:
            return bytes(_jax.mlir.serialize_portable_artifact(code, oldest))
        except _jax.JaxRuntimeError:
            # From 0.12 on, running sums on a GPU: no StableHLO stands for them.
            return bytes(_jax.mlir.serialize_portable_artifact(code, oldest, True))
    finally:
        quietly.detach()


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def keep_alive(lowering_context: Any, thing: Any) -> None:
    """Keeps `thing` alive for as long as the executable that is being lowered."""
    lowering_context.module_context.add_keepalive(thing)

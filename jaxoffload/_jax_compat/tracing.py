"""What is around a call: source lines, and the settings that hold now."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import api_util as _api_util
from jax._src import config as _config
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax._src import source_info_util as _source_info_util
from jax._src import traceback_util as _traceback_util

from jaxoffload import sources
from jaxoffload._jax_compat.types import JaxprEqn

_MOST_FRAMES = 100
"""Of a stack, those that are looked through for the user's own code."""


def hide_frames_of(file: str) -> None:
    """Keeps frames of `file` out of the source lines and tracebacks that users see."""
    _source_info_util.register_exclusion(file)
    _traceback_util.register_exclusion(file)


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


def with_line_of(eqn: JaxprEqn, caller: JaxprEqn | None) -> JaxprEqn:
    """An equation of the body of another, at that one's line where it has none of the user's: JAX
    keeps the bodies of its own jitted functions (a Cholesky factorization's derivative) without."""
    if caller is None or _source_info_util.user_frame(eqn.source_info.traceback) is not None:
        return eqn
    return eqn.replace(source_info=caller.source_info)


def at_line_of(eqn: JaxprEqn | None) -> Any:
    """A context in which equations are traced as if an equation's line had made them."""
    if eqn is None:
        return contextlib.nullcontext()
    return _source_info_util.user_context(eqn.source_info.traceback)


def name_arguments(function: Any, call: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Has JAX's messages about a function of flat arrays speak of the arguments of another.

    Args:
      call: what the user knows, or what wraps it.
      args, kwargs: pytrees of as many leaves as the function has arguments.
    """
    info = _api_util.debug_info("jit", call, args, kwargs)
    _api_util.save_wrapped_fun_debug_info(function, info)


def in_manual_region() -> bool:
    """Whether what is called now is a device's part of a `shard_map`."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def is_jit_disabled() -> bool:
    """Whether functions are to be called as they are, to be looked at."""
    return _config.disable_jit.value


def refuses_transfers_to_device() -> bool:
    """Whether `jax.transfer_guard` disallows transfers that nobody asked for."""
    return _config.transfer_guard_host_to_device.value in ("disallow", "disallow_explicit")


def looks_for_special_values() -> bool:
    """Whether `jax_debug_nans` or `jax_debug_infs` is set."""
    return _config.debug_nans.value or _config.debug_infs.value


def unchecked(program: Callable[..., Any]) -> Callable[..., Any]:
    """A program of ours, or its trace, which what JAX checks in the user's is not about.

    `jax_debug_nans` has JAX donate nothing, and read results, which JAX remembers, that hold what
    was there before runs have written there. `jax_debug_key_reuse` follows keys through a program,
    and a kernel is a part of one.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if not (looks_for_special_values() or _config.debug_key_reuse.value):
            return program(*args, **kwargs)
        with jax.debug_nans(False), jax.debug_infs(False), jax.debug_key_reuse(False):
            return program(*args, **kwargs)

    return call


def transfers_allowed() -> contextlib.AbstractContextManager[Any]:
    """Within it `jax.transfer_guard` allows what moves nothing."""
    if _config.transfer_guard_host_to_device.value is None:
        return contextlib.nullcontext()
    return jax.transfer_guard_host_to_device("allow")


def is_tracing() -> bool:
    """Whether what is called now is staged or transformed, and not computed at once."""
    return not isinstance(_core.trace_ctx.trace, _core.EvalTrace)


def trace_context() -> Any:
    """All settings of JAX on which tracing and lowering depend, hashable: jit's own key."""
    return _config.trace_context()


def context_mesh() -> Any:
    """The mesh that `jax.set_mesh` has set, with its devices, under `jit` as well; None: none, or
    one of a single device. It is no part of `trace_context`, which knows its axes alone."""
    mesh = _mesh.get_concrete_mesh()
    return None if mesh is None or mesh.size <= 1 else mesh


def optimizes_little() -> bool:
    """Whether programs are to be compiled soon, however slow: `jax_disable_most_optimizations`."""
    return bool(jax.config.read("jax_disable_most_optimizations"))


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """In which no mesh is around what is traced."""
    return jax.sharding.use_abstract_mesh(_NO_MESH)


_NO_MESH = jax.sharding.AbstractMesh((), ())

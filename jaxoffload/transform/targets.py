"""The custom calls that XLA programs make of us, registered with JAX (custom_calls/ffi.h)."""

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from jaxoffload import _jax_compat as compat
from jaxoffload import _native
from jaxoffload.options import Options
from jaxoffload.runtime import backends
from jaxoffload.transform.held import Held

RUN_TARGET = "jaxoffload_run"
DEVICES_TARGET = "jaxoffload_run_devices"
_STAMPS_TARGET = "jaxoffload_stamps"


@functools.cache
def register_target(backend_name: str) -> None:
    """Tells XLA of the launcher."""
    backends.get(backend_name)
    # JAX keeps what is registered before its client is made, and would give XLA the targets
    # before their types, which XLA refuses.
    jax.local_devices(backend=backend_name)
    platform = {"cpu": "cpu", "cuda": "CUDA"}[backend_name]
    handlers, held = _native.ffi_targets()[platform]
    jax.ffi.register_ffi_type(f"{RUN_TARGET}_call", held, platform=platform)
    jax.ffi.register_ffi_target(RUN_TARGET, handlers, platform=platform)


@functools.cache
def register_devices_target() -> None:
    """Tells XLA of the launcher for several CPU devices."""
    jax.local_devices(backend="cpu")  # see register_target
    handlers, held = _native.devices_target()
    jax.ffi.register_ffi_type(f"{DEVICES_TARGET}_call", held, platform="cpu")
    jax.ffi.register_ffi_target(DEVICES_TARGET, handlers, platform="cpu")


def lower_call(
    target: str,
    context: Any,
    operands: Sequence[Any],
    registration: Any,
    name: str,
    options: Options,
    constants: Sequence[Any],
    constants_at: int | None = None,
    aliases: Mapping[int, int] | None = None,
    has_effect: bool = False,
    **attributes: int,
) -> list[Any]:
    """A custom call of a plan, as a program that is being lowered has it.

    Args:
      operands: values of the program, as `context` has their shapes.
      registration: of the plan; lives as long as the program.
      name: the user's function.
      constants: of the plan: operands, too.
      constants_at: how many operands are before them; None: all.
      aliases: results by the operands that they are written over.
      has_effect: whether it is called although nobody reads its results.
      attributes: further ones.
    """
    owner = getattr(_owners, "owner", None)
    if owner is None:
        compat.keep_alive(context, Held(name, registration))
    else:
        owner.append(registration)
    at = len(operands) if constants_at is None else constants_at
    operands = [*operands[:at], *map(mlir.ir_constant, constants), *operands[at:]]
    extra = [compat.ShapedArray(c.shape, c.dtype) for c in constants]
    # One result more, of no bytes, that nobody reads: were the call all that the body of a loop
    # does, XLA would make it the body's root, and take what it passes on for what it returns.
    unread = compat.ShapedArray((0,), np.dtype(np.uint8))
    context = context.replace(
        avals_in=[*context.avals_in[:at], *extra, *context.avals_in[at:]],
        avals_out=[*context.avals_out, unread],
    )
    launch = {
        "policy": options.launch.code,
        "seed": options.launch.seed,
        "max_delay_us": round(options.launch.max_delay_seconds * 1e6),
        "check": options.check,
    }
    rule = jax.ffi.ffi_lowering(
        target, operand_output_aliases=dict(aliases or {}), has_side_effect=has_effect
    )
    with compat.operation_named(context, f"jaxoffload {name}"):
        *results, _ = rule(
            context,
            *operands,
            key=registration.key,
            launch={key: np.int64(value) for key, value in launch.items()},
            **{key: np.int64(value) for key, value in attributes.items()},
        )
    return results


_owners = threading.local()


@contextlib.contextmanager
def kept_by(owner: list[Any]) -> Iterator[None]:
    """Calls that this thread lowers within it are kept alive by `owner`, and not by the program:
    what is lowered is a part of one."""
    _owners.owner = owner
    try:
        yield
    finally:
        _owners.owner = None


def new_stamps(operands: Sequence[Any]) -> Any:
    """The first of as many stamps as there are operands, by which calls know them again, made each
    time a program comes to it: uint32[2]. None of none. On CPU only.

    They are operands so that XLA makes it once only where they are the same, too.
    """
    if not operands:
        return None
    _register_stamps()
    return jax.ffi.ffi_call(_STAMPS_TARGET, jax.ShapeDtypeStruct((2,), np.uint32))(*operands)


@functools.cache
def _register_stamps() -> None:
    jax.ffi.register_ffi_target(_STAMPS_TARGET, _native.stamps_handler(), platform="cpu")

"""The custom calls that XLA programs make of us, registered with JAX (custom_calls/ffi.h)."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxoffload import _native
from jaxoffload.runtime import backends

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

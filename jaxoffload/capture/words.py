"""What the runtime moves as other numbers: PRNG keys, elements of less than a byte, and of none.

A typed key is its words (uint32). int4, uint4, int2, uint2 and float4 share bytes in XLA's buffers,
and a plan moves whole bytes: here each is a uint8 whose low bits it has, which is how NumPy keeps
them, too. float0, the derivative of an integer, has a shape and no bits: booleans stand for it, as
in JAX's own programs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxoffload import _jax_compat as compat

Code = Any
"""The name of a key's PRNG implementation, the dtype of small elements or float0, or None for all
others."""

_FLOAT0 = np.dtype(jax.dtypes.float0)


def code_of(x: Any) -> Code:
    """How an array, tracer or shape is to be moved."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return None
    if compat.is_key(dtype):
        return compat.key_impl_name(dtype)
    return np.dtype(dtype) if dtype == _FLOAT0 or compat.is_small(dtype) else None


def moved_dtype(dtype: Any) -> Any:
    """The dtype as which the runtime moves elements of a dtype that is no key's."""
    if dtype == _FLOAT0:
        return np.dtype(np.bool_)
    return np.dtype(np.uint8) if compat.is_small(dtype) else np.dtype(dtype)


def encoded(x: Any, code: Code) -> Any:
    """An array or tracer as what is moved."""
    if code is None:
        return x
    if isinstance(code, str):
        return jax.random.key_data(x)
    if code == _FLOAT0:
        return np.zeros(x.shape, np.bool_)
    if isinstance(x, np.ndarray):
        return x.view(np.uint8)
    return lax.convert_element_type(lax.bitcast_convert_type(x, _unsigned(code)), np.uint8)


def decoded(x: Any, code: Code) -> Any:
    """The array or tracer that was moved as `x`."""
    if code is None:
        return x
    if isinstance(code, str):
        return jax.random.wrap_key_data(x, impl=code)
    if code == _FLOAT0:
        return np.zeros(x.shape, _FLOAT0)
    if isinstance(x, np.ndarray):
        return x.view(code)
    return lax.bitcast_convert_type(lax.convert_element_type(x, _unsigned(code)), code)


def _unsigned(dtype: Any) -> Any:
    return jnp.uint4 if compat.bits(dtype) == 4 else jnp.uint2


compat.hide_frames_of(__file__)

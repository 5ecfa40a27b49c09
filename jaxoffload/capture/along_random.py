"""Random bits, part by part: those of an element follow from its key and its place alone.

So it is of JAX's own generator where `jax_threefry_partitionable` is on, as it is by default. What
is made of bits (uniform and normal numbers, masks of a dropout) need not be there whole then.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.along_places import by_place
from jaxoffload.capture.flat import Equation
from jaxoffload.capture.way import Way, unchanged

OPERATIONS = 500.0
"""Of floating point in whose time bits are made for one element: of integers it takes 110, 20
rounds of five and the key's."""


def bits(equation: Equation) -> Iterator[Way]:
    """Along the dimensions of the keys, and along those of the bits of each."""
    (keys,), params = equation.inputs, equation.operation.params
    batch, shape = len(keys.aval.shape), tuple(params["shape"])
    for d in range(batch):
        yield Way((d,), (d,), unchanged)
    if not _is_by_place(keys.aval.dtype) or math.prod(shape) >= 2**32:
        return
    for d in range(len(shape)):

        def rows(keys: Any, first: Any, size: int, d: int = d) -> list[Any]:
            places = _places(shape, d, first, size)
            return [_bits_at(jax.random.key_data(keys), places, params["bit_width"])]

        yield by_place(equation, (None,), batch + d, rows)


def _is_by_place(dtype: Any) -> bool:
    is_partitionable = jax.config.jax_threefry_partitionable  # pyrefly: ignore[missing-attribute]
    return is_partitionable and compat.key_impl_name(dtype) == "threefry2x32"


def _places(shape: Sequence[int], dim: int, first: Any, size: int) -> Any:
    """Of a part of an array in row-major order, the place of each element in the whole."""
    part = (*shape[:dim], size, *shape[dim + 1 :])
    found = jnp.zeros(part, np.uint32)
    for d in range(len(shape)):
        at = lax.broadcasted_iota(np.uint32, part, d)
        if d == dim:
            at = at + jnp.asarray(first, np.uint32)
        found = found + at * np.uint32(math.prod(shape[d + 1 :]))
    return found


def _bits_at(words: Any, places: Any, width: int) -> Any:
    """Bits of a key's words, or of an array of keys, for elements at these places."""
    if words.ndim > 1:
        return jax.vmap(lambda each: _bits_at(each, places, width))(words)
    high, low = threefry2x32_p.bind(words[0], words[1], jnp.zeros_like(places), places)
    dtype = jnp.dtype(f"uint{width}")
    if width == 64:
        return lax.shift_left(high.astype(dtype), jnp.asarray(32, dtype)) | low.astype(dtype)
    return lax.convert_element_type(high ^ low, dtype)

"""Convolutions in the one form for which XLA's CPU compiler has fast code, wherever they stand.

That form is batch, space, features; the compiler brings convolutions into it by itself, but only
those of a program's entry, not of the bodies of loops and branches. There the gradient of a
convolution by its weights, which is one whose batch and features have changed places, takes a
hundred times as long. So operands are transposed here, as the compiler would outside.

Depthwise convolutions, for which its code is slow everywhere, are sums of shifted products instead
(by a factor of ten to forty, and linear in the channels where a gradient by the weights would be
quadratic).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxoffload.capture.sums import converted, wider
from jaxoffload.compile.reductions import reduce_sum

MOST_SHIFTS = 64
"""Positions of a depthwise kernel up to which each is a product of its own."""


def convolution(
    x: Any,
    kernel: Any,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    precision: Any = None,
    preferred_element_type: Any = None,
    **_: Any,
) -> Any:
    """What `conv_general_dilated` computes, operands and result in any order of dimensions."""
    numbers = dimension_numbers
    x = lax.transpose(x, (numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1]))
    order = (*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0])
    kernel = lax.transpose(kernel, order)
    window = (tuple(window_strides), tuple(padding), tuple(lhs_dilation), tuple(rhs_dilation))
    dtype = preferred_element_type or x.dtype
    groups, batch_groups = feature_group_count, batch_group_count
    if _is_depthwise_gradient(x, kernel, batch_groups, window):
        found = _depthwise_gradient(x, kernel, window, dtype)
    else:
        if batch_groups > 1:
            # The groups' images become groups of features of as many images as one group has.
            x = x.reshape(batch_groups, -1, *x.shape[1:])
            x = jnp.moveaxis(x, 0, -2)
            x, groups = x.reshape(*x.shape[:-2], -1), batch_groups
        if _is_depthwise(x, kernel, groups):
            found = _depthwise(x, kernel, window, dtype)
        else:
            space = "DHW"[5 - x.ndim :] if x.ndim <= 5 else None
            assert space is not None  # `is_slow`
            if min(itertools.chain(*padding)) < 0:
                # XLA's CPU compiler reads beside images that are cut off so (as of jaxlib 0.10).
                ones, nothing = (1,) * len(padding), ((0, 0),) * len(padding)
                x, window = _padded(x, window), (window[0], nothing, ones, window[3])
            found = lax.conv_general_dilated(
                x,
                kernel,
                *window,
                dimension_numbers=(f"N{space}C", f"{space}IO", f"N{space}C"),
                feature_group_count=groups,
                precision=precision,
                preferred_element_type=preferred_element_type,
            )
    places = (numbers.out_spec[0], *numbers.out_spec[2:], numbers.out_spec[1])
    return lax.transpose(found, tuple(places.index(d) for d in range(found.ndim)))


def is_slow(x: Any, kernel: Any, params: dict[str, Any]) -> bool:
    """Whether a convolution of two abstract values is one that `convolution` makes faster, or
    right."""
    if not (3 <= x.ndim <= 5 and jnp.issubdtype(x.dtype, jnp.floating) and x.size and kernel.size):
        return False
    if jnp.dtype(x.dtype).itemsize == 1:
        return False
    numbers = params["dimension_numbers"]
    last = x.ndim - 1
    in_order = (0, last, *range(1, last))
    is_canonical = (
        tuple(numbers.lhs_spec) == tuple(numbers.out_spec) == in_order
        and tuple(numbers.rhs_spec) == (last, last - 1, *range(last - 1))
        and params["batch_group_count"] == 1
    )
    is_cut_off = min(itertools.chain(*params["padding"]), default=0) < 0
    return not is_canonical or params["feature_group_count"] > 1 or is_cut_off


Window = tuple[tuple[int, ...], tuple[tuple[int, int], ...], tuple[int, ...], tuple[int, ...]]
"""Strides, padding, dilation of the images, dilation of the kernel."""


def _is_depthwise(x: Any, kernel: Any, groups: int) -> bool:
    positions = math.prod(kernel.shape[:-2])
    return groups == x.shape[-1] and groups > 1 and positions <= MOST_SHIFTS


def _depthwise(x: Any, kernel: Any, window: Window, dtype: Any) -> Any:
    """Each feature by itself: the sum over the kernel's positions of shifted images."""
    sums = converted(x, wider(dtype))
    kernel = converted(kernel, wider(dtype))
    several = kernel.shape[-1] // x.shape[-1]
    total = None
    for position, part in _shifted(sums, kernel.shape[:-2], window):
        part = jnp.repeat(part, several, -1) if several > 1 else part
        part = part * lax.expand_dims(kernel[position][0], range(part.ndim - 1))
        total = part if total is None else total + part
    return converted(total, dtype)


def _is_depthwise_gradient(x: Any, kernel: Any, batch_groups: int, window: Window) -> bool:
    """Whether each of the groups has one image and one feature of the result."""
    return batch_groups > 1 and batch_groups == x.shape[0] == kernel.shape[-1]


def _depthwise_gradient(x: Any, kernel: Any, window: Window, dtype: Any) -> Any:
    """A kernel as large as the images, one image a feature: a sum of products for each of the few
    places at which the kernel lies, one after another, as their code would be long."""
    strides, _, _, dilation = window
    # Channels last: what is summed over are dimensions before them.
    x, kernel = (converted(a, wider(dtype)) for a in (x, kernel))
    x = lax.transpose(_padded(x, window), (*range(1, x.ndim), 0))
    places = _places(x.shape[:-2], kernel.shape[:-2], strides, dilation)
    sizes = [(n - 1) * d + 1 for n, d in zip(kernel.shape[:-2], dilation, strict=True)]

    def product(number: Any) -> Any:
        starts = jnp.unravel_index(number, places)
        starts = [start * stride for start, stride in zip(starts, strides, strict=True)]
        zero = jnp.zeros_like(number)  # of one dtype, with x64 as well
        part = lax.dynamic_slice(x, (*starts, zero, zero), (*sizes, *x.shape[-2:]))
        part = part[tuple(slice(None, None, d) for d in dilation)]
        return reduce_sum(part * kernel, axes=range(x.ndim - 1))

    found = lax.map(product, jnp.arange(math.prod(places), dtype=jnp.int32))
    return converted(found.reshape(1, *places, x.shape[-1]), dtype)


def _padded(x: Any, window: Window) -> Any:
    """Images with their padding, and zeros between their points."""
    _, padding, dilation, _ = window
    edges = [(low, high, d - 1) for (low, high), d in zip(padding, dilation, strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *edges, (0, 0, 0)))


def _places(
    space: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """In each dimension, at how many places a kernel lies."""
    every = zip(space, kernel, strides, dilation, strict=True)
    return tuple(max(0, (s - (k - 1) * d - 1) // stride + 1) for s, k, stride, d in every)


def _shifted(
    x: Any, kernel: Sequence[int], window: Window
) -> Iterator[tuple[tuple[int, ...], Any]]:
    """For each position of a kernel, what it meets at all the places where the kernel lies."""
    strides, _, _, dilation = window
    x = _padded(x, window)
    places = _places(x.shape[1:-1], kernel, strides, dilation)
    for position in itertools.product(*map(range, kernel)):
        first = [p * d for p, d in zip(position, dilation, strict=True)]
        steps = zip(first, places, strides, strict=True)
        limits = [start + (n - 1) * stride + 1 for start, n, stride in steps]
        limits = [max(start, limit) for start, limit in zip(first, limits, strict=True)]
        whole = ((0, *first, 0), (x.shape[0], *limits, x.shape[-1]), (1, *strides, 1))
        yield position, lax.slice(x, *whole)


RULES: dict[Any, tuple[Callable[..., Any], Callable[..., bool]]] = {
    lax.conv_general_dilated_p: (convolution, is_slow),
}
"""For each primitive what it is lowered as, and whether that holds for (*avals, params)."""

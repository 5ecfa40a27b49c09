"""Matrices in packed blocks, a quarter or an eighth of their float32 bytes.

`Quantized` stands for a matrix in a pytree of weights: `x @ q.T` and `q[tokens]` work, and what is
stored, moved and sliced are the packed bytes. They become numbers where they are used, in a few
elementwise operations that XLA fuses. Frozen: gradients go to `x`, not to the blocks.

GGUF's own layouts are kept byte for byte ("q4_0", "q4_1", "q8_0"); "int8" and "nf4" (QLoRA's 4-bit
normal floats, Dettmers et al. 2023) are made here from plain matrices.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of the normal distribution, scaled to [-1, 1]; zero is one of them."""
_NF4_HALVES = (
    np.array(NF4, np.float32)[np.arange(256) & 15],
    np.array(NF4, np.float32)[np.arange(256) >> 4],
)
"""The numbers of each byte's low half and of its high half: with one lookup for each, unpacking is
so short that it is part of the product that uses it."""

Unpack = Callable[[jax.Array, jax.Array | None], jax.Array]


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """How a row of a matrix is packed.

    Attributes:
      block: elements that share a scale; 0 for a whole row.
      bytes: of a block, scales included where they are among them.
      unpack: (packed (..., bytes of a row), scales or None) to float32 (..., elements).
    """

    block: int
    bytes: int
    unpack: Unpack


def _halves(blocks: jax.Array, at: int) -> jax.Array:
    """The float16 at a byte of each block, as float32: (..., bytes) to (..., 1)."""
    low, high = (blocks[..., i : i + 1].astype(jnp.uint16) for i in (at, at + 1))
    words = low | (high << np.uint16(8))
    return jax.lax.bitcast_convert_type(words, jnp.float16).astype(jnp.float32)


def _spread(factor: jax.Array, like: jax.Array) -> jax.Array:
    return jnp.broadcast_to(factor, like.shape)


def _blocks(packed: jax.Array, count: int) -> jax.Array:
    return packed.reshape(*packed.shape[:-1], packed.shape[-1] // count, count)


def _flat(blocks: jax.Array) -> jax.Array:
    return blocks.reshape(*blocks.shape[:-2], -1)


def _nibbles(blocks: jax.Array) -> jax.Array:
    """All low halves, then all high halves: (..., n) uint8 to (..., 2 n) float32."""
    both = jnp.concatenate([blocks & np.uint8(15), blocks >> np.uint8(4)], axis=-1)
    return both.astype(jnp.float32)


def _unpack_q4_0(packed: jax.Array, scales: jax.Array | None) -> jax.Array:
    blocks = _blocks(packed, 18)
    values = _nibbles(blocks[..., 2:]) - 8.0
    return _flat(values * _spread(_halves(blocks, 0), values))


def _unpack_q4_1(packed: jax.Array, scales: jax.Array | None) -> jax.Array:
    blocks = _blocks(packed, 20)
    values = _nibbles(blocks[..., 4:])
    factor, least = _spread(_halves(blocks, 0), values), _spread(_halves(blocks, 2), values)
    return _flat(values * factor + least)


def _unpack_q8_0(packed: jax.Array, scales: jax.Array | None) -> jax.Array:
    blocks = _blocks(packed, 34)
    values = jax.lax.bitcast_convert_type(blocks[..., 2:], jnp.int8).astype(jnp.float32)
    return _flat(values * _spread(_halves(blocks, 0), values))


def _unpack_int8(packed: jax.Array, scales: jax.Array | None) -> jax.Array:
    assert scales is not None
    values = _blocks(packed, packed.shape[-1] // scales.shape[-1]).astype(jnp.float32)
    return _flat(values * _spread(scales[..., None], values))


def _unpack_nf4(packed: jax.Array, scales: jax.Array | None) -> jax.Array:
    assert scales is not None
    codes = _blocks(packed, 32)
    values = jnp.concatenate([_looked_up(half, codes) for half in _NF4_HALVES], axis=-1)
    return _flat(values * _spread(scales[..., None], values))


def _looked_up(table: np.ndarray, codes: jax.Array) -> jax.Array:
    return jnp.asarray(table).at[codes].get(mode="promise_in_bounds")


FORMATS = {
    "q4_0": Format(32, 18, _unpack_q4_0),
    "q4_1": Format(32, 20, _unpack_q4_1),
    "q8_0": Format(32, 34, _unpack_q8_0),
    "int8": Format(0, 0, _unpack_int8),
    "nf4": Format(64, 32, _unpack_nf4),
}
MADE = ("int8", "nf4")
"""Formats that `quantize` makes."""


@jax.tree_util.register_pytree_with_keys_class
class Quantized:
    """A matrix in packed blocks; made by `quantize`, or of a file's bytes as they are.

    A registered pytree node: `lax.scan` slices it along its leading axis, `jo.host_put` moves its
    parts, `jo.offload` takes them as arguments.

    Attributes:
      packed: (..., out, bytes of a row), uint8, of "int8" int8.
      scales: (..., out, blocks of a row) float32, or None where they are among the bytes.
      kind: a name in `FORMATS`.
      dtype: of the matrix that it stands for.
      flipped: whether it stands for that of (in, out).
    """

    __array_ufunc__ = None  # `array @ q` of a NumPy array is ours

    def __init__(self, packed: Any, scales: Any, kind: str, dtype: str, flipped: bool = False):
        self.packed, self.scales = packed, scales
        self.kind, self.dtype, self.flipped = kind, np.dtype(dtype), flipped

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[Any, ...]]:
        key = jax.tree_util.GetAttrKey
        parts = (key("packed"), self.packed), (key("scales"), self.scales)
        return parts, (self.kind, self.dtype.name, self.flipped)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return (self.packed, self.scales), (self.kind, self.dtype.name, self.flipped)

    @classmethod
    def tree_unflatten(cls, kept: tuple[Any, ...], parts: Any) -> "Quantized":
        return cls(*parts, *kept)

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, out, count = self.packed.shape
        form = FORMATS[self.kind]
        fan_in = count // form.bytes * form.block if form.block else count
        return (*lead, fan_in, out) if self.flipped else (*lead, out, fan_in)

    @property
    def ndim(self) -> int:
        return len(self.packed.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes as it is."""
        return sum(x.nbytes for x in (self.packed, self.scales) if x is not None)

    @property
    def T(self) -> "Quantized":
        """The transposed matrix: the last two axes change places."""
        kept = self.kind, self.dtype.name, not self.flipped
        return Quantized(self.packed, self.scales, *kept)

    def dequantize(self) -> jax.Array:
        """The matrix that it stands for."""
        packed = jnp.asarray(self.packed)
        scales = None if self.scales is None else jnp.asarray(self.scales)
        found = FORMATS[self.kind].unpack(packed, scales).astype(self.dtype)
        return jnp.swapaxes(found, -1, -2) if self.flipped else found

    def __rmatmul__(self, x: Any) -> jax.Array:
        return _multiply(jnp.asarray(x), self)

    def __getitem__(self, rows: Any) -> jax.Array:
        """Rows of the matrix by their numbers: only they are read and unpacked."""
        if self.flipped or self.ndim != 2:
            raise TypeError(f"{self!r}[...]: only rows of one matrix (out, in) can be taken.")
        packed, scales = (None if x is None else x[rows] for x in (self.packed, self.scales))
        return Quantized(packed, scales, self.kind, self.dtype.name).dequantize()

    def permuted(self, rows: np.ndarray) -> "Quantized":
        """The rows of each matrix in another order; rows move whole, blocks are not unpacked."""
        packed, scales = (
            None if x is None else x[..., rows, :] for x in (self.packed, self.scales)
        )
        return Quantized(packed, scales, self.kind, self.dtype.name, self.flipped)

    def __repr__(self) -> str:
        if not hasattr(self.packed, "shape"):  # a tree of something else in a weight's place
            return f"Quantized({self.kind}, {self.packed!r})"
        return f"Quantized({self.kind}, {self.dtype.name}{list(self.shape)})"


@jax.custom_vjp
def _multiply(x: jax.Array, matrix: Quantized) -> jax.Array:
    return x @ matrix.dequantize()


def _multiply_forward(x: jax.Array, matrix: Quantized) -> tuple[jax.Array, Quantized]:
    # The packed bytes wait for the backward pass, not the numbers: else a scan would stack them.
    return _multiply(x, matrix), matrix


def _multiply_backward(matrix: Quantized, grad: jax.Array) -> tuple[jax.Array, None]:
    return grad @ matrix.T.dequantize(), None


_multiply.defvjp(_multiply_forward, _multiply_backward)


def quantize(matrix: Any, kind: str, block: int = 0, name: str = "matrix") -> Quantized:
    """Packs a matrix; NumPy, a matrix of the leading axes at a time.

    Args:
      matrix: (..., out, in), of any floating dtype, which is that of what it then stands for.
      kind: "int8": round(x · 127 / largest of the row); "nf4": the nearest of 16 values times the
        largest of each block of 64.
      block: "int8": elements that share a scale; 0 for a row.
      name: what messages call it.

    Raises:
      ValueError: an unknown kind, rows that are no whole number of blocks, or elements that are not
      finite.
    """
    if kind not in MADE:
        raise ValueError(f"quantize: kind={kind!r} is not known. Pass one of {', '.join(MADE)}.")
    *lead, out, fan_in = matrix.shape
    size = block or FORMATS[kind].block or fan_in
    if fan_in % size or kind == "nf4" and size != FORMATS[kind].block:
        raise ValueError(
            f"quantize: {name} has rows of {fan_in} elements, which are no whole number of {kind} "
            f'blocks of {size}. Pass kind="int8", whose blocks are rows.'
        )
    width = fan_in if kind == "int8" else fan_in // 2
    packed = np.empty((*lead, out, width), np.int8 if kind == "int8" else np.uint8)
    scales = np.empty((*lead, out, fan_in // size), np.float32)
    for i in np.ndindex(*lead):
        one = np.asarray(matrix[i] if i else matrix)
        if not np.isfinite(one).all():
            raise ValueError(f"quantize: {name} has elements that are not finite.")
        packed[i], scales[i] = _pack(one.astype(np.float32), kind, size)
    return Quantized(packed, scales, kind, np.dtype(matrix.dtype).name)


def _pack(matrix: np.ndarray, kind: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    out = matrix.shape[0]
    blocks = matrix.reshape(out, -1, size)
    largest = np.abs(blocks).max(axis=-1)
    scales = largest / 127 if kind == "int8" else largest
    factor = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    blocks = blocks * factor[..., None]
    if kind == "int8":
        return np.rint(blocks).clip(-127, 127).astype(np.int8).reshape(out, -1), scales
    values = np.array(NF4, np.float32)
    codes = np.searchsorted((values[1:] + values[:-1]) / 2, blocks).astype(np.uint8)
    half = size // 2
    return (codes[..., :half] | codes[..., half:] << 4).reshape(out, -1), scales

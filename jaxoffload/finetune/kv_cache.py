"""Keys and values of the tokens so far, in buckets that double, so that few programs take every
length.

A step adds to a small part, `Recent`, and reads the rest, `Past`, which changes once the small part
is full: in a lower tier the rest only ever comes up. It is in blocks, each read by itself, so that
a step needs room for few of them (`layers.attention`).

Shapes: L layers, B sequences, K key and value heads, D width of a head.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoffload.options import Disk
from jaxoffload.runtime.arrays import TierArray
from jaxoffload.runtime.put import disk_put, host_put

TOKENS = 256
"""Of which there is room at least in what a step adds to."""
LEAST_TOKENS = 32
_BLOCKS = 8
"""At most; more tokens make them longer."""

Pair = tuple[Any, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Past:
    """What a step reads.

    Attributes:
      blocks: pairs of keys and values, (L, B, S, K, D) each.
      length: () int32, how many tokens these hold; what follows them is never looked at.
      starts: (B,) int32, the first token of each sequence: those before it pad.
    """

    blocks: tuple[Pair, ...]
    length: Any
    starts: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Recent:
    """What a step adds to.

    Attributes:
      keys, values: (L, B, S, K, D).
      length: () int32, tokens that they hold.
    """

    keys: Any
    values: Any
    length: Any


class KVCache:
    """The cache of some sequences that are decoded together.

    Attributes:
      past, recent: what the next step takes; `recent` is to be set to what it gives.

    Args:
      shape: (L, B, K, D).
      starts: see Past.
      tier: "device", "host" or "disk", where blocks are. With "host" or "disk" what a step adds to
        is in host memory.
      disk: the folders, for "disk".
      room: tokens for which there is room at least in what a step adds to; a power of two.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dtype: Any,
        starts: np.ndarray,
        tier: str = "device",
        *,
        disk: Disk = (),
        room: int = TOKENS,
    ):
        self._shape, self._dtype = shape, np.dtype(dtype)
        self._tier, self._disk, self._room = tier, disk, room
        self._kept, self._added = 0, 0  # tokens in the blocks, and since
        self.past = Past((), jnp.int32(0), jnp.asarray(starts, jnp.int32))
        self.recent = self._new_recent(room)

    def reserve(self, count: int) -> None:
        """Makes room for the tokens of the next step; waits for the one before where what that
        added to is full."""
        if self._added + count > _length(self.recent.keys):
            if self._added:
                self._settle()
            room = max(self._room, count)
            if room == _length(self.recent.keys):
                self.recent = dataclasses.replace(self.recent, length=jnp.int32(0))
            else:
                self.recent = self._new_recent(room)
            self._added = 0
        self._added += count

    def _settle(self) -> None:
        """Moves what was added into the blocks."""
        recent = self.recent
        blocks = self._with_room(self._kept + self._added)
        for i, added in enumerate((recent.keys, recent.values)):
            _copy(added, self._added, blocks[i], self._kept)
        self._kept += self._added
        self.past = dataclasses.replace(
            self.past, blocks=tuple(zip(*blocks, strict=True)), length=jnp.int32(self._kept)
        )

    def _with_room(self, count: int) -> tuple[list[Any], list[Any]]:
        """Blocks of keys and of values in the least bucket for so many tokens."""
        old = [list(each) for each in zip(*self.past.blocks, strict=True)] or [[], []]
        capacity = had = sum(map(_length, old[0]))
        while capacity < count:
            capacity = max(2 * capacity, self._room)
        if capacity == had:
            return old[0], old[1]
        size = max(min(capacity, TOKENS), capacity // _BLOCKS)
        found = []
        for blocks in old:
            stay = blocks if blocks and _length(blocks[0]) == size else []
            made = stay + [self._zeros(size) for _ in range(capacity // size - len(stay))]
            if not stay:
                for i, block in enumerate(blocks):
                    _copy(block, _length(block), made, i * _length(block))
            found.append(made)
        return found[0], found[1]

    def _zeros(self, length: int, tier: str | None = None) -> Any:
        layers, batch, *rest = self._shape
        shape = jax.ShapeDtypeStruct((layers, batch, length, *rest), self._dtype)
        tier = tier or self._tier
        if tier == "device":
            return jnp.zeros(shape.shape, shape.dtype)
        return host_put(shape) if tier == "host" else disk_put(shape, self._disk)

    def _new_recent(self, length: int) -> Recent:
        tier = "device" if self._tier == "device" else "host"
        return Recent(self._zeros(length, tier), self._zeros(length, tier), jnp.int32(0))


def _length(array: Any) -> int:
    return array.shape[2]


def _copy(source: Any, count: int, blocks: list[Any], at: int) -> None:
    """Copies tokens to where they are among the blocks, which are of one length."""
    size, end = _length(blocks[0]), at + count
    whole = np.asarray(source) if isinstance(source, TierArray) else source
    for i in range(at // size, -(-end // size)):
        first, last = max(at, i * size), min(end, (i + 1) * size)
        part = whole[:, :, first - at : last - at]
        place, block = first - i * size, blocks[i]
        if isinstance(block, TierArray):
            block.update(np.s_[:, :, place : place + last - first], part)
        else:
            blocks[i] = _placed(block, part, place)


@functools.partial(jax.jit, donate_argnums=0)
def _placed(block: jax.Array, part: jax.Array, at: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(block, part, at, 2)

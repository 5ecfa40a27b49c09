"""Arrays of JAX's over the host memory that a run wrote.

Takes the shapes of a plan's results and the buffers of a run; gives arrays. What is the same in
every call is worked out once for a plan.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxoffload import _jax_compat as compat


def byte_count(shape: Any) -> int:
    """Bytes of an array of this shape and dtype."""
    return int(np.prod(shape.shape, dtype=np.int64)) * np.dtype(shape.dtype).itemsize


class HostResults:
    """The results of one plan, and what its arguments hold.

    Args:
      shapes: shape and dtype of each flat result.
      arguments: the same of arguments, as far as they are to be looked at.

    Attributes:
      byte_counts, argument_counts: bytes of each.
    """

    def __init__(self, shapes: Sequence[jax.ShapeDtypeStruct], arguments: Sequence[Any] = ()):
        self.byte_counts = tuple(map(byte_count, shapes))
        self.argument_counts = tuple(map(byte_count, arguments))
        self._shapes = tuple((tuple(s.shape), np.dtype(s.dtype)) for s in shapes)
        # Abstract values have the mesh in which they were made.
        self._avals: dict[Any, tuple[Any, ...]] = {}

    def arrays(self, buffers: Mapping[int, Any], device: Any) -> dict[int, jax.Array]:
        """Arrays over buffers, which live as long as they.

        Args:
          buffers: `HostBuffer`s, by result.
          device: of JAX, to which the arrays are committed; None: to none.
        """
        mesh = jax.sharding.get_abstract_mesh()
        avals = self._avals.get(mesh)
        if avals is None:
            avals = tuple(compat.ShapedArray(*shape) for shape in self._shapes)
            self._avals[mesh] = avals
        words = self.words(buffers)
        made = compat.arrays_over(list(words.values()), [avals[j] for j in words], device)
        return dict(zip(words, made, strict=True))

    def words(self, buffers: Mapping[int, Any]) -> dict[int, np.ndarray]:
        """Arrays of NumPy's over buffers, which live as long as they."""
        return {j: np.ndarray(*self._shapes[j], np.asarray(x)) for j, x in buffers.items()}

"""Arrays in host memory given to other libraries without a copy, and taken from them: DLPack.

While something of another library has an array's memory, no run writes a result over it: a donated
array's result is then in memory of its own, as `jax.jit` does it. And no run takes what the one
before has left on the device for what is there.
"""

from typing import Any

import jax
import numpy as np

from jaxoffload import _native

_CPU = (1, 0)
"""kDLCPU, its first device."""
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_BFLOAT = 4
"""DLDataTypeCode, by NumPy's kind of dtype, and of bfloat16."""


class Lendable:
    """What `numpy.from_dlpack`, `torch.from_dlpack` and their like ask of an array.

    Attributes:
      buffer: its memory; None once it is deleted.
    """

    shape: tuple[int, ...]
    dtype: Any
    buffer: Any

    @property
    def is_lent(self) -> bool:
        """Whether something of another library has its memory."""
        return self.buffer.num_loans > 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Its memory, not a copy unless `copy` asks for one: what is written there the next call of
        an offloaded function sees.

        Raises:
          BufferError: DLPack has no such dtype, or the device is no CPU. RuntimeError: it has been
          donated or deleted.
        """
        self.check_alive()
        if dl_device is not None and tuple(dl_device) != _CPU:
            raise BufferError(f"{self!r} is in host memory, and dl_device={dl_device} is no CPU.")
        is_numpys = self.dtype.isbuiltin == 1  # else of ml_dtypes, which all have one kind
        code = _CODES.get(self.dtype.kind) if is_numpys else None
        code = _BFLOAT if self.dtype.name == "bfloat16" else code
        if code is None:
            raise BufferError(f"{self!r}: DLPack has no dtype {self.dtype.name}.")
        words = np.asarray(self.buffer)  # what is still on a device comes first
        buffer = self.buffer
        if copy:
            buffer = _native.HostBuffer(len(words))
            np.asarray(buffer)[:] = words
        lent = buffer.lend(list(self.shape), code, 8 * self.dtype.itemsize)
        return lent.__dlpack__(max_version=max_version)

    def check_alive(self) -> None:
        """Raises RuntimeError if it was donated or deleted."""
        raise NotImplementedError


def taken(leaf: Any) -> Any:
    """An array of another library as NumPy's or JAX's, anything else as it is."""
    if isinstance(leaf, np.ndarray | jax.Array | Lendable) or not hasattr(leaf, "__dlpack__"):
        return leaf
    try:
        return np.from_dlpack(leaf)
    except (TypeError, RuntimeError, BufferError):  # bfloat16, for one
        return jax.dlpack.from_dlpack(leaf)

"""Calls that are like the one before: known without a look at each leaf by Python.

Takes the arguments of a call; gives its flat leaves where signature, program and device are those
of the call before, or nothing.
"""

from typing import Any

import jax
import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload import _native
from jaxoffload.runtime.arrays import HostArray
from jaxoffload.runtime.sharded import ShardedHostArray
from jaxoffload.transform.met import outside_of
from jaxoffload.transform.program import Program
from jaxoffload.transform.signature import Call

_flatten = jax.tree_util.default_registry.flatten
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    compat.ArrayImpl: compat.ARRAY_LOOKS,
    np.ndarray: ("shape", "dtype", "strides"),  # flags would keep the array
    HostArray: ("shape", "dtype", "is_deleted"),
    ShardedHostArray: ("shape", "dtype", "sharding", "is_deleted"),
}
"""Arrays that are alike in these are alike in all that a signature depends on, and in where they
are: see `known_of`."""


class Again:
    """What is known of one call, and holds for those like it. It keeps no array.

    Attributes:
      program: takes their leaves.
      device: to which results are committed, or None.
      has_numpys: whether some leaf is an array of NumPy's.
    """

    __slots__ = ("_context", "_looks", "_mesh", "_tree", "device", "has_numpys", "program")

    def __init__(self, program: Program, call: Call, device: Any):
        self.program, self.device = program, device
        self._tree, self._context = call.signature.tree, compat.trace_context()
        self._mesh = compat.context_mesh()
        self._looks = _native.Looks(call.leaves, _ATTRIBUTES)
        self.has_numpys = any(type(leaf) is np.ndarray for leaf in call.leaves)

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The leaves of a call that is computed at once and like that one; None of others."""
        leaves, tree = _flatten((list(args), kwargs))
        is_alike = (
            tree == self._tree
            and self._looks.match(leaves)
            and compat.trace_context() == self._context
            and compat.context_mesh() == self._mesh
            and not compat.is_tracing()
            and not (self.has_numpys and compat.refuses_transfers_to_device())
        )
        return leaves if is_alike else None


def known_of(program: Program, call: Call, device: Any) -> Again | None:
    """What is known of a call that is to be run; None where calls that look like it may be others.

    Args:
      device: to which its arguments are committed, or None.
    """
    signature = call.signature
    if signature.static or program.traced.has_codes:
        return None
    if any(code is not None for code in signature.codes):
        return None
    outsides = outside_of(call.leaves)
    # Numbers of Python's have become arrays, and give way in promotions as no array like them does.
    if outsides is None or any(
        weak and outside[2] is not True
        for (_, _, weak), outside in zip(signature.avals, outsides, strict=True)
    ):
        return None
    return Again(program, call, device)


compat.hide_frames_of(__file__)

"""The laws that a MemGraph must keep, and what is said of one that does not."""

import dataclasses
import enum

import numpy as np

from jaxoffload.errors import OffloadError
from jaxoffload.graphs.memgraph import Kind, Space

_SHOWN = 20
_LOWER = (Space.HOST, Space.ARGUMENT, Space.RESULT)
_ON_DISK = (Space.DISK, Space.ARGUMENT, Space.RESULT)
_READS: dict[Kind, tuple[Space, ...]] = {
    Kind.RELOAD: _LOWER,
    Kind.OFFLOAD: (Space.DEVICE, *_LOWER),
    Kind.LOAD: _ON_DISK,
    Kind.STORE: (Space.HOST,),
    Kind.HOST_KERNEL: _LOWER,
    Kind.LOAD_ROWS: _LOWER,
    Kind.STORE_ROWS: _LOWER,
    Kind.PEER_RELOAD: (Space.DEVICE,),
}
_WRITES: dict[Kind, tuple[Space, ...]] = {
    Kind.RELOAD: (Space.DEVICE,),
    Kind.OFFLOAD: (Space.HOST, Space.RESULT),
    Kind.LOAD: (Space.HOST,),
    Kind.STORE: (Space.DISK, Space.RESULT),
    Kind.HOST_KERNEL: (Space.HOST, Space.RESULT),
    Kind.LOAD_ROWS: (Space.HOST, Space.RESULT),
    Kind.STORE_ROWS: (Space.RESULT,),
    Kind.PEER_RELOAD: (Space.DEVICE,),
}
_KERNEL_READS = (Space.DEVICE, Space.ARGUMENT, Space.RESULT)
_KERNEL_WRITES = (Space.DEVICE, Space.RESULT)


def _table(allowed: dict[Kind, tuple[Space, ...]], default: tuple[Space, ...]) -> np.ndarray:
    """Whether a kind of vertex may touch a space, bool[kinds, spaces]."""
    return np.array([[space in allowed.get(kind, default) for space in Space] for kind in Kind])


MAY_READ = _table(_READS, _KERNEL_READS)
MAY_WRITE = _table(_WRITES, _KERNEL_WRITES)


class Law(enum.Enum):
    """What a violation violates."""

    SHAPE = "every vertex of the TaskGraph occurs once and reads and writes its tensors"
    BYTES = "a version holds its tensor's bytes"
    DATA = "a writer precedes its readers"
    RESULT = "every result part is written once"
    EDGES = "edges point forward, no pair twice, and data edges carry data"
    CYCLE = "there is no cycle"
    ROOM = "every place is inside its arena and aligned"
    STAYS = "what stays is a part of an argument, and alone in its place or first and last there"
    RACE = "of two versions in overlapping places one safely overwrites the other"


@dataclasses.dataclass(frozen=True, slots=True)
class Violation:
    """One broken law, in words."""

    law: Law
    text: str


class VerifyError(OffloadError):
    """A MemGraph that could give a wrong result, or none; it has not been run.

    Every plan is checked before it may run, so from a call of an offloaded function this tells of a
    fault in jaxoffload, not in the function. Please report it with the message.

    Attributes:
      violations: all that were found.
    """

    def __init__(self, violations: list[Violation], heading: str = "the MemGraph is not legal"):
        self.violations = violations
        lines = [f"- {v.law.value}: {v.text}" for v in violations[:_SHOWN]]
        if len(violations) > _SHOWN:
            lines.append(f"- and {len(violations) - _SHOWN} more")
        super().__init__(f"{heading}:\n" + "\n".join(lines))

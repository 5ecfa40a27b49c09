"""What the search for a cut (cuts.py) is given: the program at every cut, and the room for it."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from jaxoffload.capture.floor import Floor
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.search.cut import Cut


class Cutter(Protocol):
    """A program at every granularity, as far as a ranking asks (search/program.py)."""

    def key(self, cut: Cut) -> Any:
        """Equal for cuts with the same vertices."""
        ...

    def floor(self, cut: Cut) -> Floor:
        """What such a cut holds and computes at least. Nothing is captured for it."""
        ...

    def expect(self, cut: Cut) -> None:
        """Says that a cut will probably be compiled."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """What a cut has to make do with.

    Attributes:
      budget: bytes of device memory.
      host_memory: bytes of the host tier, None for no limit.
      moves: whether what does not fit may be moved away at all.
      needs: bytes of device memory that a TaskGraph needs at least.
      recompute: whether cuts that recompute are among those to try: "auto", "never", or "always":
        no others are.
      host_compute: the same of updates on the host's cores.
      counts_all: whether the budget is of all memory, so that what kernels allocate on their own,
        which grows with the vertex, counts, too.
    """

    budget: int
    host_memory: int | None
    moves: bool
    needs: Callable[[TaskGraph], int]
    recompute: str = "auto"
    host_compute: str = "never"
    counts_all: bool = False

"""The smallest feasible budget: which cut of a program needs least memory.

Takes a program at every granularity; gives the cut. Estimates lead to it: what may need least is
compiled first, and of other cuts no more than it takes to see that they need more. So most are
never compiled at all.
"""

import dataclasses
from collections.abc import Callable, Iterable

from jaxoffload.capture.operations import working_set
from jaxoffload.plan.alloc.limits import align, min_budget
from jaxoffload.search.cut import FINEST, WHOLE, CompiledCut, Cut, split_size
from jaxoffload.search.program import CutProgram

SPLITS = (1 / 4, 1 / 16, 1 / 64)
"""Working sets to split operations down to, as shares of what the largest needs."""
_ROUGHLY = 1 / 8
"""The same where one will do."""
_DOUBT = 1.25
"""What seems to need so many times another cut may still need less."""
_STEPS = 20
"""Most steps down from a feasible budget in search of a smaller one."""


def least_cut(
    program: CutProgram,
    feasible: Callable[[int], Iterable[Cut]],
    may_run_whole: bool,
    room: int | None = None,
    on_host: bool = False,
) -> CompiledCut | None:
    """The cut that needs least: of single operations, the uncut program (which needs less where XLA
    fuses well) and split operations; then whatever works with less than the best so far.

    Args:
      feasible: cuts that may work within some bytes.
      may_run_whole: whether JAX may run the program. What it takes then as the only vertex of a
        cut is not asked.
      room: bytes that it is to need at most; None: without a limit. Where no cut needs so little,
        that is mostly known before any is captured, and there is none.
      on_host: whether the host's cores do all updates.
    """
    coarse = [FINEST] if may_run_whole and program.is_one_vertex else [FINEST, WHOLE]
    least = min(min_budget(program.graph(cut))[0] for cut in coarse)
    split = [Cut(0, 1, split_size(share * least), piece_bytes=0) for share in SPLITS]
    first = [dataclasses.replace(cut, updates_on_host=on_host) for cut in (*coarse, *split)]
    cuts = _Candidates(program, first, room)
    for _ in range(_STEPS):  # where estimates lead to
        expected = cuts.least_expected()
        lower = _Candidates(program, feasible(expected - 1))
        if not lower.waiting or lower.least_expected() >= expected:
            break
        cuts.add(lower.likely())
    best = cuts.lowest(room)
    for _ in range(_STEPS):
        if best is not None:
            room = best.needs - 1
        assert room is not None, "without a limit the first one works"
        cuts.add(feasible(room))
        lower = cuts.lowest(room)
        if lower is None:
            break
        best = lower
    return best


def roughly_least_cut(program: CutProgram) -> CompiledCut:
    """About the same, sooner: operations split in one way, small ones together."""
    largest = max(map(working_set, program.ordered(FINEST).equations))
    size = split_size(_ROUGHLY * min(largest, min_budget(program.graph(WHOLE))[0]))
    cuts = [WHOLE, Cut(size, None, size, piece_bytes=0)]
    best = _Candidates(program, cuts).lowest(None)
    assert best is not None, "without a limit the first one works"
    return best


class _Candidates:
    """Cuts, of which one may need least. What surely needs more than another is not captured.

    Args:
      room: bytes that they may need at most, or None.

    Attributes:
      waiting: those that have been neither compiled nor given up.
    """

    def __init__(self, program: CutProgram, cuts: Iterable[Cut], room: int | None = None):
        self._program, self._room = program, room
        self._known: set[Cut] = set()
        self.waiting: list[Cut] = []
        self._bare: dict[Cut, int] = {}  # bytes that it needs beside workspace, once captured
        self.add(cuts)

    def add(self, cuts: Iterable[Cut]) -> None:
        """Takes in those that have not been among them."""
        new = [cut for cut in cuts if cut not in self._known]
        self._known.update(new)
        self.waiting += new if self._room is None else self._within(new, self._room)

    def least_expected(self) -> int:
        """Bytes that the best of them seems to need; more than the room where that is too much."""
        if self._room is None:
            return self._expected(self._best())[0]
        expected = self._expected(self._best())[0] if self.waiting else self._room + 1
        return min(expected, self._room + 1)

    def likely(self) -> list[Cut]:
        """Those that seem to need about as little as the best."""
        most = _DOUBT * self.least_expected()
        return [cut for cut in self.waiting if self._expected(cut)[0] <= most]

    def lowest(self, room: int | None) -> CompiledCut | None:
        """The one that needs least, its kernels compiled, if any works within a room; none of them
        is a candidate any more. Those that seem to need least are compiled first."""
        best = None
        while self.waiting:
            cut = self._best()
            self.waiting.remove(cut)
            found = self._program.within(cut, room)
            if found is not None:
                best, room = found, found.needs - 1
            if room is not None:
                self.waiting = self._within(self.waiting, room)
        return best

    def _within(self, cuts: Iterable[Cut], room: int) -> list[Cut]:
        """Those that may need no more than a room."""
        return [cut for cut in cuts if self._least(cut) <= room]

    def _best(self) -> Cut:
        """The one that seems to need least, captured."""
        while (cut := min(self.waiting, key=self._expected)) not in self._bare:
            self._bare[cut] = min_budget(self._program.graph(cut))[0]
        return cut

    def _expected(self, cut: Cut) -> tuple[int, bool]:
        """Bytes that a cut seems to need; and of equal ones those first that are captured."""
        if cut not in self._bare:
            return self._program.floor(cut).vertex_bytes, True
        return self._bare[cut] + align(self._program.expected_workspace(cut)), False

    def _least(self, cut: Cut) -> int:
        """Bytes that a cut needs in any case, as far as is known."""
        if cut not in self._bare:
            return self._program.floor(cut).vertex_bytes
        return self._bare[cut] + align(self._program.least_workspace(cut))

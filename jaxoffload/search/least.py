"""The smallest feasible budget: which cut of a program needs least memory.

Takes a program at every granularity; gives the cut. Kernels are compiled only as far as it takes to
see that a cut needs more than another.
"""

from collections.abc import Callable, Iterable

from jaxoffload.capture.group import working_set
from jaxoffload.plan.alloc.limits import min_budget
from jaxoffload.search.cuts import FINEST, WHOLE, Cut, split_size
from jaxoffload.search.program import CompiledCut, CutProgram

SPLITS = (1 / 4, 1 / 16, 1 / 64)
"""Working sets to split operations down to, as shares of what the largest needs."""
_ROUGHLY = 1 / 8
"""The same where one will do."""
_STEPS = 20
"""Most steps down from a feasible budget in search of a smaller one."""


def least_cut(program: CutProgram, feasible: Callable[[int], Iterable[Cut]]) -> CompiledCut:
    """The cut that needs least: of single operations, the uncut program (which needs less where XLA
    fuses well) and split operations; then whatever works with less than the best so far.

    Args:
      feasible: cuts that may work within some bytes.
    """
    coarse = FINEST, WHOLE
    least = min(min_budget(program.graph(cut))[0] for cut in coarse)
    split = [Cut(0, 1, split_size(share * least), piece_bytes=0) for share in SPLITS]
    best = _lowest(program, [*coarse, *split], None)
    assert best is not None, "without a limit the first one works"
    for _ in range(_STEPS):
        room = best.needs - 1
        lower = _lowest(program, feasible(room), room)
        if lower is None:
            break
        best = lower
    return best


def roughly_least_cut(program: CutProgram) -> CompiledCut:
    """About the same, sooner: operations split in one way, small ones together."""
    largest = max(map(working_set, program.ordered(FINEST).equations))
    size = split_size(_ROUGHLY * min(largest, min_budget(program.graph(WHOLE))[0]))
    best = _lowest(program, [WHOLE, Cut(size, None, size, piece_bytes=0)], None)
    assert best is not None, "without a limit the first one works"
    return best


def _lowest(program: CutProgram, cuts: Iterable[Cut], room: int | None) -> CompiledCut | None:
    """Of some cuts the one that needs least, if any works within a room. Those that seem to need
    least are compiled first."""
    best = None
    for cut in sorted(cuts, key=lambda cut: min_budget(program.estimated(cut))[0]):
        found = program.within(cut, room)
        if found is not None:
            best, room = found, found.needs - 1
    return best

"""The cut that takes least memory, where device and host memory are one.

Takes a `Request` with a `memory`; gives the `CompiledCut` of which the arena, workspace, host tier
and results together take least, as far as it was looked for; one_memory.py has the plans of it.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

from jaxoffload.capture.operations import is_view
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.plan.alloc.limits import (
    buffer_place,
    intermediates_peak,
    min_budget,
    min_host_memory,
    new_result_bytes,
    resident_peak,
)
from jaxoffload.search.cut import FINEST, WHOLE, CompiledCut, Cut, split_size
from jaxoffload.search.fastest import in_other_orders
from jaxoffload.search.least import SPLITS
from jaxoffload.search.planner import Planner

_LONG = (1 / 4,)
"""Reuse distances from which on everything is recomputed in search of the least memory, as shares
of what keeping everything takes. (Of a LoRA step 1/4 leaves a sixth, 1/16 two fifths.)"""
_CHAINS = ((2.0, 1), (2.0, 1 / 2), (2.0, 1 / 4), (4.0, 1))
"""Shares above 1 (as of `Recomputer.run`) and distances to try for the cut that takes least."""
_SIZES = (1 / 12, 1 / 48)
"""Working sets of a vertex in that search, as shares of the same."""
_SINGLE_VERTICES = 2000
"""Up to so many operations each is also looked at by itself there: about a second."""


class Leanest(Planner):
    """A `Planner` that knows the cut that takes least memory."""

    @functools.cached_property
    def _leanest(self) -> CompiledCut:
        """The cut that takes least memory, arena and host tier together, as far as it was looked
        for, in the order in which it takes least."""
        found = self._fixed_cut() or self._program.compiled(self._leanest_by_estimates)
        return min(in_other_orders(found, self.machine), key=lambda cut: self._needs(cut.graph))

    def _leanest_within(self, memory: int) -> CompiledCut | None:
        """The same where a memory may be enough for it and new results, else None: then no more
        kernels are compiled than it takes to know that."""
        if not self.has_fixed_cut and "_leanest" not in vars(self):
            least = functools.partial(self._in_least_order, self._needs)
            room = memory - self._result_bytes
            if self._program.within(self._leanest_by_estimates, room, least) is None:
                return None
        return self._leanest

    @functools.cached_property
    def _leanest_by_estimates(self) -> Cut:
        """How that is cut: operations by themselves, split, and everything recomputed that is read
        much later."""
        whole = self.graph(WHOLE)
        peak, largest = resident_peak(whole), min_budget(whole)[0]
        cuts = [WHOLE]
        operations = self._program.ordered(FINEST).equations
        if sum(not is_view(operation) for operation in operations) <= _SINGLE_VERTICES:
            cuts += [FINEST]
            cuts += [Cut(0, 1, split_size(share * largest), piece_bytes=0) for share in SPLITS]
        for size in (share * peak for share in _SIZES):
            split = split_size(size / 2)
            cuts += [Cut(size, None, given, piece_bytes=size / 2) for given in (None, split)]
        again: list[Cut] = []
        if self.request.options.recompute != "never":
            again = [
                replace(cut, recomputed=1.0, reuse_distance=share * peak)
                for share in _LONG
                for cut in cuts
            ]
        best = self._leanest_of([*again, *cuts])
        if best.recomputed:
            more = [
                replace(best, recomputed=share, reuse_distance=far * peak) for share, far in _CHAINS
            ]
            best = self._leanest_of([*more, best])
        return best

    def _leanest_of(self, cuts: Sequence[Cut]) -> Cut:
        """Of cuts the one that seems to need least, of equal ones the last. What has to hold more
        than another needs is not captured."""
        best, least = cuts[-1], float("inf")
        for cut in cuts:
            if not self._has_disk and self._program.floor(cut).bytes > least:
                continue
            needed = self._needs(self._program.estimated(cut))
            if needed <= least:
                best, least = cut, needed
        return best

    def _needs(self, graph: TaskGraph) -> int:
        """Bytes of arena, workspace, host tier and results read too late that a cut needs at
        least."""
        kept, more = kept_at_once(graph), self._more_result_bytes(graph)
        if not self._has_disk:
            return kept + more
        moved = min_budget(graph)[0] + buffer_place(min_host_memory(graph, True)[0])
        return more + (moved if self._uses_disk_arrays else min(moved, kept))

    def _more_result_bytes(self, graph: TaskGraph) -> int:
        """Bytes of results whose donated arguments this cut reads too late: they take memory of
        their own."""
        return new_result_bytes(graph) - self._result_bytes

    @property
    def _has_disk(self) -> bool:
        return self.request.options.disk is not None or self._uses_disk_arrays

    @property
    def _uses_disk_arrays(self) -> bool:
        return bool(self.request.disk_arguments or self.request.disk_results)

    @functools.cached_property
    def _result_bytes(self) -> int:
        """Bytes of results that follow no donated argument."""
        return new_result_bytes(self.graph(WHOLE))


def kept_at_once(graph: TaskGraph) -> int:
    """Bytes that a graph needs if nothing is moved."""
    return max(intermediates_peak(graph), min_budget(graph)[0])

"""One function, captured once, cut at any granularity, compiled as far as somebody asks.

Takes a request; gives, for a `Cut`, a TaskGraph with workspace left out, estimated, or known from
compiled kernels. What two cuts have in common is worked out once.
"""

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload import identity
from jaxoffload.capture import cost
from jaxoffload.capture.build import Captured, Ordered, build_taskgraph, order_program
from jaxoffload.capture.cluster import Known
from jaxoffload.capture.collectives import received_bytes
from jaxoffload.capture.demand import Large
from jaxoffload.capture.flat import Equation
from jaxoffload.capture.floor import Floor, floor_of
from jaxoffload.capture.gathers import in_parts
from jaxoffload.capture.inline import Constant
from jaxoffload.capture.parts import has_loops
from jaxoffload.capture.recompute import Recomputer
from jaxoffload.capture.scan import unroll
from jaxoffload.capture.split import Tilings, split
from jaxoffload.capture.tables import with_rows_alone
from jaxoffload.capture.tiled import tiles_of
from jaxoffload.compile.cache import CompileReport
from jaxoffload.graphs.taskgraph import TaskGraph, TensorKind, VertexKind
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.runtime.backends import Backend
from jaxoffload.runtime.request import Request
from jaxoffload.search.cut import NOTHING, WHOLE, CompiledCut, Cut, by_workspace, least_budget
from jaxoffload.search.kernels import Kernels
from jaxoffload.search.loops import expected_workspace, held_inside

logger = logging.getLogger(__name__)

_FIRST_COMPILED = 2
"""Kernels of a cut that are compiled first, to see whether it works; then twice as many."""


class CutProgram:
    """A function at every granularity.

    Args:
      model: of the machine, by whose rates operations are clustered: kernels stay the same when
        rates are measured.
      machine: the same with what was measured, by which it is chosen what is recomputed.
      compiles: False: it is to be looked at only, and workspace counts as nothing.
      estimates: of what is looked at only, that workspace counts as what executables take where
        there are some, and where there are none as what they may take.
      settings: of the place where the plan is asked for.
      honours: whether what the user wants on the host's cores is to run there.
      large: see `scan.unroll`.

    Attributes:
      constants: arrays that the function closes over; they follow its own arguments.
      has_estimated: whether workspace was estimated for any cut.
    """

    def __init__(
        self,
        request: Request,
        backend: Backend,
        model: Machine,
        machine: Machine,
        compiles: bool,
        estimates: bool,
        settings: compat.LoweringSettings,
        honours: bool = True,
        large: Large | None = None,
    ):
        self._request, self._backend, self._honours = request, backend, honours
        self._model, self._machine, self._large = model, machine, large
        self._compiles, self._estimates = compiles, estimates
        self.has_estimated = False
        self.constants: list[Any] = []
        self._kernels = Kernels(backend, settings)
        self._unrolled: dict[tuple[float, bool], Ordered] = {}
        # The program with every scan in single steps, and the largest pieces for which it is so.
        self._in_steps: tuple[float, Ordered] | None = None
        self._ordered = self._ordered_in_pieces(float("inf"))
        self._rewritten: dict[tuple[int, float | None, float, float], Ordered] = {}
        self._tilings = Tilings()
        self._recomputers: dict[tuple[int, float], Recomputer] = {}
        self._cuts: dict[Cut, CompiledCut] = {}
        self._graphs: dict[tuple[Any, ...], Captured] = {}
        self._guessed: dict[tuple[Any, ...], TaskGraph] = {}
        # Limits of bytes from which to which vertices are the same.
        self._same: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
        self._workspaces: dict[tuple[Any, ...], dict[Any, int]] = {}  # estimated, by kernel
        # Of kernels with loops over tiles: which operations, and their keys and estimates by that.
        self._tiles_of: dict[Any, Any] = {}
        self._tiled: dict[Any, dict[identity.Key, int]] = {}
        self._floors: dict[tuple[int, int | None, bool], Floor] = {}
        self._known_runs: Known = {}

    def forget_all_but(self, executables: list[Any]) -> None:
        """Forgets the cuts that were only tried: their kernels need not stay compiled while a plan
        lives."""
        self._cuts = {
            cut: found for cut, found in self._cuts.items() if found.executables is executables
        }
        if self._compiles:
            self._graphs.clear()
            self._guessed.clear()
            self._workspaces.clear()
            self._known_runs.clear()

    @property
    def reports(self) -> list[CompileReport]:
        """Of every compilation."""
        return self._kernels.reports

    @contextlib.contextmanager
    def unknowing(self) -> Iterator[None]:
        """Within it nothing is known of kernels that were compiled before. Cuts that were known are
        the same after it."""
        cuts, temp = self._cuts, self._kernels.temp
        self._cuts, self._kernels.temp = {}, {}
        try:
            yield
        finally:
            self._cuts, self._kernels.temp = self._cuts | cuts, temp | self._kernels.temp

    def ordered(self, cut: Cut) -> Ordered:
        """The program, with large intermediates split and values recomputed as the cut asks."""
        ordered = self._ordered_in_pieces(cut.piece_bytes, cut.whole_loops)
        key = (id(ordered), cut.split_bytes, cut.recomputed, cut.reuse_distance)
        if key not in self._rewritten:
            if cut.recomputed:
                ordered = self.ordered(dataclasses.replace(cut, recomputed=0.0))
                ordered = self._recomputer(ordered, cut.reuse_distance).run(cut.recomputed)
            elif cut.split_bytes is not None:
                if self._request.num_devices > 1:
                    ordered = in_parts(ordered, cut.split_bytes)
                ordered = split(ordered, cut.split_bytes, self._tilings)
            self._rewritten[key] = ordered
        return self._rewritten[key]

    def _recomputer(self, ordered: Ordered, reuse_distance: float) -> Recomputer:
        key = id(ordered), reuse_distance
        if key not in self._recomputers:
            made = Recomputer(ordered, reuse_distance, self._equation_seconds)
            self._recomputers[key] = made
        return self._recomputers[key]

    def _ordered_in_pieces(self, piece_bytes: float, whole_loops: bool = False) -> Ordered:
        """The program with its scans cut into chunks of so many bytes, or of half as many."""
        if whole_loops and not self._ordered_in_pieces(piece_bytes).program.is_distributed:
            whole_loops = False
        if self._unrolled and not whole_loops and not self._ordered.program.is_divisible:
            return self._ordered
        if piece_bytes < float("inf"):
            piece_bytes = 2.0 ** math.floor(math.log2(piece_bytes)) if piece_bytes >= 1 else 0.0
        if self._in_steps is not None and piece_bytes <= self._in_steps[0]:
            return self._in_steps[1]
        key = piece_bytes, whole_loops
        if key not in self._unrolled:
            # Of any size of pieces: what the function closes over, as arguments after its own.
            program = unroll(
                self._request.jaxpr,
                piece_bytes,
                self.constants,
                rates=self._model,
                honours=self._honours,
                distributes=not whole_loops,
                large=self._large,
            )
            if (request := self._request).num_devices == 1:
                in_host = request.lasting if self._honours else frozenset()
                with_rows_alone(
                    program,
                    request.donated,
                    request.disk_arguments,
                    in_host,
                    all_in_host=request.options.memory is not None,
                    any_rate="reorder" in request.options.rewrites,
                    large=self._large,
                )
            extra = program.arguments[len(self._request.jaxpr.in_avals) :]
            self.constants = [v.array for v in extra if isinstance(v, Constant)]
            if program.has_loops:
                self._unrolled[key] = order_program(program)
            else:  # smaller pieces there are none
                known = self._in_steps[1] if self._in_steps else order_program(program)
                self._in_steps = piece_bytes, known
                self._unrolled[key] = known
        return self._unrolled[key]

    def _equation_seconds(self, equation: Equation) -> float:
        """Time of an operation on the machine that is planned for."""
        exchanged = received_bytes(equation) / self._machine.peer.bytes_per_second
        return cost.seconds(equation, self._machine) + exchanged

    def graph(self, cut: Cut) -> TaskGraph:
        """The TaskGraph of a cut that is only looked at, workspace counted as nothing."""
        return self._looked_at(cut).taskgraph

    @property
    def is_one_vertex(self) -> bool:
        """Whether the uncut program is one vertex."""
        return len(self.graph(WHOLE).vertices) == 1

    def estimated(self, cut: Cut) -> TaskGraph:
        """The same with workspace as far as it can be told before anything is compiled."""
        key = self.key(cut)
        if key not in self._guessed:
            found = self._looked_at(cut)
            expected = expected_workspace(found, self._held)
            self._guessed[key] = found.taskgraph.with_workspace(expected)
        return self._guessed[key]

    @functools.cached_property
    def _held(self) -> dict[identity.Key, int]:
        """What loops hold inside, of a function that is looked at only."""
        if not self._estimates or self._backend.is_elsewhere or not has_loops(self._request.jaxpr):
            return {}
        return held_inside(self.ordered, lambda ks: self._kernels.executables(ks)[0])

    def expected_workspace(self, cut: Cut) -> int:
        """Bytes that any of a cut's vertices takes as workspace: estimated where its kernel has not
        been compiled."""
        known, guessed = self._kernels.temp, self._guessed_workspace(cut)
        return max((known.get(key, count) for key, count in guessed.items()), default=0)

    def least_workspace(self, cut: Cut) -> int:
        """The same as far as it is known: of a loop over tiles, that it takes no less than the same
        operations with smaller tiles."""
        known = 0
        for key, guess in self._guessed_workspace(cut).items():
            if key in self._kernels.temp:
                known = max(known, self._kernels.temp[key])
                continue
            for other, count in self._tiled.get(self._tiles_of.get(key), {}).items():
                if count <= guess:
                    known = max(known, self._kernels.temp.get(other, 0))
        return known

    def _guessed_workspace(self, cut: Cut) -> dict[Any, int]:
        """Bytes that the vertices of each of a cut's kernels seem to take, by the kernel's key; of
        a cut that is looked at only, of all by None."""
        key = self.key(cut)
        if key not in self._workspaces:
            found, guessed = self._looked_at(cut), {}
            found = found.with_kernels if self._compiles else found
            for vertex, count in zip(found.taskgraph.vertices, found.workspace, strict=True):
                if vertex.kind is not VertexKind.KERNEL:
                    continue  # it takes none of the device's
                kernel = found.kernels[vertex.kernel].key if found.kernels else None
                guessed[kernel] = max(guessed.get(kernel, 0), count)
            self._workspaces[key] = guessed
            for kernel in found.kernels:
                if (tiles := tiles_of(kernel.steps)) is not None and kernel.key in guessed:
                    self._tiles_of[kernel.key] = tiles
                    self._tiled.setdefault(tiles, {})[kernel.key] = guessed[kernel.key]
        return self._workspaces[key]

    def _looked_at(self, cut: Cut) -> Captured:
        key = self.key(cut)
        if key not in self._graphs:
            self._graphs[key] = found = self._captured(cut)
            same = self._same.setdefault((key[0], *key[2:]), [])
            same.append((found.least_max_bytes, cut.max_bytes))
        return self._graphs[key]

    def key(self, cut: Cut) -> tuple[Any, ...]:
        """Equal for cuts with the same vertices, as far as that is known: where there is nothing to
        split or no update, or vertices are smaller than they may be."""
        program = self.ordered(cut)
        ordered = id(program)
        others = cut.max_equations, cut.updates_on_host and bool(program.program.updates)
        for least, most in self._same.get((ordered, *others), ()):
            if least <= cut.max_bytes <= most:
                return ordered, most, *others
        return ordered, cut.max_bytes, *others

    def floor(self, cut: Cut) -> Floor:
        """What such a cut holds and computes at least, known before its graph is captured."""
        ordered = self.ordered(cut)
        key = id(ordered), cut.max_equations, cut.updates_on_host
        if key not in self._floors:
            on_host = ordered.program.updates if cut.updates_on_host else frozenset()
            self._floors[key] = floor_of(ordered, cut.max_equations, on_host)
        return self._floors[key]

    def _captured(self, cut: Cut) -> Captured:
        captured = build_taskgraph(
            self.ordered(cut),
            kinds=(*self._request.kinds, *[TensorKind.WEIGHT] * len(self.constants)),
            donated=self._request.donated,
            max_bytes=cut.max_bytes,
            max_equations=cut.max_equations,
            updates_on_host=cut.updates_on_host,
            kernels=False,
            known=self._known_runs,
            num_devices=self._request.num_devices,
            replicas=self._request.replicas if self._machine.has_fast_peers else (),
            in_any_order=not self._request.options.deterministic,
        )
        # Elsewhere everything comes over the link: it is taken to be in host memory.
        has_own = self._backend.has_own_memory and not self._backend.is_elsewhere
        graph = self._request.placed(captured.taskgraph, has_own, self.constants)
        return dataclasses.replace(captured, taskgraph=graph)

    def compiled(self, cut: Cut) -> CompiledCut:
        """One cut, its kernels compiled, its vertices' workspace known."""
        found = self.within(cut, None)
        assert found is not None, "there is no limit"
        return found

    def within(
        self, cut: Cut, budget: int | None, needs: Callable[[TaskGraph], int] = least_budget
    ) -> CompiledCut | None:
        """The same if it works within a budget, else None: then no more kernels are compiled than
        it takes to know that, those first that seem to need most workspace.

        Args:
          needs: bytes that a TaskGraph needs at least.
        """
        if cut in self._cuts:
            known = self._cuts[cut]
            return known if budget is None or needs(known.graph) <= budget else None
        if not self._compiles:
            self._cuts[cut] = CompiledCut(self._imagined(cut), [], NOTHING)
            return self.within(cut, budget, needs)
        captured = self._looked_at(cut).with_kernels
        kernels = captured.kernels
        waiting = by_workspace(captured) if budget is not None else []
        number = _FIRST_COMPILED
        with self.compiling():
            while budget is not None:
                if needs(self._kernels.with_known_workspace(captured)) > budget:
                    return None
                waiting = [i for i in waiting if kernels[i].key not in self._kernels.temp]
                if not waiting:
                    break
                # Those after them begin, so that no core waits for the last of these.
                self._kernels.begin([kernels[i] for i in waiting[: 3 * number]])
                self._kernels.executables([kernels[i] for i in waiting[:number]])
                number *= 2
            executables, report = self._kernels.executables(kernels)
        logger.debug("%s: %s: %s", self._request.name, cut, report)
        graph = self._kernels.with_known_workspace(captured)
        self._cuts[cut] = CompiledCut(Captured(graph, kernels), executables, report)
        return self.within(cut, budget, needs)

    def on_devices(self, cut: CompiledCut) -> CompiledCut:
        """A compiled cut with every vertex on its device, as where everything fits there."""
        graph, kernels = cut.graph, cut.captured.kernels
        if not (graph.columns.kind == VertexKind.HOST_KERNEL).any():
            return cut
        kinds = {VertexKind.HOST_KERNEL: VertexKind.KERNEL}
        vertices = [dataclasses.replace(v, kind=kinds.get(v.kind, v.kind)) for v in graph.vertices]
        graph = dataclasses.replace(graph, vertices=tuple(vertices))
        kernels = tuple(dataclasses.replace(kernel, on_host=False) for kernel in kernels)
        if not self._compiles:
            return CompiledCut(Captured(graph, kernels), [], NOTHING)
        executables, report = self._kernels.executables(kernels)
        graph = self._kernels.with_known_workspace(Captured(graph, kernels))
        return CompiledCut(Captured(graph, kernels), executables, report)

    def compiling(self) -> contextlib.AbstractContextManager[Any]:
        """Within it kernels begin before they are needed."""
        return self._kernels.batch()

    def expect(self, cut: Cut) -> None:
        """Says that a cut will probably be compiled."""
        if self._compiles and self._kernels.can_expect:
            self._kernels.expect(self._looked_at(cut).with_kernels.kernels)

    def cut_of(self, compiled: CompiledCut) -> Cut:
        """How a program was cut, of which some order of vertices was compiled."""
        found = self._cuts.items()
        return next(cut for cut, known in found if known.executables is compiled.executables)

    def _imagined(self, cut: Cut) -> Captured:
        """One cut as it may be once it is compiled."""
        if not self._estimates:
            return self._looked_at(cut)
        if not (self._held or self._backend.executables.has_some()):
            self.has_estimated = True
            return Captured(self.estimated(cut), ())
        captured = self._captured(cut).with_kernels
        expected = expected_workspace(captured, self._held)
        with self._kernels.settings.restored():
            known = self._backend.executables.known(captured.kernels)
        mine = [x for x, kernel in zip(known, captured.kernels, strict=True) if not kernel.on_host]
        self.has_estimated |= None in mine  # what the host's cores take is none of the device's
        known.append(None)  # of vertices without one
        temp = [
            guess if (executable := known[vertex.kernel]) is None else executable.temp_bytes
            for vertex, guess in zip(captured.taskgraph.vertices, expected, strict=True)
        ]
        return Captured(captured.taskgraph.with_workspace(temp), ())

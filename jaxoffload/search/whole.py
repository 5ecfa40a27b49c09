"""Functions that run whole: what fits needs no plan, and is left to `jax.jit`.

Takes a request; gives a `WholePlan`, or has the planner cut the function. A function is cut into
vertices only where memory demands it. Where everything fits it is one program of JAX's own
compiler: its first call costs what jit's costs, and its results are jit's.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend as jex

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.whole import bodies_of
from jaxoffload.compile.cache import CompileReport
from jaxoffload.errors import CaptureError, PlanError
from jaxoffload.graphs.memgraph import MemGraph
from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind
from jaxoffload.options import Options, format_bytes
from jaxoffload.plan.alloc.static import keep_everything
from jaxoffload.runtime import backends
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.request import Request
from jaxoffload.search.kept import KeptPlan
from jaxoffload.search.one_memory import planner_for
from jaxoffload.search.planner import NoCutFound, Planner
from jaxoffload.showing import Shown

logger = logging.getLogger(__name__)

_NEVER = 1 << 62
_AMPLE = 2
"""A function surely fits where all of its values at once would fit so many times: there is room for
layouts and workspace then."""


class Whole:
    """A function compiled by JAX as it is.

    Args:
      jaxpr: closed, over arrays.
      donated: for each argument.
      name: for profiles.
      shapes: of the arguments, with how they are spread; None: the jaxpr's.

    Attributes:
      run: the function, for arrays; donated ones are deleted.
      inline: the function, for tracers.
    """

    def __init__(
        self,
        jaxpr: Any,
        donated: Sequence[bool],
        name: str,
        shapes: Sequence[jax.ShapeDtypeStruct] | None = None,
    ):
        # The jaxpr is traced once more, which is quick, and the user's function is not.
        body = jex.core.jaxpr_as_fun(jaxpr)

        def function(*flat: Any) -> Any:
            return body(*flat)

        function.__name__ = name
        positions = [i for i, given in enumerate(donated) if given]
        self.run = jax.jit(function, donate_argnums=positions)
        self.inline = jax.jit(function) if positions else self.run
        self._jaxpr = jaxpr
        self._shapes = shapes or [
            jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=bool(a.weak_type))
            for a in jaxpr.in_avals
        ]

    def surely_fits(self, budget: int | None) -> bool:
        """Whether it fits, as far as that is clear without compiling it."""
        return budget is None or _AMPLE * self._all_bytes <= budget

    @functools.cached_property
    def needed_bytes(self) -> int:
        """Device bytes that a run takes, arguments and results included, as XLA counts them.

        Compiles the function, which the first call need not do again.
        """
        return self.needed_bytes_for(self._shapes) + sum(map(compat.byte_count, self._jaxpr.consts))

    @functools.cached_property
    def bytes_if_compiled(self) -> int:
        """The same; more than any budget where XLA does not compile it (some callbacks)."""
        try:
            return self.needed_bytes
        except jax.errors.JaxRuntimeError as error:
            logger.info("XLA does not compile it whole: %s", error)
            return _NEVER

    def needed_bytes_for(self, arguments: Sequence[Any]) -> int:
        """The same for arrays that may be spread over devices: bytes of each, constants apart."""
        stats = self.run.lower(*arguments).compile().memory_analysis()
        if stats is None:  # the platform does not tell
            return _AMPLE * self._all_bytes
        arrays = stats.argument_size_in_bytes + stats.output_size_in_bytes
        return arrays - stats.alias_size_in_bytes + stats.temp_size_in_bytes

    @functools.cached_property
    def _all_bytes(self) -> int:
        avals = [*self._jaxpr.in_avals, *self._jaxpr.consts]
        made = {id(v) for eqn in self._jaxpr.jaxpr.eqns for v in eqn.outvars}
        for result in self._jaxpr.jaxpr.outvars:  # what nothing makes, or made before, is copied
            if id(result) in made:
                made.remove(id(result))
            else:
                avals.append(result.aval)
        return sum(map(compat.byte_count, avals)) + sum(
            map(compat.byte_count, _values(self._jaxpr.jaxpr))
        )


def _values(jaxpr: Any) -> Iterator[Any]:
    """Abstract values of everything that a jaxpr computes; of a loop's body once."""
    for eqn in jaxpr.eqns:
        yield from (v.aval for v in eqn.outvars)
        for body in bodies_of(eqn):
            yield from _values(body)


class WholePlan(Plan):
    """The plan of a function that runs whole: one vertex, and nothing is moved.

    Args:
      may_be_cut: whether it could be planned otherwise.
    """

    def __init__(
        self,
        request: Request,
        whole: Whole,
        backend: backends.Backend | None,
        may_be_cut: bool = True,
    ):
        self.backend = backend or backends.current()
        self.whole, self._may_be_cut = whole, may_be_cut
        budget = request.options.device_memory
        assert budget is None or isinstance(budget, int)
        self.name, self.budget = request.name, budget
        self.resident, self.constants, self.pairs = True, (), request.donated
        self.out_shapes = request.out_shapes
        self.compile_report = CompileReport(0, 0, 0.0)
        self._request = request

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """Calls the function on arrays; donated ones are deleted."""
        self.backend.make_room(lambda: self._made_bytes)
        return list(self.whole.run(*arrays))

    @functools.cached_property
    def _made_bytes(self) -> int:
        """Device bytes that a run takes beside its arguments."""
        return self.whole.needed_bytes - sum(map(compat.byte_count, self._request.jaxpr.in_avals))

    @functools.cached_property
    def taskgraph(self) -> TaskGraph:  # pyrefly: ignore[bad-override]
        """One vertex."""
        request, count = self._request, len(self._request.jaxpr.in_avals)
        tensors = [
            _tensor(aval, argument=Span(i, 0), kind=kind)
            for i, (aval, kind) in enumerate(
                zip(request.jaxpr.in_avals, request.kinds, strict=True)
            )
        ]
        tensors += [
            _tensor(aval, results=(Span(j, 0),)) for j, aval in enumerate(request.jaxpr.out_avals)
        ]
        arrays = sum(tensor.bytes for tensor in tensors)
        vertex = Vertex(
            VertexKind.KERNEL,
            tuple(range(count)),
            tuple(range(count, len(tensors))),
            name=self.name,
            overwrites=self.pairs,
            workspace_bytes=max(0, self.whole.needed_bytes - arrays),
        )
        return TaskGraph(tuple(tensors), (vertex,), self.pairs)

    @functools.cached_property
    def memgraph(self) -> MemGraph:  # pyrefly: ignore[bad-override]
        """One vertex that reads and writes where the caller has everything."""
        found = keep_everything(self.taskgraph, None)
        assert found is not None, "without a limit everything is kept"
        return found

    @functools.cached_property
    def min_device_memory(self) -> int:
        """The smallest budget in bytes that can work, cut as fine as it gets, or whole where it
        cannot be cut."""
        if self._may_be_cut:
            with contextlib.suppress(CaptureError):
                return _planner(self._request, self.whole, self.backend).least_budget
        return self.whole.needed_bytes

    @property
    def peak_device_bytes(self) -> int:  # pyrefly: ignore[bad-override]
        """Device bytes that a run uses at most, as XLA counts them."""
        return self.whole.needed_bytes

    @property
    def resident_peak_bytes(self) -> int:  # pyrefly: ignore[bad-override]
        """Device bytes that would be needed to keep everything on the device."""
        return self.whole.needed_bytes

    @property
    def native(self) -> Any:
        """There is none: JAX runs it."""
        raise AttributeError(f"{self!r} has no native plan. Pass cut='always' for one.")

    def last_report(self) -> Any:
        """There is none: JAX runs it."""
        return None

    def __repr__(self) -> str:
        budget = "no limit" if self.budget is None else format_bytes(self.budget)
        return f"Plan({self.name}: runs whole, as jax.jit runs it, budget {budget})"


def _tensor(aval: Any, **parts: Any) -> Tensor:
    shape, dtype = compat.physical(aval)
    return Tensor(compat.byte_count(aval), aval.str_short(), dtype=str(dtype), shape=shape, **parts)


class WholeRun(Shown):
    """What one run of a function that runs whole did: nothing that jaxoffload could tell.

    Attributes:
      seconds: NaN. As with `jax.jit`, nobody waited for the end.
      peak_device_bytes: NaN. XLA alone knows.
      bytes_offloaded, bytes_reloaded, bytes_loaded, bytes_stored, bytes_transferred, bytes_found,
        bytes_left, rows_loaded, rows_stored, copied_outputs, realigned_bytes: nothing is moved.
    """

    seconds = peak_device_bytes = math.nan
    bytes_offloaded = bytes_reloaded = bytes_loaded = bytes_stored = bytes_transferred = 0
    bytes_found = bytes_left = rows_loaded = rows_stored = copied_outputs = realigned_bytes = 0

    def __repr__(self) -> str:
        return "Run(whole, as jax.jit runs it: everything fits, nothing was moved)"


def may_run_whole(options: Options, tiers: Sequence[str]) -> bool:
    """Whether a function may run whole at all, because it must or because it fits.

    Args:
      tiers: of each argument; what is in a lower tier has to be brought there.
    """
    return options.results == "device" and not any(tiers)


def is_always_cut(options: Options) -> bool:
    """Whether a function is cut although it fits, if it can be."""
    return options.cut == "always" or options.vertex_memory is not None


def make_plan(
    request: Request,
    whole: Whole | None,
    backend: backends.Backend | None = None,
    has_other_ways: bool = False,
) -> Plan:
    """The plan for a request: whole where that fits, else cut.

    Args:
      whole: the function as it is, or None: it is cut in any case.
      has_other_ways: see `Planner.plan`.

    Raises:
      PlanError: the budget is below the smallest that can work. CaptureError: the function cannot
      be cut, and needs more than the budget as it is. NoCutFound: with other ways.
    """
    budget = request.options.device_memory
    assert budget is None or isinstance(budget, int)
    _refuse_what_the_backend_cannot(request, backend or backends.current())
    if whole is None:
        kept = KeptPlan(planner_for(request, backend), may_run_whole=False)
        return kept.find() or kept.made(has_other_ways)
    is_cut = is_always_cut(request.options)
    if not is_cut and whole.surely_fits(budget):
        return WholePlan(request, whole, backend)
    try:
        planner = _planner(request, whole, backend)
        kept = KeptPlan(planner, may_run_whole=not is_cut)
        found = kept.find()
        if found is not None:
            return found
        if is_cut:
            return kept.made(has_other_ways)
        assert budget is not None
        room, around = budget, request.options.around
        if request.options.memory is not None:  # which does not count arguments
            room += sum(map(compat.byte_count, request.jaxpr.in_avals))

        def run_whole() -> Plan:
            kept.keep_whole()
            return WholePlan(request, whole, backend)

        def unless_refused(make: Callable[[], Plan]) -> Plan:
            try:
                return make()
            except PlanError as error:
                # Whole it may take far less than seemed hopeful: asked when nothing else is left.
                least = error.min_device_memory
                if least is None or least - around > budget or whole.bytes_if_compiled > room:
                    raise
                return run_whole()

        if kept.runs_whole() or (planner.hopeful_peak <= room >= whole.bytes_if_compiled):
            return run_whole()
        try:
            return unless_refused(lambda: kept.made(has_other_ways))
        except NoCutFound as error:
            search_on = error.search_on
            raise NoCutFound(lambda: unless_refused(search_on)) from None
    except CaptureError as error:
        if not whole.surely_fits(budget):
            _refuse(request, whole, error)
        return WholePlan(request, whole, backend)


def _planner(request: Request, whole: Whole, backend: backends.Backend | None) -> Planner:
    """A planner that knows what the function takes whole, if that is a way to run it."""
    is_cut = is_always_cut(request.options)
    whole_bytes = None if is_cut else lambda: whole.bytes_if_compiled
    return planner_for(request, backend, whole_bytes=whole_bytes)


def _refuse_what_the_backend_cannot(request: Request, backend: backends.Backend) -> None:
    memory = request.options.memory
    if memory is not None and backend.has_own_memory:
        raise ValueError(
            f"offload({request.name}): memory={memory} is one budget for device and host, and "
            f"{backend.name} devices have memory of their own. Pass device_memory, and host_memory "
            "for what lies beside it."
        )


def whole_or_refused(
    request: Request, whole: Whole | None, error: CaptureError, backend: Any = None
) -> WholePlan:
    """The plan of a function that cannot be cut: whole, where that fits.

    Args:
      error: says why it cannot be cut.

    Raises:
      CaptureError: it needs more than the budget as it is.
    """
    if whole is None:
        raise error
    budget = request.options.device_memory
    assert budget is None or isinstance(budget, int)
    if not whole.surely_fits(budget):
        _refuse(request, whole, error)
    return WholePlan(request, whole, backend, may_be_cut=False)


def _refuse(request: Request, whole: Whole, error: CaptureError) -> None:
    """Refuses what cannot be cut, unless it fits as it is."""
    kinds = set(map(compat.effect_kind, request.jaxpr.effects))
    if "check" in kinds:
        raise error
    if "named axis" in kinds:  # it has no meaning outside what binds the axis
        raise CaptureError(f"{error} Or let it run whole: device_memory=None.") from None
    budget = request.options.device_memory
    assert isinstance(budget, int)
    if whole.bytes_if_compiled == _NEVER:
        raise error
    if whole.needed_bytes > budget:
        raise CaptureError(
            f"{error} Or let it run whole, which takes device_memory={whole.needed_bytes} "
            f"({format_bytes(whole.needed_bytes)})."
        ) from None

"""Plans that an earlier process has made, found again by all that they depend on.

Takes a planner; gives the plan that it would make, if one like it made that before, and keeps the
plans that are made. A plan is kept as its graphs in columns, the digests of its executables, and
the cuts that were simulated for it. It is found only together with all of its executables, and is
verified before it runs, as any other; one that is only looked at has none, and is found on any
platform. Its planner captures the function when somebody asks for another plan.
"""

import functools
import hashlib
import json
import logging
from collections.abc import Iterable
from typing import Any

from jaxoffload import _jax_compat as compat
from jaxoffload import garbage
from jaxoffload.graphs.laws import VerifyError
from jaxoffload.runtime.plan import Plan
from jaxoffload.search.cut import Cut
from jaxoffload.search.planner import NoCutFound, Planner
from jaxoffload.store import columns, place, platform
from jaxoffload.store.folder import Folder
from jaxoffload.store.program import Encoder, UnknownError

logger = logging.getLogger(__name__)

_WHOLE = b"runs whole"
"""Kept in the place of a plan: the function fits as it is."""


class KeptPlan:
    """The plan of a planner among those that are kept.

    Args:
      may_run_whole: whether the function runs whole where that fits.
    """

    def __init__(self, planner: Planner, may_run_whole: bool):
        self._planner, self._encoder = planner, Encoder()
        self._folder: Folder | None = place.current()
        self._name = ""
        is_kept = planner.request.options.memory is None  # other plans know what carried them
        is_kept &= planner.is_the_same_in_any_process
        if is_kept and self._folder is not None:
            try:
                self._name = self._named(may_run_whole)
            except UnknownError as error:
                logger.debug("%s: its plan is not kept: %s", planner.request.name, error)
        self._data = self._folder.read(self._name) if self._folder and self._name else None
        if self._folder is not None and self._name:
            planner.keeps = functools.partial(self._keep, settled=True)

    @garbage.paused()
    def find(self) -> Plan | None:
        """The plan, if it is kept; None where it is to be made, or the function runs whole."""
        data = self._data
        if data is None or data == _WHOLE:
            return None
        try:
            return self._found(data)
        except (ValueError, KeyError, TypeError, IndexError, VerifyError) as error:
            logger.warning("A kept plan is made anew: %s: %s", type(error).__name__, error)
            return None

    def made(self, has_other_ways: bool = False) -> Plan:
        """The plan, made and kept. Args and Raises: as `Planner.plan`."""
        try:
            plan = self._planner.plan(has_other_ways)
        except NoCutFound as error:
            search_on = error.search_on
            raise NoCutFound(lambda: self._kept(search_on())) from None
        return self._kept(plan)

    def _kept(self, plan: Plan) -> Plan:
        self._keep(plan, settled=False)
        return plan

    def _keep(self, plan: Plan, settled: bool) -> None:
        if self._folder is None or not self._name:
            return
        digests = plan.backend.executables.digests(plan.executables)
        constants = _numbers(plan.constants, self._encoder.constants())
        if None in constants:
            return
        about = {
            "executables": [digest.hex() for digest in digests],
            "constants": constants,
            "resident": plan.resident,
            "cuts": [[_fields(cut), seconds] for cut, seconds in self._planner.simulated()],
            "settled": settled,
        }
        numbers = self._numbers_of_sources(plan)
        data = columns.packed(about, plan.memgraph, lambda source: numbers.get(source, source))
        self._folder.write(self._name, data)

    def beside(self, *about: Any) -> Any:
        """What was kept beside the plan by `keep_beside`, None if nothing was."""
        data = self._folder.read(self._beside(about)) if self._folder and self._name else None
        return None if data is None else json.loads(data)

    def keep_beside(self, value: Any, *about: Any) -> None:
        """Keeps what JSON can say of the function as it is planned.

        Args:
          about: what it depends on beside all that the plan depends on.
        """
        if self._folder is not None and self._name:
            text = json.dumps(value, separators=(",", ":"))
            self._folder.write(self._beside(about), text.encode())

    def _beside(self, about: Any) -> str:
        lines = {id(e): compat.source_line(e.source_info) for e in self._encoder.equations()}
        named = repr((self._name, list(lines.values()), about))
        return f"beside-{hashlib.sha256(named.encode()).hexdigest()}"

    def runs_whole(self) -> bool:
        """Whether it is kept that the function fits as it is."""
        return self._data == _WHOLE

    def keep_whole(self) -> None:
        """Keeps that."""
        if self._folder is not None and self._name and self._data != _WHOLE:
            self._folder.write(self._name, _WHOLE)

    @garbage.paused()
    def _named(self, may_run_whole: bool) -> str:
        """The name of all that the plan depends on."""
        planner, request, encode = self._planner, self._planner.request, self._encoder.value
        options = {name: getattr(request.options, name) for name in request.options.__slots__}
        options["disk"] = request.options.disk is not None
        # Under jit an empty mesh stands where there is none outside.
        settings = [None if compat.mean_nothing(x) else x for x in compat.trace_context()]
        made = hashlib.sha256()
        for part in (
            encode(platform.source_digest()),
            planner.depends_on,
            encode(planner.backend.name),
            encode(planner.backend.machine),
            encode(planner.machine),
            self._encoder.closed(request.jaxpr),
            encode(request.kinds),
            encode(request.donated),
            encode(options),
            encode((request.disk_arguments, request.host_arguments, request.host_results)),
            encode((request.reloads_all, may_run_whole)),
            encode(request.has_near_constants and planner.backend.has_own_memory),
            encode(request.lasting),
            encode((request.num_devices, request.replicas)),
            encode(settings),
        ):
            made.update(b"%d:" % len(part) + part)
        return f"plan-{made.hexdigest()}"

    def _found(self, data: bytes) -> Plan | None:
        sources = _Sources(self._encoder.equations())
        about, memgraph = columns.unpacked(data, sources.line)
        digests = [bytes.fromhex(digest) for digest in about["executables"]]
        executables = self._planner.backend.executables.kept(digests)
        if executables is None:
            return None
        memgraph.taskgraph.check()
        wanted = set(about["constants"])
        known = {n: c for n, c in enumerate(self._encoder.constants()) if n in wanted}
        constants = [known[number] for number in about["constants"]]
        cuts = [(Cut(**fields), float(seconds)) for fields, seconds in about["cuts"]]
        return self._planner.found(
            memgraph,
            *executables,
            about["resident"],
            constants,
            cuts,
            bool(about["settled"]),
        )

    def _numbers_of_sources(self, plan: Plan) -> dict[str, int]:
        """For each source line the number of an equation that has it: lines change with what is
        written above them, and the plan does not."""
        graph = plan.taskgraph
        wanted = {part.source for part in (*graph.tensors, *graph.vertices)} - {""}
        found: dict[str, int] = {}
        lines: dict[int, str] = {}
        for number, eqn in enumerate(self._encoder.equations()):
            if len(found) == len(wanted):
                break
            if id(eqn) not in lines:
                lines[id(eqn)] = compat.source_line(eqn.source_info)
                if lines[id(eqn)] in wanted:
                    found.setdefault(lines[id(eqn)], number)
        return found


class _Sources:
    """Source lines of equations by their numbers."""

    def __init__(self, equations: Iterable[Any]):
        self._equations = list(equations)

    def line(self, number: int | str) -> str:
        """Of an equation; what is no number is the line itself."""
        if isinstance(number, str):
            return number
        return compat.source_line(self._equations[number].source_info)


def _numbers(wanted: Iterable[Any], among: Iterable[Any]) -> list[int | None]:
    """The place of each thing among others, None if it is not there."""
    first: dict[int, int] = {}
    for number, thing in enumerate(among):
        first.setdefault(id(thing), number)
    return [first.get(id(thing)) for thing in wanted]


def _fields(cut: Cut) -> dict[str, Any]:
    return {name: getattr(cut, name) for name in cut.__slots__}

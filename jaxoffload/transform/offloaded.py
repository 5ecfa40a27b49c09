"""An offloaded function: what `offload` returns, and what users call and ask.

For each signature that it is called with it has a `Program` (program.py).
"""

import dataclasses
import functools
import time
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.trace import Traced
from jaxoffload.compile import callbacks
from jaxoffload.errors import PlanError
from jaxoffload.identity import Key
from jaxoffload.options import Options
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.report.explain import Explanation
from jaxoffload.report.predict import Prediction, plan_on, predict
from jaxoffload.report.tradeoff import Tradeoff, tradeoff
from jaxoffload.runtime import backends
from jaxoffload.runtime.arrays import TierArray
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.profile import Profile
from jaxoffload.runtime.request import Request
from jaxoffload.runtime.run import Run, make_run
from jaxoffload.search.elsewhere import planner_on
from jaxoffload.search.whole import WholePlan, WholeRun, is_always_cut, may_run_whole
from jaxoffload.transform.again import Again, known_of
from jaxoffload.transform.arguments import (
    check_trace,
    check_transfers,
    has_tier_arrays,
    on_device,
    placed,
    seen,
    with_cuts,
    words_of,
)
from jaxoffload.transform.auto_budget import auto_budget
from jaxoffload.transform.explained import explained
from jaxoffload.transform.loops import LoopPlan
from jaxoffload.transform.pickled import marked_arguments, name_of
from jaxoffload.transform.primitive import bind
from jaxoffload.transform.program import Program
from jaxoffload.transform.signature import ArgumentSpec, BeyondPlans, Call
from jaxoffload.transform.staged import Staged
from jaxoffload.transform.verification import check_special_values, compare_with_jit

_all_offloaded: "weakref.WeakSet[Offloaded]" = weakref.WeakSet()


def clear_programs() -> None:
    """Forgets what was traced, planned and compiled for any function."""
    for offloaded in list(_all_offloaded):
        offloaded.clear_cache()


class Offloaded(Staged):
    """What `offload` returns: call it as you would call the function.

    Attributes:
      last_run: what the last run did: a `Run`; a `WholeRun` where the function ran whole; None
        before the first. Runs inside `jax.jit` count, but for those that ran whole. Of a function
        whose loops are planned by what they repeat, one iteration.
      profile: what calls have measured; `profile.save(path)` keeps it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        spec: ArgumentSpec,
        options: Options,
        profile: Profile | None = None,
    ):
        functools.update_wrapper(self, function)
        self.profile = profile or Profile()
        self._unseen_bytes = self.profile.unseen_bytes
        self._function, self._spec, self._options = function, spec, options
        self._programs: dict[Key, Program] = {}
        self._again: list[Again | None] = [None]  # of the last call
        self._last_run: Run | WholeRun | None = None
        self._last_ended = -1  # on the runtime's clock
        self._as_it_is: Any = None
        is_whole = may_run_whole(options, ()) and not is_always_cut(options)
        is_whole &= options.rewrites_much or not options.rewrites
        if options.device_memory is None and is_whole:
            self._as_it_is = self._jitted(
                donate_argnums=sorted(spec.donated_positions),
                donate_argnames=sorted(spec.donated_names),
            )
        _all_offloaded.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._as_it_is is not None and not has_tier_arrays((args, kwargs)):
            results = self._as_it_is(*args, **kwargs)
            self._note(WholeRun())
            return results
        if compat.is_jit_disabled():
            return self._function(*on_device(args), **on_device(kwargs))
        if callbacks.is_inside():
            return self._plain(*on_device(args), **on_device(kwargs))
        kept = self._again
        again = kept[0]
        if again is not None and (leaves := again.leaves(args, kwargs)) is not None:
            program = again.program
            flat = self._told(*program.run(leaves, again.device, again.has_numpys))
            return program.traced.out_tree.unflatten(flat)
        try:
            call = self._spec.bind(args, kwargs)
        except BeyondPlans:
            if self._options.device_memory is not None:
                raise
            return self._plain(*on_device(args), **on_device(kwargs))
        program = self._program(call)
        if compat.is_tracing() or program.traced.captured:
            check_trace(self._spec, call, self._options)
            whole = program.whole
            if whole is not None and compat.in_manual_region():
                # What was traced knows nothing of which values differ from device to device.
                return self._plain(*on_device(args), **on_device(kwargs))
            if whole is not None:
                more = program.traced.captured_words()
                flat = whole.inline(*program.as_given(call.leaves), *more)
            else:
                program.check_below(call.leaves)
                leaves = [*call.leaves, *program.traced.captured_words()]
                flat = bind(leaves, program.traced.jaxpr, **program.params())
        else:
            flat = self._run(program, call, kept)
        if program.traced.has_codes:
            flat = list(map(seen, flat, program.traced.out_codes))
        return jax.tree.unflatten(program.traced.out_tree, flat)

    def plan(self, *args: Any, machine: Machine | str | None = None, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes (arrays, or `jax.ShapeDtypeStruct`).

        Of a function with a `while_loop` that does not fit as it is, what the loop repeats is
        planned: the plan of that.

        Args:
          machine: as for `predict`: the plan for a machine that is not here, to be looked at.

        Raises:
          PlanError: the budget is too small; says the smallest that can work, and why.
        """
        if machine is not None:
            return self._on(args, kwargs, lambda r: plan_on(planner_on(r, machine, "plan")))
        plan = self._program(self._spec.bind(args, kwargs)).plan()
        return plan.main if isinstance(plan, LoopPlan) else plan

    def explain(
        self, *args: Any, machine: Machine | str | None = None, **kwargs: Any
    ) -> Explanation:
        """Where the memory goes and whether it fits, from shapes alone; print it.

        A budget that is too small is explained, not raised.

        Args:
          machine: as for `predict`: one that is not here.
        """
        call = self._spec.bind(args, kwargs)
        program = self._program(call)
        asked = self._options.device_memory
        if machine is not None:
            request = self._request_on(program.request())
            return Explanation.of(request, asked, call.leaves, machine)
        found = explained(program, asked, call.leaves)
        if line := program.rewrites_line:
            found = dataclasses.replace(found, rewrites=line)
        return found

    def predict(
        self,
        *args: Any,
        machine: Machine | str,
        policy: str = "work-conserving",
        jitter: float = 0.0,
        **kwargs: Any,
    ) -> Prediction:
        """What a call would take on a machine that is not here, from shapes alone: simulated.

        Args:
          machine: a `Machine`, or the name of one of `jaxoffload.MACHINES`.
          policy: "work-conserving", "fixed", "random" or "levelwise" (bulk-synchronous).
          jitter: standard deviation of the logarithm of what each vertex's time is multiplied by.

        Raises:
          ValueError: machine or policy is not known. PlanError: the budget is too small.
        """
        return self._on(args, kwargs, lambda r: predict(r, machine, policy, jitter))

    def _on(self, args: Any, kwargs: Any, asked: Callable[[Request], Any]) -> Any:
        """What is asked of a call on another machine; of what its loop repeats, where it does not
        fit as it is."""
        program = self._program(self._spec.bind(args, kwargs))
        request = self._request_on(program.request())
        try:
            return asked(request)
        except PlanError:
            no_limit = request.options.device_memory is None
            part = None if no_limit else program.repeated()
            if part is None:
                raise
        return asked(part)

    def _request_on(self, request: Request) -> Request:
        """The same on another machine: "auto" is what that one has."""
        if self._options.device_memory in ("auto", None):
            return request.with_options(device_memory=None)
        return request

    def tradeoff(
        self,
        *args: Any,
        machine: Machine | str,
        shares: Sequence[float] = (0.75, 0.5, 0.35, 0.25),
        **kwargs: Any,
    ) -> Tradeoff:
        """Simulated time over device memory: everything kept, offloaded, recomputed, or the
        best of both. From shapes alone.

        Args:
          machine: as for `predict`.
          shares: of what keeping everything needs, the budgets to plan for.

        Returns:
          A `Tradeoff`: print it, or show its `svg()`.

        Raises:
          ValueError: machine is not known, or a share is not positive.
        """
        program = self._program(self._spec.bind(args, kwargs))
        found = tradeoff(program.request(), machine, shares)
        if len(found.points) == 1 and (part := program.repeated()) is not None:
            return tradeoff(part, machine, shares)
        return found

    @property
    def last_run(self) -> Run | WholeRun | None:
        """What the run that ended last did, outside any jit or inside one."""
        latest, ended = self._last_run, self._last_ended
        for program in list(self._programs.values()):
            program.wait()
            for plan in program.plans_made():
                report = plan.last_report()
                if report is not None and report.ended_ns > ended and not report.error_message:
                    latest, ended = make_run(plan, report), report.ended_ns
        return latest

    def resident(self) -> dict[str, int]:
        """What calls have left on the device for the next one, and is there now: bytes of each
        argument, by its name.

        Parts of arguments made by `host_put`, `disk_put` and `open_safetensors` that are not
        donated stay, as far as `device_memory` has room: a call with the same arrays moves the rest
        only. They go when another call needs their place, with `release`, and with this object.
        """
        found: dict[str, int] = {}
        for plan in self._plans():
            found.update(plan.residents())
        return found

    def release(self) -> None:
        """Gives up what calls have left on the device; the next one brings it again."""
        for plan in self._plans():
            plan.release()

    def _plans(self) -> list[Plan]:
        """Every plan made so far, that of each signature last."""
        programs = list(self._programs.values())
        return [plan for program in programs for plan in program.plans_made()]

    def clear_cache(self) -> None:
        """Forgets what was traced, planned and compiled for calls so far."""
        self._programs.clear()
        self._again = [None]  # and not that of calls on their way
        self._spec.forget()

    def _program(self, call: Call) -> Program:
        program = self._program_of(call)
        if compat.is_tracing() or program.is_over_devices or program.traced.captured:
            return program
        # No shard_maps say how it takes arguments: they do.
        cut = with_cuts(call, program.wanted_mesh)
        return program if cut is None else self._program_of(cut, program.as_traced)

    def _program_of(self, call: Call, traced: Traced | None = None) -> Program:
        backend = backends.current_name()
        key = call.signature.key(compat.trace_context(), compat.context_mesh(), backend)
        program = self._programs.get(key)
        if program is None:
            backends.prepare(backend)
            # Under no lock: tracing runs the user's code, which may call this very function.
            program = self._make_program(call, traced)
            if not program.traced.captured:  # tracers are not to outlive their transformation
                program = self._programs.setdefault(key, program)  # atomic; the first one stays
        return program

    def _make_program(self, call: Call, traced: Traced | None) -> Program:
        options = self._options
        if options.device_memory == "auto":
            free = backends.current().free_memory()
            budget = auto_budget(free, self._unseen_bytes)
            options = dataclasses.replace(options, device_memory=budget, is_auto=True)
        body = self._spec.caller(self._function, call.signature)
        names = self._spec.names_of(call.signature)
        profile = self.profile
        return Program(self._spec.name, body, call.signature, options, profile, names, traced)

    def _run(self, program: Program, call: Call, kept: list[Again | None]) -> list[Any]:
        for leaf in call.leaves:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"offload({self._spec.name}) was called with a ShapeDtypeStruct, which has no "
                    "data. Pass arrays, or call .plan() or .explain() with shapes."
                )
        spread, device = None, None
        if not program.is_over_devices:
            spread, device = placed(self._spec, call)
        if spread is not None:
            flat, run = program.run_spread(call.leaves, self._spec.name_of(call, spread))
            self._note(run)
            return flat
        plan = program.plan()  # what cannot run is refused before anything runs
        expected = None
        if not isinstance(plan, WholePlan) and program.options.verify and not program.verified:
            leaves = [words_of(x) if isinstance(x, TierArray) else x for x in call.leaves]
            expected = compare_with_jit(program.as_written, leaves)
        if not isinstance(plan, WholePlan):
            check_transfers(self._spec, call)
        known = known_of(program, call, device)  # while donated arrays are there
        flat, run = program.run(call.leaves, device)
        if expected is not None:
            expected.check(self._spec.name, flat)
            program.verified = True
        kept[0] = known
        return self._told(flat, run)

    def _told(self, flat: list[Any], run: Run | WholeRun | None) -> list[Any]:
        """The results of a run, of which is told what there is to tell."""
        if run is not None:
            self._note(run)
        check_special_values(self._spec.name, flat)
        return flat

    def _note(self, run: Run | WholeRun) -> None:
        self._last_run, self._last_ended = run, time.monotonic_ns()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        """A copy is the function itself where its name means it, as of any function; else one with
        the same function, options and measurements, whose plans are yet to be made."""
        marked = marked_arguments(self._spec)
        return name_of(self) or (
            Offloaded._made_again, (self._function, marked, self._options, self.profile)
        )  # fmt: skip

    @classmethod
    def _made_again(
        cls, function: Callable[..., Any], marked: Any, options: Options, profile: Profile
    ) -> "Offloaded":
        return cls(function, ArgumentSpec(function, *marked), options, profile)

    def __repr__(self) -> str:
        options = self._options
        if options.memory is not None:
            return f"offload({self._spec.name}, memory={options.memory!r})"
        return f"offload({self._spec.name}, device_memory={options.device_memory!r})"


compat.hide_frames_of(__file__)

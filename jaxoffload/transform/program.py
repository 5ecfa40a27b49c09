"""One signature of an offloaded function: its trace, its plan, and what its runs taught.

Takes the function, a signature and options; gives plans and results. Offloaded (offload.py) has one
for each signature that it is called with.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.ordered import has_ordered, in_order
from jaxoffload.capture.parts import has_loops
from jaxoffload.capture.spread import Spread, is_spread, spread, wanted_mesh
from jaxoffload.capture.sweeps import Sweeps
from jaxoffload.capture.trace import Traced, trace
from jaxoffload.capture.whole import must_run_whole
from jaxoffload.errors import CaptureError, PlanError
from jaxoffload.graphs.taskgraph import TensorKind
from jaxoffload.once import Once
from jaxoffload.options import Options, format_bytes
from jaxoffload.rewrite.apply import hint, rewritten
from jaxoffload.runtime import backends
from jaxoffload.runtime.arrays import TierArray
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.profile import Profile
from jaxoffload.runtime.request import Request, make_request, pair_donated
from jaxoffload.runtime.run import Run, run_plan
from jaxoffload.search.measured import model_of
from jaxoffload.search.tuner import Tuner
from jaxoffload.search.whole import (
    Whole,
    WholePlan,
    WholeRun,
    is_always_cut,
    may_run_whole,
    whole_or_refused,
)
from jaxoffload.transform import queued
from jaxoffload.transform.derived import Derived
from jaxoffload.transform.devices_loops import devices_loop_plan
from jaxoffload.transform.loops import LoopPlan, sweeps_of
from jaxoffload.transform.primitive import finest_parts, plan_request
from jaxoffload.transform.queued import QueuedCalls
from jaxoffload.transform.shards import (
    Shards,
    check_budgets,
    options_of_each,
    refuse_options,
    request_of_each,
)
from jaxoffload.transform.signature import Signature, shapes_of
from jaxoffload.transform.told import say_if_host_is_short, say_if_idle


class Program:
    """One signature of an offloaded function: traced once, planned once.

    Args:
      profile: takes what calls measure.
      argument_names: what the user calls each leaf.
      traced: the function, where that is known.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., Any],
        signature: Signature,
        options: Options,
        profile: Profile,
        argument_names: tuple[str, ...],
        traced: Traced | None = None,
    ):
        self._profile, self._argument_names = profile, argument_names
        self._tuner = Tuner(profile, options)
        shapes = shapes_of(signature)
        self.traced = traced or trace(call, shapes, signature.codes, signature.tree)
        self.as_traced = self.traced
        self.as_written, self.rewrites = self.traced.jaxpr, None
        is_over_devices = bool(signature.cuts) or is_spread(self.traced.jaxpr)
        if options.rewrites and not is_over_devices:
            made, self.rewrites = rewritten(
                self.traced.jaxpr, options.rewrites, model_of(backends.current()),
                options.rewrites_much,
            )  # fmt: skip
            if self.rewrites is not None:
                self.traced = dataclasses.replace(self.traced, jaxpr=made)
        self._derived = Derived(self.traced.written)
        self._is_ordered = has_ordered(self.traced.jaxpr)
        self._spread: Spread | None = None
        self._refusal: CaptureError | None = None
        if is_over_devices:
            try:
                cut = [getattr(s, "mesh", None) for s in (*signature.shardings, *signature.cuts)]
                meshes = [m for m in (*cut, compat.context_mesh()) if isinstance(m, Mesh)]
                in_specs = [s.spec for s in signature.cuts] or None
                jaxpr = self.traced.jaxpr
                pairs = (
                    pair_donated(jaxpr.in_avals, jaxpr.out_avals, signature.donated)
                    if in_specs
                    else ()
                )
                make = functools.partial(spread, jaxpr, meshes, in_specs, pairs)
                if in_specs is None:
                    self._spread = self._derived.spread_as_written(jaxpr, make)
                else:
                    self._spread = make()
            except CaptureError as error:
                self._refusal = error  # unless it runs whole
        self._shards: Shards | None = None
        if self._spread is not None:
            refuse_options(name, options)
            results = [tuple(aval.shape) for aval in self.traced.out_avals]
            self._shards = Shards(self._spread, results)
            options = options_of_each(options, self._spread.devices)
        check_budgets(name, options, self._spread)
        self.options = options
        self._name, self._signature = name, signature
        self._first = Once()
        self._whole: Whole | None = None
        if may_run_whole(options, signature.tiers):
            own = shapes if any(signature.shardings) and not self.traced.captured else None
            if signature.cuts:
                own = [x.update(sharding=s) for x, s in zip(shapes, signature.cuts, strict=True)]
            self._whole = Whole(self.traced.jaxpr, self.params()["donated"], name, own)
        self._plan: Plan | LoopPlan | None = None  # another one than the first, once that is known
        self._tuning = threading.Lock()
        self._calls = 0  # of the plan that stays
        self._queued: QueuedCalls | None = None
        self.verified = False

    @functools.cached_property
    def rewrites_line(self) -> str:
        """What rewrites saved, or would save where none are asked for; "" where nothing much."""
        if self.rewrites is not None:
            return str(self.rewrites)
        if self.options.rewrites or is_spread(self.as_written):
            return ""
        return hint(self.as_written, model_of(backends.current()))

    def params(self) -> dict[str, Any]:
        """What the primitive takes beside operands and jaxpr."""
        more = len(self.traced.captured)
        return {
            "derived": self._derived.link,
            "name": self._name,
            "argument_names": self._argument_names,
            "kinds": self._signature.kinds + (TensorKind.WEIGHT,) * more,
            "donated": self._signature.donated + (False,) * more,
            "options": self.options,
        }

    @functools.cached_property
    def planned(self) -> Any:
        """The jaxpr of direct calls, with the order of its effects in it. Inside of a
        transformation they have an order among those of what is around."""
        return self.traced.jaxpr if self.is_over_devices else in_order(self.traced.jaxpr)

    def request(self) -> Request:
        """What is planned for direct calls."""
        params, tiers = self.params(), self._signature.tiers
        rest = params["kinds"], params["donated"], self.options, tiers, self._argument_names
        if self._spread is None:
            return make_request(
                self.planned, self._name, *rest, has_spaces=True,
                in_numpys=self._signature.in_numpys,
            )  # fmt: skip
        request = request_of_each(self._spread, self._name, *rest, self._signature.in_numpys)
        # What else is in a lower tier is read in parts, of which nobody knows whether they change.
        lasting = request.lasting.intersection(self._signature.in_parts)
        return dataclasses.replace(request, lasting=lasting)

    @functools.cached_property
    def wanted_mesh(self) -> Any:
        """The mesh over which constraints in the function spread work; None if none does."""
        return wanted_mesh(self.as_written)

    @property
    def is_over_devices(self) -> bool:
        """Whether it is planned for several devices together."""
        return self._spread is not None

    def check_below(self, leaves: Sequence[Any]) -> None:
        """Looks at the arguments of a call inside a transformation.

        Raises:
          ValueError: it is over several devices, and one is in a lower tier.
        """
        below = [leaf for leaf in leaves if isinstance(leaf, TierArray)]
        if below and self.is_over_devices:
            raise ValueError(
                f"offload({self._name}) is over several devices, and an argument inside "
                f"jax.jit is {below[0]!r}, which XLA cannot divide among them. Pass a NumPy array "
                "or a jax.Array, or call it outside of jax.jit."
            )

    @functools.cached_property
    def sweeps(self) -> bool:
        """Whether each step of a scan reads more than the budget: one is planned where it can."""
        first, *_ = sweeps_of(self.request(), backends.current_name())
        return first.any(self.planned)

    def repeated(self) -> Request | None:
        """Of a function with loops that do not fit as they are, the part that holds most, or that
        needs more than the budget; None of others. That is known once it is planned, with every
        kernel compiled."""
        jaxpr = self.planned
        if not isinstance(self.options.device_memory, int):
            return None
        if not has_loops(jaxpr) and not Sweeps.every().any(jaxpr):
            return None
        try:
            plan = self.plan()
        except PlanError as error:
            refused: Request | None = error._refused
            return None if refused is None or refused.jaxpr is jaxpr else refused
        except CaptureError:
            return None
        return plan.main.request if isinstance(plan, LoopPlan) else None

    def finest_parts(self) -> list[Request]:
        """What loops repeat where they are planned in parts; nothing where that cannot be."""
        name = backends.current_name()
        return [] if self._spread else finest_parts(self.request(), self._derived, name)

    @property
    def whole(self) -> Whole | None:
        """The function as it is, where that is how a transformation takes it and it is clear that
        it fits."""
        budget, whole = self.options.device_memory, self._whole_if_it_fits(self.traced.jaxpr)
        assert budget is None or isinstance(budget, int)
        return whole if whole and whole.surely_fits(budget) else None

    @property
    def prefers_whole(self) -> bool:
        """Whether a direct call runs it as it is where that fits."""
        return self._whole_if_it_fits(self.planned) is not None

    def _whole_if_it_fits(self, jaxpr: Any) -> Whole | None:
        """The function as it is, unless this form of it is to be cut in any case, and can be."""
        is_cut = is_always_cut(self.options) and not must_run_whole(jaxpr)
        return None if is_cut else self._whole

    def plan(self) -> Plan | LoopPlan:
        return self._plan or self._first.get(self._make_plan)

    def plans_inside(self) -> list[Plan]:
        """Plans of calls inside a transformation."""
        return self._derived.made_plans()

    def plans_made(self) -> list[Plan]:
        """Those, and the one for direct calls."""
        own = self._first.made() if self._plan is None else [self._plan]
        return [*self.plans_inside(), *(plan for plan in own if isinstance(plan, Plan))]

    def _make_plan(self) -> Plan | LoopPlan:
        if self._refusal is not None:
            return whole_or_refused(self.request(), self._whole, self._refusal)
        made = self._spread
        backend = backends.current() if made is None else backends.several(made.devices)
        tiers = self._signature.tiers
        try:
            plan = plan_request(self.request(), tiers, self._derived, self._whole, backend)
        except PlanError as error:
            if made is None or self.traced.captured:
                raise
            plan = devices_loop_plan(
                error, self.traced.jaxpr, self.params(), self._signature, self._derived
            )
        if isinstance(plan, LoopPlan):
            return plan
        say_if_idle(plan, self._name, self.options)
        say_if_host_is_short(plan, self._name, self.options)
        return self._tuner.start(plan)

    def run(
        self, operands: list[Any], device: Any, may_have_numpys: bool = True
    ) -> tuple[list[Any], Run | WholeRun | None]:
        """Calls the plan; measures, and may change the plan for the next call.

        Args:
          device: to which results are committed, or None.
          may_have_numpys: False says that no operand is an array of NumPy's.

        Returns:
          The flat results, and what the run did: None where that is not known yet, as the results
          are not.
        """
        if self._queued is not None and not compat.looks_for_special_values():
            flat = self._queued.run(operands, may_have_numpys)
            if flat is not None:
                return flat, None
        plan, donated = self.plan(), self._signature.donated
        if isinstance(plan, WholePlan):
            return plan.run(self.as_given(operands)), WholeRun()
        if self._is_ordered:  # after those of programs of JAX's, which may be on their way
            jax.effects_barrier()
        if isinstance(plan, LoopPlan):
            results = plan.run(operands, donated, self.options)
            if self._is_ordered:
                jax.block_until_ready(results)
                jax.effects_barrier()
            return compat.typed(results, self.traced.out_weak_types), None
        before = plan.backend.used_memory() if self._tuner.measures else None
        try:
            if self._shards is None:
                results, run = run_plan(plan, operands, self.options, donated, device)
            else:
                results, run = self._shards.run(plan, operands, self.options, donated)
        except BaseException:
            with self._tuning:
                if self.plan() is plan:
                    self._plan = self._tuner.give_up(plan)
            raise
        results = compat.typed(results, self.traced.out_weak_types)
        # One call at a time is measured; what runs beside it would tell nothing.
        if self._tuning.acquire(blocking=False):
            try:
                if self.plan() is plan:
                    if before is not None:
                        after = plan.backend.used_memory()
                        self._profile.add_memory(before, after, plan.planned_bytes)
                    self._plan = self._tuner.next(plan, run)
                    self._queue_next(plan, run)
            finally:
                self._tuning.release()
        return results, run

    def _queue_next(self, plan: Plan, run: Run) -> None:
        """Has calls from now on be queued, where that is right and compiling the program pays."""
        if self._tuner.measures or self.plan() is not plan:
            return
        self._calls += 1
        if self._calls == queued.CALLS_BEFORE:
            tiers, jaxpr = self._signature.tiers, self.traced.jaxpr
            self._queued = queued.queued_calls(plan, run, jaxpr, self.params(), tiers, self._spread)

    def wait(self) -> None:
        """Waits for the end of the last call that was queued."""
        if self._queued is not None:
            self._queued.wait()

    def run_spread(self, operands: Sequence[Any], name: str) -> tuple[list[Any], WholeRun]:
        """Runs whole on arrays that are spread over several devices, as jit would.

        Args:
          name: of such an argument.

        Raises:
          PlanError: that takes more of each device than the budget.
        """
        budget, arguments = self.options.device_memory, self.as_given(operands)
        assert budget is None or isinstance(budget, int)
        if self._refusal is not None:
            whole_or_refused(self.request(), self._whole, self._refusal)
        if self._whole is None:
            raise PlanError(
                f"offload({self._name}): {name} is spread over several devices, but not over a "
                "mesh that is the same for all, and there are arguments or results in a lower "
                "tier. Put it on one mesh: jax.device_put(array, NamedSharding(mesh, spec))."
            )
        if not self._whole.surely_fits(budget):
            needed = self._whole.needed_bytes_for(arguments)
            assert budget is not None
            if needed > budget:
                raise PlanError(
                    f"offload({self._name}): {name} is spread over several devices, but not over a "
                    "mesh that is the same for all arguments, and only then can it be planned. The "
                    f"function as it is takes {format_bytes(needed)} of each, and device_memory is "
                    f"{format_bytes(budget)}. Pass device_memory={needed} or more, or put the "
                    "arguments on one mesh: jax.device_put(array, NamedSharding(mesh, spec))."
                )
        return list(self._whole.run(*arguments)), WholeRun()

    def as_given(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves, numbers of Python's as such again: under jit they give way in promotions."""
        return [
            x.item() if weak and isinstance(x, np.ndarray) else x
            for x, (_, _, weak) in zip(leaves, self._signature.avals, strict=True)
        ]


compat.hide_frames_of(__file__)

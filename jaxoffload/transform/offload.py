"""`offload`: a function that runs within a device memory budget."""

import dataclasses
import functools
import time
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.words import Code, code_of, decoded, encoded
from jaxoffload.compile import callbacks
from jaxoffload.errors import PlanError
from jaxoffload.identity import Key
from jaxoffload.options import Options, make_options
from jaxoffload.plan.cost.machines import Machine
from jaxoffload.policies import LaunchPolicy
from jaxoffload.report.explain import Explanation
from jaxoffload.report.predict import Prediction, predict
from jaxoffload.report.tradeoff import Tradeoff, tradeoff
from jaxoffload.runtime import backends
from jaxoffload.runtime.arrays import TierArray
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.profile import Profile
from jaxoffload.runtime.run import Run, make_run
from jaxoffload.search.whole import (
    WholePlan,
    WholeRun,
    is_always_cut,
    may_run_whole,
)
from jaxoffload.transform import rules
from jaxoffload.transform.loops import LoopPlan
from jaxoffload.transform.primitive import bind
from jaxoffload.transform.program import Program
from jaxoffload.transform.signature import ArgumentSpec, BeyondPlans, Call
from jaxoffload.transform.verification import check_special_values, compare_with_jit

AUTO_MARGIN = 0.1
"""Share of the free memory that device_memory="auto" leaves. Beside arena, workspace, host tier and
results, the first runs of the two steps of benchmarks/ratios.py took 38 and 92 MiB (thread stacks,
buffers of XLA's products, allocator slack); the rest is for neighbours."""
KNOWN_MARGIN = 0.03
"""The same where a profile tells what runs take: what is left is for other processes."""


_NOT_PLACED = (np.ndarray, TierArray)
"""Arrays that are on no device."""

_all_offloaded: "weakref.WeakSet[Offloaded]" = weakref.WeakSet()


def clear_programs() -> None:
    """Forgets what was traced, planned and compiled for any function."""
    for offloaded in list(_all_offloaded):
        offloaded.clear_cache()


class Offloaded:
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
        self._last_run: Run | WholeRun | None = None
        self._last_ended = -1  # on the runtime's clock
        self._as_it_is: Any = None
        is_whole = may_run_whole(options, ()) and not is_always_cut(options)
        if options.device_memory is None and is_whole:
            self._as_it_is = self._jitted(
                donate_argnums=sorted(spec.donated_positions),
                donate_argnames=sorted(spec.donated_names),
            )
        _all_offloaded.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._as_it_is is not None and not _has_tier_arrays((args, kwargs)):
            results = self._as_it_is(*args, **kwargs)
            self._note(WholeRun())
            return results
        if compat.is_jit_disabled():
            return self._function(*_on_device(args), **_on_device(kwargs))
        if callbacks.is_inside():
            return self._plain(*_on_device(args), **_on_device(kwargs))
        try:
            call = self._spec.bind(args, kwargs)
        except BeyondPlans:
            if self._options.device_memory is not None:
                raise
            return self._plain(*_on_device(args), **_on_device(kwargs))
        program = self._program(call)
        if compat.is_tracing() or program.traced.captured:
            self._check_trace(call)
            whole = program.whole
            if whole is not None and compat.in_manual_region():
                # What was traced knows nothing of which values differ from device to device.
                return self._plain(*_on_device(args), **_on_device(kwargs))
            if whole is not None:
                more = program.traced.captured_words()
                flat = whole.inline(*program.as_given(call.leaves), *more)
            else:
                leaves = [*call.leaves, *program.traced.captured_words()]
                flat = bind(leaves, program.traced.jaxpr, **program.params())
        else:
            flat = self._run(program, call)
        if program.traced.has_codes:
            flat = list(map(_decoded, flat, program.traced.out_codes))
        return jax.tree.unflatten(program.traced.out_tree, flat)

    @functools.cached_property
    def _plain(self) -> Any:
        """The function jitted, with nothing donated."""
        return self._jitted()

    def _jitted(self, **options: Any) -> Any:
        spec = self._spec
        return jax.jit(
            self._function,
            static_argnums=sorted(spec.static_positions),
            static_argnames=sorted(spec.static_names),
            **options,
        )

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes (arrays, or `jax.ShapeDtypeStruct`).

        Of a function with a `while_loop` that does not fit as it is, what the loop repeats is
        planned: the plan of that.

        Raises:
          PlanError: the budget is too small; says the smallest that can work, and why.
        """
        plan = self._program(self._spec.bind(args, kwargs)).plan()
        return plan.main if isinstance(plan, LoopPlan) else plan

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Where the memory goes and whether it fits, from shapes alone; print it.

        A budget that is too small is explained, not raised.
        """
        call = self._spec.bind(args, kwargs)
        program = self._program(call)
        asked = self._options.device_memory
        found = Explanation.of(program.request(), asked, call.leaves)
        if found.plan is None and (part := program.repeated()) is not None:
            return Explanation.of(part, asked)
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
        program = self._program(self._spec.bind(args, kwargs))
        request = program.request()
        if self._options.device_memory in ("auto", None):
            return predict(request.with_options(device_memory=None), machine, policy, jitter)
        try:
            return predict(request, machine, policy, jitter)
        except PlanError:
            part = program.repeated()
            if part is None:
                raise
        return predict(part, machine, policy, jitter)

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
        self._spec.forget()

    def _program(self, call: Call) -> Program:
        backend = backends.current_name()
        key = call.signature.key(compat.trace_context(), backend)
        program = self._programs.get(key)
        if program is None:
            backends.prepare(backend)
            # Under no lock: tracing runs the user's code, which may call this very function.
            program = self._make_program(call)
            if not program.traced.captured:  # tracers are not to outlive their transformation
                program = self._programs.setdefault(key, program)  # atomic; the first one stays
        return program

    def _make_program(self, call: Call) -> Program:
        options, asked = self._options, self._options.device_memory != "auto"
        if not asked:
            free = backends.current().free_memory()
            margin = int(free * AUTO_MARGIN)
            if self._unseen_bytes:
                margin = int(free * KNOWN_MARGIN) + self._unseen_bytes
            budget = _rounded(max(1, free - margin))
            options = dataclasses.replace(options, device_memory=budget)
        body = self._spec.caller(self._function, call.signature)
        names = self._spec.names_of(call.signature)
        return Program(self._spec.name, body, call.signature, options, asked, self.profile, names)

    def _run(self, program: Program, call: Call) -> list[Any]:
        for leaf in call.leaves:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"offload({self._spec.name}) was called with a ShapeDtypeStruct, which has no "
                    "data. Pass arrays, or call .plan() or .explain() with shapes."
                )
        spread, device = self._placed(call)
        if spread is not None:
            flat, run = program.run_spread(call.leaves, self._spec.name_of(call, spread))
            self._note(run)
            return flat
        plan = program.plan()  # what cannot run is refused before anything runs
        expected = None
        if not isinstance(plan, WholePlan) and program.options.verify and not program.verified:
            leaves = [_read(x) if isinstance(x, TierArray) else x for x in call.leaves]
            expected = compare_with_jit(program.traced.jaxpr, leaves)
        if not isinstance(plan, WholePlan):
            self._check_transfers(call)
        flat, run = program.run(call.leaves, device)
        if run is not None:
            self._note(run)
        if expected is not None:
            expected.check(self._spec.name, flat)
            program.verified = True
        check_special_values(self._spec.name, flat)
        return flat

    def _placed(self, call: Call) -> tuple[int | None, Any]:
        """A leaf that is spread over several devices, if there is one; and the device to which
        arguments, and so results, are committed, None if none is.

        Raises:
          ValueError: there are two, as under jit.
        """
        first, device, seen = 0, None, None
        for i, leaf in enumerate(call.leaves):
            if isinstance(leaf, _NOT_PLACED) or not leaf.committed or leaf.sharding is seen:
                continue
            seen = leaf.sharding
            if len(seen.device_set) > 1:
                return i, None
            if device is None:
                first, (device,) = i, seen.device_set
            elif device not in seen.device_set:
                (other,) = seen.device_set
                raise ValueError(
                    f"offload({self._spec.name}): {self._spec.name_of(call, first)} is committed "
                    f"to {device} and {self._spec.name_of(call, i)} to {other}. Put both on one "
                    "device with jax.device_put, as for jax.jit."
                )
        return None, device

    def _check_transfers(self, call: Call) -> None:
        if not compat.refuses_transfers_to_device():
            return
        for i, leaf in enumerate(call.leaves):
            if isinstance(leaf, np.ndarray):
                raise RuntimeError(
                    f"offload({self._spec.name}): {self._spec.name_of(call, i)} is in NumPy's "
                    "memory, and jax.transfer_guard disallows its transfer to the device. Pass it "
                    "through jax.device_put first."
                )

    def _note(self, run: Run | WholeRun) -> None:
        self._last_run, self._last_ended = run, time.monotonic_ns()

    def _check_trace(self, call: Call) -> None:
        if self._options.results != "device":
            raise ValueError(
                f"offload({self._spec.name}): results={self._options.results!r} inside jax.jit or "
                "another transformation, where every result is an array on the device. Call the "
                "offloaded function outside."
            )
        for leaf, donated in zip(call.leaves, call.signature.donated, strict=True):
            if isinstance(leaf, TierArray) and donated:
                raise ValueError(
                    f"offload({self._spec.name}): {leaf!r} is donated inside jax.jit or another "
                    "transformation, where it cannot be handed back in its tier. Call the "
                    "offloaded function outside, or take it out of donate_argnums."
                )

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        options = self._options
        if options.memory is not None:
            return f"offload({self._spec.name}, memory={options.memory!r})"
        return f"offload({self._spec.name}, device_memory={options.device_memory!r})"


def _rounded(budget: int) -> int:
    """A budget down to five binary digits, at most a sixteenth less: what is free differs from
    process to process, and the plan that one has made is to serve the next."""
    step = 1 << max(0, budget.bit_length() - 5)
    return budget // step * step


def _on_device(tree: Any) -> Any:
    """A pytree with arrays of JAX's instead of those in a lower tier."""
    return jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x)) if isinstance(x, TierArray) else x, tree
    )


def _read(array: TierArray) -> np.ndarray:
    """The words of an array in a lower tier."""
    return encoded(np.asarray(array), code_of(array))


def _decoded(x: Any, code: Code) -> Any:
    """A result of what it is the words of. Keys are arrays of JAX's wherever results go."""
    if isinstance(x, TierArray) and code is not None:
        return (
            decoded(jnp.asarray(np.asarray(x)), code) if isinstance(code, str) else x.seen_as(code)
        )
    return decoded(x, code)


def offload(
    function: Callable[..., Any] | None = None,
    *,
    device_memory: int | float | str | None = "auto",
    host_memory: int | float | str | None = None,
    memory: int | float | str | None = None,
    disk: Any = None,
    donate_argnums: Any = None,
    donate_argnames: Any = None,
    static_argnums: Any = None,
    static_argnames: Any = None,
    launch: str | LaunchPolicy = "work-conserving",
    vertex_memory: int | str | None = None,
    check: bool = False,
    verify: bool = False,
    results: str = "device",
    policy: str = "auto",
    recompute: str = "auto",
    host_compute: str = "auto",
    cut: str = "auto",
    profile: Any = None,
) -> Any:
    """Makes a function run within a device memory budget, with the same results.

    Use it where you would use `jax.jit`, best around the whole step: `offload(train_step)`; of
    `grad(offload(loss))` both passes are offloaded, each by itself. Works as a decorator, with or
    without options; called directly or inside `jax.jit`.

    Args:
      function: takes and returns pytrees of arrays.
      device_memory: bytes of device memory that it may use: a number, or text such as "512MiB".
        "auto": what the device has free when the function is first planned, less a tenth (or less
        what runs took beside their plans, if `profile` tells). None: no limit.
      host_memory: bytes of host memory that may hold what the device cannot; None for no limit.
        Arguments and results are the caller's and not counted.
      memory: on a CPU, in place of those two: bytes of RAM for all that a call takes beside its
        arguments: tensors, workspace, and results that follow no donated argument. Moving a tensor
        to another place in RAM would save nothing. So values are split and recomputed, and with a
        `disk` moved there, until the sum fits: docs/memory.md.
      disk: a folder, or several in a list, to go on to where `host_memory` is full: a fast local
        drive. Files there have no name, are private, and vanish with the process.
      donate_argnums, donate_argnames: arguments whose memory the results may take; as for
        `jax.jit`. They cannot be used afterwards.
      static_argnums, static_argnames: arguments that are compiled in; as for `jax.jit`.
      launch: "work-conserving", "fixed", or a policy from `jaxoffload.policies`.
      vertex_memory: the largest working set of a vertex in bytes. It fixes the cut into vertices,
        and with it every rounding: results are then equal bit for bit whatever the budget. None
        lets the cut follow the budget.
      check: watch every run for two tensors in one place at one time (slower; for tests).
      verify: compare the first run with plain `jax.jit`, and with float64 where they differ by more
        than rounding, which needs the memory for that.
      results: "host": results come back as `HostArray`s, for those that the device cannot hold
        (outside `jax.jit` only). Results of donated arrays in a lower tier stay in their tier
        either way.
      policy: "auto": after some direct calls the plan is made again from what they measured, if a
        simulation says that it pays, and taken back if it does not; the cut stays, and with it
        every bit of the results. Only the first call may change the cut, and so the rounding: where
        its kernels took twice as long as another cut promises. "once": the first plan stays.
      recompute: "auto": values that would not stay on the device until they are read again are
        recomputed instead of moved, as far as a simulation says that this is faster (random
        numbers come from the same keys; loops and sorts are not recomputed). "never": they are
        moved. "always": all are recomputed, as with `jax.checkpoint` everywhere. With
        `vertex_memory` nothing is.
      host_compute: "auto": what an optimizer does to a parameter runs on the host's cores, on the
        parameter and its state where the caller has them, as far as a simulation says that this is
        faster than moving them to the device and back; it starts as soon as the gradient has
        arrived, beside the rest of the backward pass. "never": on the device. "always": all of it
        on the host's cores. Unless everything fits, or with "never", what is in
        `compute_on("device_host")` is there too. On a CPU only, so far, where these are the
        device's cores too.
      cut: "auto": a function is cut into vertices only where memory demands it; where everything
        fits it runs whole, as `jax.jit` would run it, at any first call's and any step's price.
        "always": it is cut there, too. That takes longer to compile, and on a CPU training steps
        may run faster than jit's, for layers of a scan are then programs of their own.
      profile: what earlier runs measured: a `Profile`, or the path of a saved one. The function is
        cut and planned for the machine that they found, so that results may differ by rounding
        from those without. Also `Offloaded.profile`, which goes on measuring.

    Returns:
      An `Offloaded`: callable like `function`, with `plan`, `explain` and `last_run`.

    Raises:
      TypeError, ValueError: an option's value is not legal; says what is.
      PlanError: (when called) the budget is too small; says the smallest that can work.

    >>> import jax.numpy as jnp
    >>> import jaxoffload as jo
    >>> double = jo.offload(lambda x: 2 * x, device_memory=None)
    >>> double(jnp.arange(3))
    Array([0, 2, 4], dtype=int32)

    References:
      TURNIP: a "nondeterministic" GPU runtime with CPU RAM offload, sections 4 to 7.
    """
    measured = profile if isinstance(profile, Profile) else None
    if measured is None:
        measured = Profile() if profile is None else Profile.load(profile)
    options = make_options(
        device_memory, host_memory, disk, vertex_memory, launch, check, verify, results, policy,
        recompute, cut, measured.known_rates(), memory, host_compute,
    )  # fmt: skip

    def decorate(f: Callable[..., Any]) -> Offloaded:
        if not callable(f):
            raise TypeError(
                f"offload: function={f!r} is a {type(f).__name__}. Pass a function of arrays."
            )
        spec = ArgumentSpec(f, static_argnums, static_argnames, donate_argnums, donate_argnames)
        return Offloaded(f, spec, options, measured)

    return decorate if function is None else decorate(function)


def _has_tier_arrays(tree: Any) -> bool:
    return any(isinstance(leaf, TierArray) for leaf in jax.tree.leaves(tree))


rules.register()
compat.hide_frames_of(__file__)

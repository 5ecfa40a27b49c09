"""Direct calls of short runs, as XLA programs of one custom call: queued, and read later.

Takes a plan that stays and flat arrays; gives the flat results, maybe before the run has ended. JAX
makes the results in C++, as those of its own programs.

Longer runs are waited for: Ctrl-C ends them, and what a call costs beside them is little. So are
those with large new results: waited for, they take the memory of the ones before them
(runtime/host_results.py), and made by JAX the system clears pages for them in each call.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload import _native
from jaxoffload.capture.spread import Spread
from jaxoffload.runtime.host_results import byte_count
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.run import Run, annotation, make_run
from jaxoffload.transform.derived import Derived
from jaxoffload.transform.devices_call import Asked, aliases_of, call_of_all, with_plan
from jaxoffload.transform.primitive import bind

CALLS_BEFORE = 16
"""Direct calls of a plan before its program is compiled, which takes as long as some hundred."""
_SHORT_SECONDS = 0.1
"""Of a run: nobody waits longer for Ctrl-C."""
_QUICK_SECONDS = 1e-3
"""Of a run: waking a thread or two takes a tenth of that."""
_LEAF_BYTES = 80 << 10
"""Of how many bytes of new results clearing the pages takes as long as a leaf that is not made in
C++."""
_OPERATIONS = 1024
_CONSTANT_BYTES = 1 << 20
"""Of what the function closes over: a program has a copy."""
_queuing_thread: list[int] = []
"""That queues calls over several devices, the first to do so. Programs of JAX's CPU client that are
over several devices and come from several threads can wait for one another for good."""

Call = Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]
"""Of flat tracers: the flat results of a plan, and what is there when its run has ended; nothing of
the latter where the results are as good."""


class QueuedCalls:
    """A plan as a program of JAX's.

    Args:
      paired: arguments whose memory results take.
      params: what the primitive takes beside the function.
      thread: whose calls are queued; None: those of all.
    """

    def __init__(
        self,
        plan: Plan,
        call: Call,
        paired: set[int],
        params: dict[str, Any],
        thread: int | None = None,
    ):
        self._plan, self._is_waited_for = plan, params["options"].check
        self._thread = thread
        self._title = f"jaxoffload {plan.name}"
        given = [i for i, d in enumerate(params["donated"]) if d]
        self._others = [i for i in given if i not in paired]

        def function(*leaves: Any) -> tuple[list[Any], list[Any]]:
            return call(leaves)

        function.__name__ = params["name"]
        donated = [i for i in given if i in paired]
        self._program = jax.jit(function, donate_argnums=donated)
        self._donates, self._process = bool(donated), os.getpid()
        self._is_refused = False
        self._which: int | None = None
        self._ended: list[Any] = []  # of the last call

    def run(self, leaves: list[Any], may_have_numpys: bool = True) -> list[Any] | None:
        """Queues a run on arrays, those that are donated are deleted; gives its flat results.

        None, and nothing has happened, where JAX would not take them: what is donated is passed
        twice, arrays are on other devices, this is a thread or a child that may not queue.

        Raises:
          RunError: it failed, and is known to have at once. Otherwise who reads a result is told,
          by JAX.
        """
        if self._donates and not _native.are_distinct(leaves):
            return None
        if self._is_refused or os.getpid() != self._process:
            return None
        if self._thread is not None and self._thread != threading.get_ident():
            return None
        # JAX reads NumPy's arrays where they are, and they are the caller's once the call returns.
        is_read, numpys = False, ()
        if may_have_numpys:
            numpys = [i for i, x in enumerate(leaves) if type(x) is np.ndarray]
        if numpys:
            leaves = list(leaves)
            for i in numpys:
                if leaves[i].ndim:
                    is_read = True
                else:
                    leaves[i] = leaves[i].copy()
        try:
            with annotation(self._title):
                results, ended = self._program(*leaves)
            self._ended = ended or self._smallest(results)
            for i in self._others:
                if isinstance(leaves[i], jax.Array):
                    leaves[i].delete()
            if self._is_waited_for or is_read:
                jax.block_until_ready(self._ended)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            report = self._plan.last_report()
            if report is not None and report.error_message and report.error_message in str(error):
                make_run(self._plan, report)  # it tells more
            is_gone = any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)
            if "INVALID_ARGUMENT" in str(error) and not is_gone:
                return None  # two arrays that have one memory
            if "incompatible devices" in str(error) and not is_gone:
                self._is_refused = True
                return None
            raise
        return results

    def _smallest(self, results: list[Any]) -> list[Any]:
        """One of the results, to be waited for: it is kept until the next call."""
        if self._which is None and results:
            self._which = min(range(len(results)), key=lambda j: results[j].nbytes)
        return [] if self._which is None else [results[self._which]]

    def wait(self) -> None:
        """Waits for the end of the last run, however it ends."""
        for x in self._ended:
            if not x.is_deleted():  # what takes it over comes after the run
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    x.block_until_ready()


def _on_one(plan: Plan, run: Run, jaxpr: Any, params: dict[str, Any]) -> Call:
    """A call of one device, which comes back before its run has ended, but for quick ones: they run
    on the thread that calls, which is quicker where a thread takes as long to wake."""
    derived = Derived.of_plan(plan, jaxpr, params)
    returns_at_once = run.seconds >= _QUICK_SECONDS

    def call(leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        own: dict[str, Any] = {**params, "derived": derived.link}
        results = bind(leaves, jaxpr, **own)
        some = next((x for x in results if returns_at_once and x.size), None)
        if some is None:
            return results, [jnp.zeros(0)]
        # XLA's CPU client executes programs of fewer operations on the calling thread, and
        # does not know of ours.
        count = jnp.arange(_OPERATIONS, dtype=jnp.int32)
        return results, [count * some.ravel()[0].astype(bool).astype(jnp.int32)]

    return call


def _on_several(plan: Plan, jaxpr: Any, made: Spread) -> Call:
    """A call of several devices, which XLA executes on a thread each."""
    asked = Asked(plan.request, made.devices)
    derived = with_plan(plan, asked)

    def call(leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        results = call_of_all(leaves, made, asked, derived.link)
        return compat.typed(results, [a.weak_type for a in jaxpr.out_avals]), []

    return call


def queued_calls(
    plan: Plan,
    run: Run,
    jaxpr: Any,
    params: dict[str, Any],
    tiers: Sequence[str],
    made: Spread | None = None,
) -> QueuedCalls | None:
    """The calls of a plan, one run of which was this, if they may be queued: None otherwise.

    Args:
      jaxpr: the function that is planned, closed, over arrays.
      params: what the primitive takes beside it.
      tiers: of each argument "host", "disk" or "".
      made: the function over several devices, or None.
    """
    options = params["options"]
    leaves = len(params["kinds"]) + len(plan.out_shapes)
    paired = {j for _, j in plan.taskgraph.donated}
    new = sum(byte_count(s) for j, s in enumerate(plan.out_shapes) if j not in paired)
    constants = sum(int(np.asarray(c).nbytes) for c in plan.constants)
    may = (
        run.seconds < _SHORT_SECONDS
        and new <= leaves * _LEAF_BYTES
        and plan.backend.name == "cpu"
        and not any(tiers)
        and options.results == "device"
        and options.memory is None
        and plan.disk_bytes == 0
        and constants <= _CONSTANT_BYTES
        and not plan.calls_back  # what a callback raises is told at once
    )
    if not may:
        return None
    if made is None:
        return QueuedCalls(
            plan, _on_one(plan, run, jaxpr, params), {i for i, _ in plan.taskgraph.donated}, params
        )
    thread = (_queuing_thread or [threading.get_ident()])[0]
    if thread != threading.get_ident():
        return None
    _queuing_thread[:] = [thread]
    return QueuedCalls(plan, _on_several(plan, jaxpr, made), set(aliases_of(plan)), params, thread)

"""Callers' arrays as the runtime takes them: where the bytes of arguments and results are.

Takes a plan, arrays, and which of them are donated; gives `BoundArguments` for a run, and after it
the results. Here for a CPU, where arguments and results are host memory, and a result may alias a
donated argument that nobody else sees; for a GPU in callers_on_device.py.
"""

import collections
import dataclasses
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload import _native
from jaxoffload.graphs.taskgraph import TaskGraph
from jaxoffload.runtime.arrays import DiskArray, TierArray
from jaxoffload.runtime.host_results import HostResults
from jaxoffload.runtime.request import Request


class Planned(Protocol):
    """The part of a `Plan` that is used here (plan.py imports this module)."""

    constants: tuple[Any, ...]
    out_shapes: tuple[jax.ShapeDtypeStruct, ...]
    resident: bool
    taskgraph: TaskGraph
    request: Request

    @property
    def memory(self) -> int | None:
        """Bytes for everything beside the arguments; None: there is no such limit."""
        ...

    @property
    def gathered_arguments(self) -> frozenset[int]:
        """Arguments of which some vertex reads rows where the caller has them."""
        ...


@dataclasses.dataclass
class BoundArguments:
    """One run's arguments and results, bound to memory.

    Attributes:
      arguments, places: what the runtime takes for each: what holds the bytes, or an address.
      made: what `results` needs to know, by result.
      held: what must live until the run has ended.
    """

    arguments: list[Any]
    places: list[Any]
    made: dict[int, Any]
    held: list[Any]


def handle_of(array: TierArray) -> Any:
    """What the runtime takes for an array in a lower tier: what holds its bytes.

    Raises:
      RuntimeError: it has been deleted.
    """
    held = array.source if isinstance(array, DiskArray) else array.buffer  # pyrefly: ignore[missing-attribute]
    if held is None:
        array.check_alive()
    elif array.tier == "host" and held.num_loans:
        held.renew_stamp()  # others may have written to it
    return held


class HostMemory:
    """Callers' arrays are in host memory: CPU."""

    def __init__(self) -> None:
        # Result buffers in use, by address, so that a donated one can be written again in place.
        self._ours: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._results: weakref.WeakKeyDictionary[Any, HostResults] = weakref.WeakKeyDictionary()

    def bind(
        self,
        plan: Planned,
        operands: Sequence[Any],
        donated: Sequence[bool],
        tier_results: Mapping[int, TierArray],
    ) -> BoundArguments:
        """Arguments and results for a run.

        Args:
          operands: the caller's; the plan's constants follow.
          donated: which of them may be overwritten; they are deleted.
          tier_results: results that are in a lower tier.
        """
        arguments: list[Any] = []
        views: list[Any] = []
        some_are_jaxs = False
        known = self._results_of(plan)
        counts = known.argument_counts
        for i, array in enumerate((*operands, *plan.constants)):
            if isinstance(array, TierArray):
                arguments.append(handle_of(array))
                continue
            some_are_jaxs |= isinstance(array, jax.Array)
            if (
                i < len(donated)
                and donated[i]
                and self._may_take(plan, array, address := address_of(array))
            ):
                arguments.append(address)
            else:
                # A view: its memory stays although somebody deletes the array while the run reads
                # it, and where JAX has another layout it is a copy in rows.
                view = np.ascontiguousarray(array)
                if i < len(counts) and view.nbytes != counts[i]:
                    raise ValueError(
                        f"offload({plan.request.name}): argument {i} is {view.nbytes} bytes of "
                        f"{view.dtype}, planned with {counts[i]}. Pass an array as it was planned."
                    )
                views.append(view)
                arguments.append(address_of(view))
        reused: dict[int, Any] = {}
        held: list[Any] = []
        if some_are_jaxs and any(donated):
            reused, held = self._take_donated(plan, operands, arguments, donated)
        held += views
        buffers: dict[int, Any] = {}
        if len(tier_results) < len(plan.out_shapes):
            buffers = {
                j: reused[j] if j in reused else _native.HostBuffer(max(1, count))
                for j, count in enumerate(known.byte_counts)
                if j not in tier_results
            }
        places = [
            handle_of(tier_results[j]) if j in tier_results else _place_of(buffers[j])
            for j in range(len(plan.out_shapes))
        ]
        return BoundArguments(arguments, places, buffers, held)

    def results(self, plan: Planned, bound: BoundArguments, device: Any = None) -> dict[int, Any]:
        """The results that are not in a lower tier, after a run that succeeded.

        Args:
          device: of JAX, to which they are committed; None: to none. Several: of a plan for as
            many: then new ones are words, of which whoever called makes arrays over all devices.
        """
        if not bound.made:
            return {}
        if device is None and jax.default_backend() != "cpu":
            device = jax.local_devices(backend="cpu")[0]
        new = {j: x for j, x in bound.made.items() if not isinstance(x, compat.ArrayImpl)}
        self._ours.update((buffer.address, buffer) for buffer in new.values())
        # Arrays of JAX's already, whose memory the run wrote; they may have to be committed.
        written = {j: x for j, x in bound.made.items() if j not in new}
        if isinstance(device, tuple):
            return written | self._results_of(plan).words(new)
        with compat.transfers_allowed():
            written = jax.device_put(written, device, may_alias=True) if written else {}
        return written | self._results_of(plan).arrays(new, device)

    def _results_of(self, plan: Planned) -> HostResults:
        found = self._results.get(plan)
        if found is None:
            found = self._results[plan] = HostResults(plan.out_shapes, self._avals_of(plan))
        return found

    def _avals_of(self, plan: Planned) -> Sequence[Any]:
        """Of the arguments, where they are those of one device."""
        request = plan.request
        return request.jaxpr.in_avals if request.num_devices == 1 else ()

    def _may_take(self, plan: Planned, array: Any, address: int) -> bool:
        """Whether the memory of a donated array, which is at `address`, may be a result's: it is of
        a result that nobody has copied since, or, where results are to take no memory of their own,
        any of JAX's."""
        if not isinstance(array, jax.Array):
            return False
        if address in self._ours:
            return True
        return plan.memory is not None and compat.is_in_rows(array)

    def _take_donated(
        self,
        plan: Planned,
        operands: Sequence[Any],
        arguments: list[Any],
        donated: Sequence[bool],
    ) -> tuple[dict[int, Any], list[Any]]:
        """Takes over the donated operands; `arguments` has their addresses after that.

        Returns:
          The buffers that nobody else can see, and arrays of JAX that have the memory of others,
          by the result that is written over them; and what must be held during the run: other
          buffers, and arrays to delete after it.
        """
        alias_of = dict(plan.taskgraph.donated)
        times = collections.Counter(arguments)
        reused: dict[int, Any] = {}
        held: list[Any] = []
        ours: dict[int, Any] = {}
        theirs: dict[int, Any] = {}
        for i, given in enumerate(donated):
            operand = operands[i]
            if not given or not isinstance(operand, jax.Array):
                continue
            buffer = self._ours.get(arguments[i])
            if buffer is None or times[arguments[i]] > 1:
                is_free = times[arguments[i]] == 1 and i in alias_of
                if is_free and buffer is None and self._may_take(plan, operand, arguments[i]):
                    theirs[i] = operand
                else:
                    held.append(operand)
                continue
            operand.delete()
            ours[i] = buffer
        buffer = operand = None
        if ours:
            compat.collect_released_buffers()
        for i in list(ours):
            buffer = ours[i]
            del ours[i]
            # One more reference is a view that somebody still reads: its memory is left alone.
            if i in alias_of and _references([buffer]) == _ALONE:
                reused[alias_of[i]] = buffer
            else:
                held.append(buffer)
        if theirs:
            operand = None
            # XLA gives the memory of those that nobody else sees, and copies of the others.
            taken = dict(zip(theirs, identities(list(theirs.values())), strict=True))
            for i, array in taken.items():
                arguments[i], reused[alias_of[i]] = address_of(array), array
        return reused, held


def _place_of(buffer: Any) -> Any:
    """What the runtime takes for the memory of a result."""
    return address_of(buffer) if isinstance(buffer, jax.Array) else buffer


def _references(cell: list[Any]) -> int:
    return sys.getrefcount(cell[0])


def _count_alone() -> int:
    buffer = object()
    return _references([buffer])


_ALONE = _count_alone()
"""What `_references` says of an object that a variable and the list have, and nobody else. It is
measured, for versions of Python differ in what they count on the way."""


def address_of(array: Any) -> int:
    """Address of an array's bytes where they are."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0]  # a third of what `ctypes` takes
    array.block_until_ready()
    return compat.pointer_of(array)


identities = compat.unchecked(
    jax.jit(lambda arrays: list(arrays), donate_argnums=0, keep_unused=True)
)
"""Arrays with the bytes, and where XLA allows it the memory, of some that are donated."""

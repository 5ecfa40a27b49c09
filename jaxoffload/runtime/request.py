"""What is asked of the planner: a jaxpr, what its arguments are, a budget and other options."""

import dataclasses
from collections.abc import Iterable, Sequence, Set
from typing import Any

import jax

from jaxoffload import _jax_compat as compat
from jaxoffload.graphs.taskgraph import TaskGraph, TensorKind
from jaxoffload.options import Options


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What is to be planned.

    Attributes:
      name: the user's function, for messages.
      jaxpr: a closed jaxpr over arrays.
      kinds: for each argument, what it is to the user.
      donated: pairs (argument, result) that may share memory. Of an argument in a lower tier
        the result comes back in the same tier.
      options: with `device_memory` already a number or None.
      disk_arguments: those that are on disk.
      host_arguments: those in host memory: in the host tier, in JAX's memory space for it, or in
        NumPy's where the device has memory of its own.
      host_results: those that JAX's memory spaces want in host memory.
      reloads_all: no argument may be read where it is: kernels cannot reach some of them.
      argument_names: what the user calls each argument, for reports; empty where that is not known.
      num_devices: that each run the jaxpr, on arguments of their own; what is said here of
        arguments and results is of one device. Of all devices, argument or result `i` of device `d`
        is number `i * num_devices + d` (capture/devices.py).
      replicas: for each argument, for each device the first that has the same bytes of it; () where
        that is not known.
      has_near_constants: what the function closes over is in the device's memory, if that has its
        own, whatever it is in the jaxpr: inside `jax.jit`.
      lasting: arguments of which the runtime knows from call to call whether they have changed, so
        that they may stay on the device: those in a lower tier; donated ones in host memory only.
    """

    name: str
    jaxpr: Any
    kinds: tuple[TensorKind, ...]
    donated: tuple[tuple[int, int], ...]
    options: Options
    disk_arguments: frozenset[int] = frozenset()
    reloads_all: bool = False
    argument_names: tuple[str, ...] = ()
    lasting: frozenset[int] = frozenset()
    num_devices: int = 1
    replicas: tuple[tuple[int, ...], ...] = ()
    host_arguments: frozenset[int] = frozenset()
    host_results: frozenset[int] = frozenset()
    has_near_constants: bool = False

    def each(self, of_one: Iterable[Any]) -> list[Any]:
        """What is the same on every device, for the arguments or results of all."""
        return [x for x in of_one for _ in range(self.num_devices)]

    def of_all(self, of_one: Iterable[int]) -> frozenset[int]:
        """Numbers of arguments or results of one device, as those of all devices have them."""
        count = self.num_devices
        return frozenset(i * count + d for i in of_one for d in range(count))

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """`donated`, of all devices."""
        count = self.num_devices
        if count == 1:
            return self.donated
        return tuple((i * count + d, j * count + d) for i, j in self.donated for d in range(count))

    def staying(self, graph: TaskGraph) -> frozenset[int]:
        """The arguments that may stay on the device where the function is cut like that. Of a
        donated one over which its result is not written the next call has another."""
        written = {i for i, _ in graph.donated}
        gone = (i for i, _ in self.pairs if i not in written)
        return self.of_all(self.lasting).difference(gone)

    def name_of(self, argument: int) -> str:
        """What the user calls a flat argument of any device, as far as that is known."""
        names = self.argument_names
        argument //= self.num_devices
        return names[argument] if argument < len(names) else f"argument {argument}"

    @property
    def out_shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of each flat result, of all devices."""
        found = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.jaxpr.out_avals]
        return tuple(self.each(found))

    @property
    def disk_results(self) -> frozenset[int]:
        """Results that must be on disk after the run."""
        return frozenset(
            result for argument, result in self.donated if argument in self.disk_arguments
        )

    @property
    def on_device(self) -> tuple[frozenset[int], frozenset[int]]:
        """Arguments and results, of all devices, that are neither on disk nor in host memory: of a
        device that has memory of its own the host's cores do not reach them."""
        below = self.disk_arguments | self.host_arguments
        after: Set[int] = {j for i, j in self.donated if i in below} | self.host_results
        if self.options.results == "host":
            after = frozenset(range(len(self.jaxpr.out_avals)))

        def others(count: int, lower: Set[int]) -> frozenset[int]:
            return self.of_all(i for i in range(count) if i not in lower)

        return others(len(self.jaxpr.in_avals), below), others(len(self.jaxpr.out_avals), after)

    def placed(self, graph: TaskGraph, has_own_memory: bool, constants: Sequence[Any]) -> TaskGraph:
        """A graph that knows where the arguments and results of the request are.

        Args:
          has_own_memory: whether the device has memory that the host's cores do not reach.
          constants: what the function closes over, arguments after its own.
        """
        arguments, results = self.on_device if has_own_memory else (frozenset(), frozenset())
        if has_own_memory and self.num_devices == 1:  # of several no array is on each
            is_near = [self.has_near_constants or compat.is_on_device(c) for c in constants]
            first = len(self.jaxpr.in_avals)
            arguments |= {first + k for k, near in enumerate(is_near) if near}
        return dataclasses.replace(
            graph,
            disk_arguments=self.of_all(self.disk_arguments),
            disk_results=self.of_all(self.disk_results),
            device_arguments=arguments,
            device_results=results,
            in_place_io=self.options.memory is not None,
            # What a device has in memory of its own it need not copy from another.
            replicas=tuple(pair for pair in graph.replicas if pair[0] not in arguments),
        )

    def with_options(self, **options: Any) -> "Request":
        """The same with some options replaced."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **options))


def make_request(
    jaxpr: Any,
    name: str,
    kinds: tuple[TensorKind, ...],
    donated: Sequence[bool],
    options: Options,
    tiers: Sequence[str] = (),
    argument_names: tuple[str, ...] = (),
    has_spaces: bool = False,
    in_numpys: Sequence[int] = (),
) -> Request:
    """A request, its donated arguments paired with results.

    Args:
      donated: for each argument.
      tiers: for each argument "host", "disk" or "".
      argument_names: see Request.
      has_spaces: whether results are to be where JAX's memory spaces have them, as in calls outside
        of `jax.jit`.
      in_numpys: arguments in NumPy's memory, where the device has memory of its own: results take
        none of it.
    """
    numpys = frozenset(in_numpys)
    disk, host = (
        frozenset(i for i, tier in enumerate(tiers) if tier == each) for each in ("disk", "host")
    )
    giving = {i for i, is_donated in enumerate(donated) if is_donated} - numpys
    if options.results == "host":  # they take the memory of arguments in a lower tier alone
        giving &= disk | host
    may = [i in giving for i in range(len(donated))]
    pairs = pair_donated(jaxpr.in_avals, jaxpr.out_avals, may)
    there, wanted = (
        frozenset(i for i, aval in enumerate(avals) if compat.is_in_host_space(aval))
        for avals in (jaxpr.in_avals, jaxpr.out_avals)
    )
    wanted = wanted if has_spaces else frozenset()
    host |= there | numpys
    paired = {i for i, _ in pairs}
    lasting = frozenset(
        i
        for i, tier in enumerate(tiers)
        if (tier and not donated[i]) or (tier == "host" and i in paired)
    )
    if options.memory is not None:  # to that, all memory is one
        lasting = frozenset()
    return Request(
        name, jaxpr, kinds, pairs, options, disk, argument_names=argument_names, lasting=lasting,
        host_arguments=host, host_results=wanted, has_near_constants=not has_spaces,
    )  # fmt: skip


def pair_donated(
    in_avals: Sequence[Any], out_avals: Sequence[Any], donated: Sequence[bool]
) -> tuple[tuple[int, int], ...]:
    """Pairs donated arguments with results of the same type, in order, as JAX does."""

    def key(aval: Any) -> Any:
        return tuple(aval.shape), aval.dtype, compat.is_in_host_space(aval)

    waiting: dict[Any, list[int]] = {}
    for i in range(len(in_avals) - 1, -1, -1):
        if donated[i]:
            waiting.setdefault(key(in_avals[i]), []).append(i)
    pairs = []
    for j, aval in enumerate(out_avals):
        queue = waiting.get(key(aval))
        if queue:
            pairs.append((queue.pop(), j))
    return tuple(pairs)

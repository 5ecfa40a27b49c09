"""Kernel: what the executable of a vertex computes, apart from any particular tensors.

Two clusters with equal `Kernel.key` compute the same function of their inputs and share one
executable: the layers of a model, for one.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax import dtypes

from jaxoffload import _jax_compat as compat
from jaxoffload import identity
from jaxoffload.capture import cost, operations
from jaxoffload.capture.cluster import Cluster
from jaxoffload.capture.flat import Equation, Operation, Value, is_literal
from jaxoffload.capture.whole import with_bodies

_ORDERLESS = frozenset(
    """
    argmax argmin concatenate copy cummax cummin dynamic_slice dynamic_update_slice gather join
    literal numbers pad reduce_and reduce_max reduce_min reduce_or reduce_window_max
    reduce_window_min slice sort split stack start
    """.split()
)
"""Operations that compute nothing, or the same in any order."""
_PARTS = frozenset(("concatenate", "pad", "slice", "split"))


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One operation of a kernel.

    Attributes:
      operands: for each operand its slot (inputs first, then each step's outputs in turn), or the
        literal itself.
    """

    operation: Operation
    operands: tuple[Any, ...]
    num_outputs: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A function of arrays, as a list of steps.

    Attributes:
      inputs: JAX's abstract value of each input.
      outputs: the slot of each output.
      output_avals: JAX's abstract value of each output.
      overwrites: pairs (input position, output position); the outputs that overwrite come first,
        in the order of the inputs that they overwrite.
      key: interned; equal keys mean equal functions, wherever they run.
      traffic: bytes that its operations read and write, each by itself; infinite if nobody knows
        how often, and of elements of less than a byte, or floats of one.
      adds, reduces: whether it may add several elements of an array, and whether in a reduction,
        which is fused with what makes its operand: in an order that is the compiler's.
      on_host: whether it runs on the host's cores.
      elementwise: whether it does nothing but elementwise operations, views, and putting arrays
        together or taking parts of them.
    """

    inputs: tuple[Any, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    output_avals: tuple[Any, ...]
    overwrites: tuple[tuple[int, int], ...]
    key: identity.Key
    traffic: float = math.inf
    adds: bool = True
    reduces: bool = True
    elementwise: bool = False
    on_host: bool = False

    def apply(self, operands: Sequence[Any]) -> list[Any]:
        """Evaluates the kernel on arrays or tracers."""
        slots = list(operands)
        for step in self.steps:
            read = [slots[x] if type(x) is int else x.val for x in step.operands]
            slots.extend(step.operation.apply(read))
        return [slots[i] for i in self.outputs]


def kernel_of(
    cluster: Cluster,
    outputs: Sequence[Value],
    overwrites: tuple[tuple[int, int], ...],
    on_host: bool = False,
) -> Kernel:
    """The kernel of one cluster.

    Args:
      outputs: the cluster's outputs in the order in which the executable returns them.
      overwrites, on_host: see `Kernel`.
    """
    steps, body, slot = _body(cluster)
    inputs = tuple(v.aval for v in cluster.inputs)
    chosen = tuple(slot[v] for v in outputs)
    key = identity.intern(*body, chosen, overwrites)
    avals = tuple(v.aval for v in outputs)
    return Kernel(inputs, tuple(steps), chosen, avals, overwrites, key, on_host=on_host)


def sized(kernel: Kernel, cluster: Cluster) -> Kernel:
    """The kernel of a cluster, with what its size and operations are. Of equal ones it is asked of
    the first alone."""
    equations = list(_with_steps(cluster.equations))
    return dataclasses.replace(
        kernel,
        traffic=sum(map(_traffic, cluster.equations)),
        adds=any(map(_adds, equations)),
        reduces=any(map(_reduces, equations)),
        elementwise=all(map(_is_elementwise, cluster.equations)),
    )


def body_key(cluster: Cluster) -> tuple[identity.Key, dict[Value, int]]:
    """What one cluster computes, whatever is read of it; and the slot of each of its values."""
    _, body, slot = _body(cluster)
    return identity.intern("body", *body), slot


def _body(cluster: Cluster) -> tuple[list[Step], tuple[Any, Any], dict[Value, int]]:
    slot: dict[Value, int] = {v: i for i, v in enumerate(cluster.inputs)}
    steps, parts = [], []
    for equation in cluster.equations:
        operands = tuple(_reference(x, slot) for x in equation.inputs)
        for v in equation.outputs:
            slot[v] = len(slot)
        steps.append(Step(equation.operation, operands, len(equation.outputs)))
        reads = tuple(x if type(x) is int else identity.literal_key(x) for x in operands)
        parts.append((equation.operation.key, reads))
    inputs = tuple(identity.aval_key(v.aval) for v in cluster.inputs)
    return steps, (inputs, tuple(parts)), slot


def _reference(operand: Any, slot: dict[Value, int]) -> Any:
    return operand if is_literal(operand) else slot[operand]


def _is_rare(dtype: Any) -> bool:
    """Whether the former emitters (compile/options.py) do not know such elements, or round them
    wrongly: floats of eight bits."""
    is_float = dtypes.issubdtype(dtype, np.floating)
    return compat.is_small(dtype) or (is_float and dtype.itemsize == 1)


def _traffic(equation: Equation) -> float:
    operation = equation.operation
    eqn, inner = operation.eqn, operation.equations
    if any(_is_rare(x.aval.dtype) for x in (*equation.inputs, *equation.outputs)):
        return math.inf
    if inner is not None:
        return cost.traffic(equation) if all(_traffic(e) < math.inf for e in inner) else math.inf
    is_whole = eqn is not None and eqn.primitive.name == operation.name
    if is_whole and any(e.primitive.name in ("while", "scan") for e in with_bodies(eqn)):
        return math.inf
    return cost.traffic(equation)


def _with_steps(equations: Sequence[Equation]) -> Iterator[Equation]:
    """Some equations, loops as those of their steps."""
    for equation in equations:
        inner = equation.operation.equations
        yield from (equation,) if inner is None else _with_steps(inner)


def _adds(equation: Equation) -> bool:
    known, name = operations.of(equation), equation.operation.name.partition("[")[0]
    return not (known.is_elementwise or operations.is_view(equation) or name in _ORDERLESS)


def _is_elementwise(equation: Equation) -> bool:
    known = operations.of(equation)
    return known.is_elementwise or operations.is_view(equation) or equation.operation.name in _PARTS


def _reduces(equation: Equation) -> bool:
    # Small products are made reductions when they are lowered.
    return _adds(equation) and not equation.operation.name.startswith("scatter")


def main_source(equations: Sequence[Equation], seconds: Sequence[float]) -> str:
    """The user's line of the most expensive equation, of those that come from one."""
    by_time = sorted(range(len(equations)), key=lambda i: -seconds[i])
    return next((s for i in by_time if (s := equations[i].operation.source)), "")

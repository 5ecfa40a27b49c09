"""Products, gathers and segment sums in a better order, and typed products without a weight a row.

Takes a level; gives it with some values computed in other orders, where a model of the device says
that this takes less time. Why the values stay the same: terms.py, typed.py.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture import cost
from jaxoffload.capture.flat import Equation, Operation, Value
from jaxoffload.rewrite.contract import Order, Search
from jaxoffload.rewrite.level import Level, live
from jaxoffload.rewrite.rows import Composed
from jaxoffload.rewrite.steps import Step, Steps, evaluate, values_of
from jaxoffload.rewrite.terms import SUMS, Expander, Term, zeros_of

_BETTER = 0.9
"""What values that share work may take of the time before, at most, to be computed anew."""


def reordered(
    level: Level, rates: cost.Rates, reorders: bool, is_typed: bool, composed: Composed
) -> None:
    """Computes values in other orders where that is faster.

    Args:
      rates: of the device.
      reorders: whether products, sums and gathers may change places; False: only those of one
        product with its gathers and its segment sum do.
      composed: of indices that are repeated rows, which (rows.py).
      is_typed: whether products of rows with their types' matrices are made without a matrix a row.
    """
    makers = {v: e for e in level.equations for v in e.outputs}
    terms = _terms(level, Expander(makers, zeros_of(level.equations), reorders, composed))
    for group in _groups(terms):
        orders = _orders(group, rates, is_typed)
        if not orders:
            continue
        after = _with_orders(level, orders, group)
        before = _seconds(level.equations, rates)
        saved = before - _seconds(after, rates)
        of_group = _seconds({e: None for t in group.values() for e in t.inside}, rates)
        if saved > (1 - _BETTER) * of_group:
            level.equations = after


def _seconds(equations: Iterable[Equation], rates: cost.Rates) -> float:
    return sum(cost.seconds(e, rates) for e in equations)


def _terms(level: Level, expander: Expander) -> dict[Value, Term]:
    """The terms of values that something needs that is no term, the last first."""
    found: dict[Value, Term] = {}
    needed = {x for x in level.results if isinstance(x, Value)}
    for equation in reversed(level.equations):
        if needed.isdisjoint(equation.outputs):
            continue
        root, term = equation.outputs[0], None
        if equation.operation.name in SUMS or equation.operation.name == "gather":
            term = expander.term(root)
        if term is not None and _is_worth_a_look(term):
            found[root] = term
            needed.update(x for x, _ in term.factors if isinstance(x, Value))
            needed.update(s.index for s in term.selectors)
        else:
            needed.update(equation.values())
    return found


def _is_worth_a_look(term: Term) -> bool:
    """Whether there are several orders, and something in between is large."""
    sums = [e for e in term.inside if e.operation.name in SUMS or e.operation.name == "gather"]
    if len(sums) < 2:
        return False
    if term.selectors:
        return True
    root = term.inside[0].outputs[0].num_bytes()
    return max(e.outputs[0].num_bytes() for e in sums) > 4 * root


def _groups(terms: dict[Value, Term]) -> list[dict[Value, Term]]:
    """Terms that have an equation in common, together."""
    groups: list[tuple[set[int], dict[Value, Term]]] = []
    for root, term in terms.items():
        inside, own = {id(e) for e in term.inside}, {root: term}
        rest = []
        for others, group in groups:
            if inside.isdisjoint(others):
                rest.append((others, group))
            else:
                inside |= others
                own |= group
        groups = [*rest, (inside, own)]
    return [group for _, group in groups]


def _orders(group: dict[Value, Term], rates: cost.Rates, is_typed: bool) -> dict[Value, Order]:
    """The best order of each term that has one, those first that take longest."""
    steps, known, found = Steps(), set(), {}

    def seconds(flops: float, traffic: float) -> float:
        return float(rates.kernel_seconds(flops, traffic))

    def work(root: Value) -> float:
        return sum(cost.seconds(e, rates) for e in group[root].inside)

    for root in sorted(group, key=work, reverse=True):
        order = Search(group[root], steps, seconds, known, is_typed).run()
        if order is not None:
            found[root] = order
            known.update(order.steps)
    return found


def _with_orders(
    level: Level, orders: dict[Value, Order], terms: dict[Value, Term]
) -> list[Equation]:
    made: dict[Step, tuple[Value, ...]] = {}
    equations: list[Equation] = []
    for equation in level.equations:
        root = equation.outputs[0]
        if root not in orders:
            equations.append(equation)
            continue
        order = orders[root]
        _emit(order.step, equation, made, equations, root.aval.dtype)
        out = [x for x in terms[root].out if x is not None]
        permutation = tuple(order.labels.index(x) for x in out)
        found = made[order.step][0], *terms[root].scales
        equations.append(_finished(found, root, permutation, equation))
    return live(equations, level.results)


def _emit(
    step: Step, at: Equation, made: dict[Step, Any], equations: list[Equation], dtype: Any
) -> None:
    """Appends the equations of a step and of what it needs, each once."""
    if step in made:
        return
    for operand in step.operands:
        _emit(operand, at, made, equations, dtype)
    operands = [made[s] for s in step.operands]
    read = values_of(step)

    def function(*arrays: Any) -> Any:
        rest, given = iter(arrays), []
        for values in operands:
            several = [next(rest) for _ in values]
            given.append(several if len(several) > 1 else several[0])
        return evaluate(step, given, list(rest))

    inputs = (*[v for values in operands for v in values], *read)
    operation = Operation.of_function(step.kind, function, at.operation.eqn, step.number, id(made))
    outputs = tuple(Value(aval) for aval in _avals(operation, inputs))
    equation = Equation(operation, inputs, outputs)
    equation.flops, equation.traffic = step.flops, int(step.traffic)
    made[step] = outputs
    equations.append(equation)


def _finished(
    found: tuple[Any, ...], root: Value, permutation: tuple[int, ...], at: Equation
) -> Equation:
    """The equation that makes the term's value of a step's."""

    def function(x: Any, *scales: Any) -> Any:
        for scale in scales:
            x = x * jnp.asarray(scale, x.dtype)
        return lax.reshape(lax.transpose(x, permutation), root.shape)

    operation = Operation.of_function("moved", function, at.operation.eqn, permutation, root.shape)
    equation = Equation(operation, found, (root,))
    equation.flops, equation.traffic = 0.0, 0
    return equation


def _avals(operation: Operation, inputs: tuple[Any, ...]) -> list[Any]:
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in inputs]
    made = jax.eval_shape(lambda *xs: operation.apply(xs), *shapes)
    return [compat.ShapedArray(x.shape, x.dtype) for x in made]

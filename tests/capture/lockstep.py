"""A function over several devices, evaluated in NumPy and JAX's own operations for all of them at
once: no planner, no runtime, no devices."""

import types

import jax
import jax.extend as jex
import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.collectives import collective_p
from jaxoffload.capture.spread import spread


def mesh_of(**sizes):
    """A mesh of so many devices along each axis, which need not be there."""
    shape = tuple(sizes.values())
    devices = np.arange(int(np.prod(shape)), dtype=object).reshape(shape)
    return types.SimpleNamespace(axis_names=tuple(sizes), devices=devices)


def cut(array, spec, mesh):
    """What each device has of an array."""
    array, parts = np.asarray(array), []
    for place in np.ndindex(mesh.devices.shape):
        at = dict(zip(mesh.axis_names, place, strict=True))
        index = []
        for d, names in enumerate(spec):
            names = () if names is None else names if isinstance(names, tuple) else (names,)
            rank, count = 0, 1
            for name in names:
                size = mesh.devices.shape[mesh.axis_names.index(name)]
                rank, count = rank * size + at[name], count * size
            size = array.shape[d] // count
            index.append(slice(rank * size, (rank + 1) * size))
        parts.append(array[tuple(index)])
    return parts


def whole(parts, spec, shape, mesh):
    """The array of which each device has a part; all that have the same must have the same bits."""
    found = np.full(shape, -1, np.asarray(parts[0]).dtype)
    numbers = cut(np.arange(int(np.prod(shape))).reshape(shape), spec, mesh)
    for mine, part in zip(numbers, parts, strict=True):
        found.reshape(-1)[mine.reshape(-1)] = np.asarray(part).reshape(-1)
    for mine, part in zip(numbers, parts, strict=True):
        np.testing.assert_array_equal(found.reshape(-1)[mine.reshape(-1)], np.ravel(part))
    return found


def together(exchange, parts):
    """What a collective gives each device."""
    parts, found = list(map(np.asarray, parts)), [None] * len(parts)
    joins = {"sum": np.sum, "max": np.max, "min": np.min}
    for group in exchange.groups:
        mine = [parts[device] for device in group]
        for rank, device in enumerate(group):
            if exchange.kind in joins:
                found[device] = joins[exchange.kind](np.stack(mine), axis=0)
            elif exchange.kind == "gather":
                found[device] = np.concatenate(mine, exchange.axis)
            elif exchange.kind == "scatter":
                total = np.sum(np.stack(mine), axis=0)
                found[device] = np.split(total, len(group), exchange.axis)[rank]
            elif exchange.kind == "switch":
                rows = [np.split(x, len(group), exchange.axis)[rank] for x in mine]
                found[device] = np.concatenate(rows, exchange.to_axis)
            else:
                raise NotImplementedError(exchange.kind)
    return found


def evaluate(jaxpr, constants, operands, counts):
    """Evaluates a jaxpr for all devices.

    Args:
      operands: for each of them a list, of what each device has.
      counts: takes the bytes that go into each collective of arrays, by its kind.
    """
    num = len(operands[0])
    known = {v: [x] * num for v, x in zip(jaxpr.constvars, constants, strict=True)}
    known |= dict(zip(jaxpr.invars, operands, strict=True))

    def read(atom):
        return [atom.val] * num if isinstance(atom, jex.core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        inputs = list(map(read, eqn.invars))
        if eqn.primitive is collective_p:
            exchange = eqn.params["exchange"]
            outs = [together(exchange, inputs[0])]
            if np.ndim(inputs[0][0]):
                counts.setdefault(exchange.kind, []).append(np.asarray(inputs[0][0]).nbytes)
        elif eqn.primitive.name == "scan":
            outs = scan(eqn, inputs, counts)
        elif "jaxpr" in eqn.params and eqn.primitive.name in ("jit", "pjit"):
            closed = eqn.params["jaxpr"]
            outs = evaluate(closed.jaxpr, closed.consts, inputs, counts)
        else:
            each = [alone(eqn, [x[i] for x in inputs]) for i in range(num)]
            outs = [list(x) for x in zip(*each, strict=True)]
        known.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))


def alone(eqn, operands):
    found = eqn.primitive.bind(*operands, **eqn.params)
    return found if eqn.primitive.multiple_results else [found]


def scan(eqn, inputs, counts):
    params, num = eqn.params, len(inputs[0])
    first, num_carry = compat.scan_counts(eqn)
    last = first + num_carry
    carry, rows = inputs[first:last], {}
    steps = range(params["length"])
    for k in reversed(steps) if params["reverse"] else steps:
        own = [[x[i][k] for i in range(num)] for x in inputs[last:]]
        closed = params["jaxpr"]
        outs = evaluate(closed.jaxpr, closed.consts, [*inputs[:first], *carry, *own], counts)
        carry, rows[k] = outs[: last - first], outs[last - first :]
    stacks = zip(*(rows[k] for k in steps), strict=True)
    return [*carry, *([np.stack(x) for x in zip(*stack, strict=True)] for stack in stacks)]


def run(function, mesh, in_specs, *args, pairs=()):
    """(results, their specs, bytes that go into each collective of arrays, by kind)."""
    made = spread(jax.make_jaxpr(function)(*args), [mesh], in_specs, pairs)
    operands = [cut(x, s, mesh) for x, s in zip(args, made.in_specs, strict=True)]
    places = [list(row) for row in made.places]
    counts = {}
    outs = evaluate(made.jaxpr.jaxpr, made.jaxpr.consts, [*operands, *places], counts)
    shapes = jax.tree.leaves(jax.eval_shape(function, *args))
    found = [
        whole(parts, spec, aval.shape, mesh)
        for parts, spec, aval in zip(outs, made.out_specs, shapes, strict=True)
    ]
    return found, made.out_specs, counts

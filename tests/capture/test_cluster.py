"""Which equations become one vertex, and from which limit on they do."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoffload.capture import cluster
from jaxoffload.capture.build import order_program
from jaxoffload.capture.scan import unroll
from jaxoffload.plan.cost.machines import SMALL_SERVER
from tests.workloads import ALL


def _ordered(function, args):
    flat, tree = jax.tree.flatten(args)
    closed = jax.make_jaxpr(lambda *f: jax.tree.leaves(function(*jax.tree.unflatten(tree, f))))(
        *flat
    )
    return order_program(unroll(closed, 0, rates=SMALL_SERVER))


def _cut(ordered, max_bytes):
    """The equations of each vertex, by their positions, and the least limit that gives the same."""
    program = ordered.program
    results = {v for v in program.result_values() if v.argument is None}
    clusters, least = cluster.cut(
        ordered.apart,
        program.parents,
        results,
        program.updates,
        rates=SMALL_SERVER,
        max_bytes=max_bytes,
    )
    place = {id(e): i for i, e in enumerate(ordered.equations)}
    return [[place[id(e)] for e in c.equations] for c in clusters], least


def _clamped(x):
    return (jnp.sin(jax.lax.clamp(*x)),)


SQUARES = [np.ones((64, 64), np.float32)] * 3
PROGRAMS = {name: made() for name, made in ALL.items() if name != "no_work"}
PROGRAMS["clamped"] = (_clamped, (SQUARES,))


@pytest.mark.parametrize("name", PROGRAMS)
def test_from_the_least_limit_on_the_cut_is_the_same(name):
    ordered = _ordered(*PROGRAMS[name][:2])
    limit, seen = math.inf, 0
    while limit > 0 and seen < 40:
        cut, least = _cut(ordered, limit)
        assert 0 <= least <= limit
        if least == 0:
            break
        assert _cut(ordered, least) == (cut, least)
        if math.isfinite(limit):
            assert _cut(ordered, (least + limit) / 2) == (cut, least)
        limit, seen = math.nextafter(least, 0), seen + 1
        assert _cut(ordered, limit)[0] != cut
    assert seen


def test_what_fuses_into_one_loop_may_take_three_times_the_limit():
    whole, least = _cut(_ordered(_clamped, (SQUARES,)), math.inf)
    # Both read three arrays and write one.
    assert len(whole) == 1 and least == 4 * SQUARES[0].nbytes / 3

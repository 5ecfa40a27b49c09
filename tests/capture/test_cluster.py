"""Which equations become one vertex, and from which limit on they do."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoffload import _native
from jaxoffload.capture import cluster, cost
from jaxoffload.capture.build import order_program
from jaxoffload.capture.demand import Large
from jaxoffload.capture.operations import is_view
from jaxoffload.capture.scan import unroll
from jaxoffload.plan.cost.machines import H200, SMALL_SERVER
from tests.helpers import flat_jaxpr
from tests.workloads import ALL


def _ordered(function, args, rates=SMALL_SERVER):
    closed, _ = flat_jaxpr(function, args)
    return order_program(unroll(closed, 0, rates=rates))


def _cut(ordered, max_bytes, **limits):
    """The equations of each vertex, by their positions, and the least limit that gives the same."""
    program = ordered.program
    results = {v for v in program.result_values() if v.argument is None}
    clusters, least = cluster.cut(
        ordered.layered,
        program.parents,
        results,
        program.updates,
        rates=program.rates,
        max_bytes=max_bytes,
        **limits,
    )
    place = {id(e): i for i, e in enumerate(ordered.equations)}
    return [[place[id(e)] for e in c.equations] for c in clusters], least


def _clamped(x):
    return (jnp.sin(jax.lax.clamp(*x)),)


SQUARES = [np.ones((64, 64), np.float32)] * 3
PROGRAMS = {name: made() for name, made in ALL.items() if name != "no_work"}
PROGRAMS["clamped"] = (_clamped, (SQUARES,))


MACHINES = {"2 cores": SMALL_SERVER, "H200": H200}
# So slow that what a launch takes is soon reached.
MACHINES["slow GPU"] = dataclasses.replace(H200, memory_bytes_per_second=2e8, launch=5e-6)


@pytest.mark.parametrize("machine", ["2 cores", "slow GPU"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_from_the_least_limit_on_the_cut_is_the_same(name, machine):
    ordered = _ordered(*PROGRAMS[name][:2], MACHINES[machine])
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


def test_steps_on_panels_of_a_matrix_are_vertices_by_themselves():
    """Together they would be other clusters for every panel, each with an executable of its own."""

    def factor(x):
        return jnp.linalg.cholesky(jnp.exp(-((x - x.T) ** 2)) + jnp.eye(len(x)))

    closed = jax.make_jaxpr(factor)(np.zeros((64, 1), np.float32))
    ordered = order_program(unroll(closed, rates=SMALL_SERVER, large=Large(1024)))
    names = [
        [ordered.equations[i].operation.name for i in positions if i >= 0]
        for positions in _cut(ordered, math.inf)[0]
    ]
    assert sum("cholesky[panel]" in found for found in names) > 36
    assert all(found.count("cholesky[panel]") <= 1 for found in names)


def _sizes(ordered, **limits):
    """Of each cluster of the uncut program: operations without views, and their seconds."""
    found = []
    for positions in _cut(ordered, math.inf, **limits)[0]:
        equations = [ordered.equations[i] for i in positions]
        equations = [e for e in equations if not is_view(e)]
        seconds = sum(cost.seconds(e, ordered.program.rates) for e in equations)
        found.append((len(equations), seconds))
    return found


def _chain(rates):
    """300 operations that all read and write 16 KiB; not of one array alone, as an update is."""

    def f(x, y):
        x = x - jnp.max(x, 0, keepdims=True)
        for _ in range(150):
            x = jnp.tanh(x * 1.01)
        return x[:1] + y

    return _ordered(f, (np.ones((64, 64), np.float32), np.ones((1, 64), np.float32)), rates)


def test_short_operations_of_a_gpu_are_launched_together():
    assert {n for n, _ in _sizes(_chain(SMALL_SERVER))} <= set(range(1, cluster.MAX_EQUATIONS + 1))
    found = _sizes(_chain(H200))
    assert len(found) == 5 and max(n for n, _ in found) == cluster.MOST_EQUATIONS
    host = dataclasses.replace(H200, is_host=True)
    at_once = dataclasses.replace(H200, launch=0.0)  # as of `Machine.measured`
    for machine in (host, at_once):
        assert _sizes(_chain(machine)) == [
            (n, pytest.approx(s * 1e10 / 4800e9)) for n, s in _sizes(_chain(SMALL_SERVER))
        ]


def test_no_cluster_of_a_gpu_is_long_and_has_many_operations():
    one = 2 * 64 * 64 * 4 / H200.memory_bytes_per_second  # seconds of an operation of the chain
    for number in (10, 25, 40):
        machine = dataclasses.replace(H200, launch=(number + 0.5) * one / cluster.LAUNCHES)
        found = _sizes(_chain(machine))
        most = max(number, cluster.MAX_EQUATIONS)
        total = sum(n for n, _ in found)
        assert len(found) == -(-total // most) and max(n for n, _ in found) == most


def test_a_number_that_is_asked_for_is_the_most_on_any_machine():
    ordered, known = _chain(H200), {}
    assert len(_sizes(ordered, known=known)) == 5
    assert max(n for n, _ in _sizes(ordered, known=known, max_equations=16)) == 16
    assert len(_sizes(ordered, known=known)) == 5


def test_what_the_host_is_to_do_is_not_put_together_as_for_a_gpu():
    ordered = _chain(H200)
    segments = {0, *(e.segment for e in ordered.equations)}
    assert max(n for n, _ in _sizes(ordered, whole=segments)) <= cluster.MAX_EQUATIONS


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_how_far_a_cluster_reaches(name, machine):
    """Against the definition, tried for every pair of operations."""
    rates = MACHINES[machine]
    solid = _ordered(*PROGRAMS[name][:2], rates).apart.solid
    took = [round(cost.seconds(e, rates) * 1e12) for e in solid]
    short = 0 if rates.is_host else round(cluster.LAUNCHES * rates.launch * 1e12)
    for i, end in enumerate(cluster.reach(solid, rates, 4)):
        ends = [
            n
            for n in range(i, len(solid) + 5)
            if n <= i + 4
            or (n <= min(len(solid), i + cluster.MOST_EQUATIONS) and sum(took[i:n]) <= short)
        ]
        assert end == max(ends)


def _ragged(rows):
    offsets = np.cumsum([0, *map(len, rows)])
    return np.array([v for row in rows for v in row], np.int64), offsets.astype(np.int64)


@pytest.mark.parametrize("seed", range(60))
def test_no_other_cuts_cost_less(seed):
    """Against every way to cut a stretch of seven random operations."""
    rng = np.random.default_rng(seed)
    count, num_values = 7, 10
    sizes = rng.integers(1, 9, num_values)
    until = rng.integers(0, count + 1, num_values)
    written = [[i] for i in range(count)]
    read = [
        [*{*rng.integers(0, i, min(i, 2)), *rng.integers(count, num_values, 1)}]
        for i in range(count)
    ]
    alone = np.array([sum(sizes[v] for v in (*read[i], i)) for i in range(count)])
    elementwise, product = rng.random(count) < 0.7, rng.random(count) < 0.5
    ends = np.maximum.accumulate(np.arange(count) + rng.integers(1, 5, count))
    crossing = np.append(rng.integers(0, 20, count), 0).astype(float)
    price, most = float(rng.integers(1, 6)), float(rng.choice([12.0, 18.0, 30.0, np.inf]))
    begins, least = _native.best_cuts(
        sizes, until, *_ragged(written), *_ragged(read), alone, elementwise.astype(np.int64),
        product.astype(np.int64), ends, crossing, price, most, 3.0, 2,
    )  # fmt: skip

    def needs(first, stop):
        """Bytes of a run; None where it may not be one."""
        if stop > ends[first] or product[first:stop].sum() > 2:
            return None
        if stop == first + 1:
            return 0.0
        made = {v for i in range(first, stop) for v in written[i]}
        others = {v for i in range(first, stop) for v in read[i]} - made
        total = sum(sizes[v] for v in others) + sum(sizes[v] for v in made if until[v] >= stop)
        in_one = elementwise[first:stop].all() and total <= alone[first:stop].max()
        return total / 3 if in_one else float(total)

    costs = {}
    for inner in itertools.product((False, True), repeat=count - 1):
        cuts = [0, *(i + 1 for i, is_cut in enumerate(inner) if is_cut), count]
        found = [needs(a, b) for a, b in itertools.pairwise(cuts)]
        if None not in found and max(found) <= most:
            costs[tuple(cuts[:-1])] = sum(price + crossing[b] for b in cuts[1:]), max(found)
    assert tuple(begins) in costs and costs[tuple(begins)][0] == min(c for c, _ in costs.values())
    assert least == costs[tuple(begins)][1]


def test_cuts_of_arrays_that_do_not_fit_are_refused():
    two, one = np.array([1, 1]), np.array([1])
    given = {
        "bytes": two, "until": two, "written": two - 1, "written_offsets": np.array([0, 1, 2]),
        "read": one, "read_offsets": np.array([0, 1, 1]), "alone": two, "is_elementwise": two,
        "is_product": two, "ends": two, "crossing": np.zeros(3), "price": 1.0, "max_bytes": 1.0,
        "where_all_fuse": 3.0, "max_products": 3,
    }  # fmt: skip
    _native.best_cuts(**given)
    for name, other in {
        "until": one, "written": two + 1, "read": -one, "written_offsets": np.array([0, 2, 1]),
        "read_offsets": np.array([0, 1]), "ends": one, "crossing": np.zeros(2),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match="best_cuts"):
            _native.best_cuts(**given | {name: other})

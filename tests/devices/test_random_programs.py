"""Random programs over several devices: jit's results within rounding, in tight budgets, and the
same bits in a random order of launch with delays. The live range checker is on."""

from unittest import mock

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from jaxoffload.capture import exchanges
from tests.devices.programs import mesh_of, normal
from tests.foreign import judge

ROWS, COLUMNS = 8, 8
MESHES = {"two": (2,), "four": (4,), "two by two": (2, 2)}


def _ring(n):
    return [(i, (i + 1) % n) for i in range(n)]


def _mixed(x, n):
    return lax.all_to_all(x, "x", 0, 1, tiled=True).reshape(ROWS, COLUMNS)


def _ticks(x, n):
    def tick(carry, _):
        return jnp.tanh(lax.ppermute(carry, "x", _ring(n)) + x), jnp.sum(carry, axis=0)

    carry, sums = lax.scan(tick, x, None, length=3)
    return carry + jnp.sum(sums, axis=0)[None, :]


# Each takes what a device has, (ROWS, COLUMNS), and the size of the axis, and gives as much.
ONE = [
    lambda x, n: jnp.tanh(x),
    lambda x, n: x.T * 0.5,
    lambda x, n: lax.psum(x, "x") / n,
    lambda x, n: lax.pmax(lax.stop_gradient(x), "x") + x,
    lambda x, n: lax.ppermute(x, "x", _ring(n)),
    lambda x, n: lax.ppermute(x, "x", [(0, n - 1)]) + x,
    lambda x, n: lax.all_gather(x, "x")[0] + x,
    lambda x, n: lax.psum_scatter(lax.all_gather(x, "x", tiled=True), "x", tiled=True) / n,
    lambda x, n: jnp.tanh(x @ lax.all_gather(x[: ROWS // n], "x", tiled=True)),
    _mixed,
    _ticks,
    lambda x, n: x * (1 + lax.axis_index("x").astype(x.dtype)) / n,
    lambda x, n: jax.checkpoint(lambda y: jnp.sin(lax.psum(y, "x") / n))(x),
    lambda x, n: x.at[1].set(lax.pmin(lax.stop_gradient(x[0]), "x")),
    lambda x, n: x / (1 + lax.psum(jnp.sum(x * x), "x")),
]
TWO = [
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: jnp.tanh(x @ y),
    lambda x, y: jnp.where(lax.pmax(lax.stop_gradient(x), "x") > y, x, y),
    lambda x, y: lax.pmean(x, "x") - y,
]


@st.composite
def programs(draw):
    """Steps over values: (index of the operation, what it reads)."""
    steps, count = [], 2
    for _ in range(draw(st.integers(2, 9))):
        several = draw(st.booleans())
        index = draw(st.integers(0, len(TWO if several else ONE) - 1))
        reads = tuple(draw(st.integers(0, count - 1)) for _ in range(2 if several else 1))
        steps.append((index, reads))
        count += 1
    results = draw(st.lists(st.integers(2, count - 1), min_size=1, max_size=3))
    return steps, (*results, count - 1), draw(st.booleans())


def function_of(program, sizes):
    steps, results, differentiate = program
    axes = ("x", "y")[: len(sizes)]

    def part(*values):
        values = list(values)
        for index, reads in steps:
            operands = [values[i] for i in reads]
            two = len(reads) == 2
            values.append(TWO[index](*operands) if two else ONE[index](*operands, sizes[0]))
        return [values[i] for i in results]

    f = jax.shard_map(
        part, mesh=mesh_of(*sizes), in_specs=(P(axes), P(axes)), out_specs=P(axes),
        check_vma=False,
    )  # fmt: skip
    if not differentiate:
        return f
    return jax.value_and_grad(lambda x, y: sum(jnp.sum(z * z) for z in f(x, y)), argnums=(0, 1))


@pytest.mark.drawn(1)
@pytest.mark.filterwarnings("ignore:.*everything fits:jaxoffload.errors.OffloadWarning")
@pytest.mark.parametrize("mesh", MESHES)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    program=programs(),
    seed=st.integers(0, 99),
    share=st.sampled_from([1.0, 0.5, 0.0]),
    is_fixed=st.booleans(),
)
def test_random_programs_are_those_of_jit(mesh, program, seed, share, is_fixed):
    """Sums in the order of ranks give the same bits in every order of launch; those that take what
    they add as it comes, small ones too, are right in each."""
    sizes = MESHES[mesh]
    f, count = function_of(program, sizes), int(np.prod(sizes))
    args = normal(ROWS * count, COLUMNS), normal(ROWS * count, COLUMNS, seed=1)
    want = jax.tree.leaves(jax.tree.map(judge.on_host, jax.jit(f)(*args)))
    exact = judge.in_float64(f, args)
    with mock.patch.object(exchanges, "SMALL_SUM", exchanges.SMALL_SUM if is_fixed else 0):
        plan = jo.offload(f, device_memory=None, deterministic=is_fixed).plan(*args)
        budget = max(1, plan.min_device_memory, int(share * plan.resident_peak_bytes))
        found = []
        for launch in ("work-conserving", jo.policies.random(seed, delays=2e-4)):
            step = jo.offload(f, device_memory=budget, launch=launch, deterministic=is_fixed)
            found.append(jax.tree.leaves(jax.tree.map(judge.on_host, step(*args))))
    for got in found[:1] if is_fixed else found:
        texts = [judge.disagreement(*x, ulps=64) for x in zip(want, got, exact, strict=True)]
        assert not any(texts), texts
    assert not is_fixed or all(map(np.array_equal, *found)), f"seed {seed}"

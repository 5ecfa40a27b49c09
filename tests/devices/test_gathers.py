"""Matrices that are gathered are never whole where the budget is small: products read them part by
part, and are those of `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from jaxoffload.graphs.taskgraph import VertexKind
from tests.devices.programs import fsdp, mesh_of, normal, tensor_parallel
from tests.foreign import judge

N, ROWS = 256, 16
WHOLE = N * N * 4
BOTH = ("x", "y")


def gathered(w, names="x", axis=0):
    return lax.all_gather(w, names, axis=axis, tiled=True)


def by_bfloat16(w, x):
    return x.astype("bfloat16") @ gathered(w).astype("bfloat16")


def turned_and_converted(w, x):
    return x.astype("bfloat16") @ gathered(w, axis=1).T.astype("bfloat16")


def einsum(w, x):
    w = gathered(w.reshape(-1, 16, N // 16))
    return jnp.einsum("bi,ijk->bkj", x, w).reshape(len(x), -1)


def of_three(w, x):
    whole = gathered(w)
    return jnp.tanh(x @ whole) @ whole.T + x @ whole.astype("float16").astype("float32")


# name: (function of what a device has, sizes of the mesh, spec of the matrix)
PROGRAMS = {
    "rows": (lambda w, x: jnp.tanh(x @ gathered(w)), (4,), P("x")),
    "columns": (lambda w, x: jnp.tanh(x @ gathered(w, axis=1)), (4,), P(None, "x")),
    "transposed": (lambda w, x: x @ gathered(w).T, (4,), P("x")),
    "transposed, columns": (lambda w, x: x @ gathered(w, axis=1).T, (4,), P(None, "x")),
    "from the left": (lambda w, x: (gathered(w) @ x.T).T, (4,), P("x")),
    "from the left, columns": (lambda w, x: (gathered(w, axis=1) @ x.T).T, (4,), P(None, "x")),
    "converted": (by_bfloat16, (4,), P("x")),
    "turned, then converted": (turned_and_converted, (4,), P(None, "x")),
    "several dimensions": (einsum, (4,), P("x")),
    "of three products": (of_three, (4,), P("x")),
    "two axes": (lambda w, x: x @ gathered(w, BOTH), (2, 2), P(BOTH)),
    "the other way": (lambda w, x: x @ gathered(w, ("y", "x")), (2, 2), P(("y", "x"))),
    "one of two axes": (lambda w, x: x @ gathered(w, "y"), (2, 4), P("y")),
    "derivative by what it multiplies": (
        lambda w, x: jax.grad(lambda x: (jnp.tanh(x @ gathered(w)) ** 2).sum())(x), (4,), P("x"),
    ),
}  # fmt: skip


def mapped(name):
    function, sizes, spec = PROGRAMS[name]
    names = "xy"[: len(sizes)]
    return jax.shard_map(
        function, mesh=mesh_of(*sizes), in_specs=(spec, P(tuple(names))),
        out_specs=P(tuple(names)), check_vma=False,
    )  # fmt: skip


def matrix():
    return normal(N, N) / 16


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_least_budget_is_below_the_whole_matrix(name):
    step, args = mapped(name), (matrix(), normal(8 * ROWS, N, seed=1))
    least = jo.offload(step, device_memory=None).plan(*args).min_device_memory
    assert least < 0.8 * WHOLE
    offloaded = jo.offload(step, device_memory=least, check=True)
    got = offloaded(*args)
    assert offloaded.last_run.peak_device_bytes <= least
    want, exact = jax.jit(step)(*args), judge.in_float64(step, args)
    exact = None if "converted" in name else exact[0]  # float64 has no such rounding
    assert not judge.disagreement(judge.on_host(want), judge.on_host(got), exact, 2)
    plan = offloaded.plan(*args)
    assert max(t.bytes for t in plan.taskgraph.tensors if t.argument is None) < WHOLE
    for seed in range(2):
        launch = jo.policies.random(seed, delays=3e-4)
        other = jo.offload(step, device_memory=least, launch=launch)
        assert np.array_equal(other(*args), got), "the same bits in every order"


def test_sums_of_halves_are_rounded_once():
    """Parts of a sum are added in float32: the error is that of one rounding."""

    def part(w, x):
        return x @ gathered(w)

    mesh = mesh_of(8)
    step = jax.shard_map(part, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"))
    w, x = (jnp.abs(normal(*s)).astype("bfloat16") for s in ((N, N), (8 * ROWS, N)))
    least = jo.offload(step, device_memory=None).plan(w, x).min_device_memory
    assert least < 0.8 * w.nbytes
    got = np.asarray(jo.offload(step, device_memory=least)(w, x), np.float64)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    assert (np.abs(got - exact) <= float(jnp.finfo("bfloat16").eps) / 2 * 1.01 * exact).all()


def _left_whole(function, out):
    step = jax.shard_map(
        function, mesh=mesh_of(4), in_specs=(P("x"), P("x")), out_specs=out, check_vma=False
    )
    args = matrix(), normal(4 * ROWS, N)
    plan = jo.offload(step, device_memory=None).plan(*args)
    offloaded = jo.offload(step, device_memory=plan.min_device_memory, cut="always")
    got, want = offloaded(*args), jax.jit(step)(*args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-4, atol=1e-4)
    kinds = [v.kind for v in offloaded.plan(*args).taskgraph.vertices]
    assert kinds.count(VertexKind.TRANSFER) == 4 * 3, "every part is sent to three devices, once"
    return plan.min_device_memory


def returned(w, x):
    whole = gathered(w)
    return x @ whole, whole


def changed(w, x):
    whole = gathered(w)
    return x @ whole + x @ jnp.tanh(whole)


def along_a_batch(w, x):
    return jnp.einsum("bi,ij->bij", x[:2], gathered(w)).sum(1)


def along_a_new_dimension(w, x):
    return jnp.einsum("bki,kij->bj", x.reshape(-1, 4, N // 4), lax.all_gather(w, "x"))


def with_itself(w, x):
    whole = gathered(w)
    return lax.dot_general(whole, whole, (((0,), (0,)), ((), ())))[:ROWS] + x


@pytest.mark.parametrize(
    "function", [returned, changed, along_a_batch, along_a_new_dimension, with_itself]
)
def test_what_others_read_is_joined(function):
    out = (P("x"), P()) if function is returned else P("x")
    assert _left_whole(function, out=out) > WHOLE


def test_a_product_of_two_gathered_matrices():
    def part(w, x):
        return x @ (gathered(w).T @ gathered(2 * w))

    step = jax.shard_map(part, mesh=mesh_of(4), in_specs=(P("x"), P("x")), out_specs=P("x"))
    w, x = matrix(), normal(4 * ROWS, N)
    least = jo.offload(step, device_memory=None).plan(w, x).min_device_memory
    got = jo.offload(step, device_memory=least, cut="always")(w, x)
    np.testing.assert_allclose(got, jax.jit(step)(w, x), rtol=2e-4, atol=1e-4)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("program", ["fsdp", "tensor_parallel"])
def test_what_devices_exchange_is_made_again(program):
    """Rather than kept: gathers of weights, sums of activations; the same bits in any order."""
    step, args = {"fsdp": fsdp, "tensor_parallel": tensor_parallel}[program](4)
    want = jax.jit(step)(*args)
    plan = jo.offload(step, device_memory=None).plan(*args)
    budget = plan.min_device_memory + 2048
    kept = jo.offload(step, device_memory=budget, recompute="never")
    again = jo.offload(step, device_memory=budget, recompute="always", check=True)
    got = again(*args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-4, atol=2e-5)
    transfers = [
        sum(v.kind is VertexKind.TRANSFER for v in s.plan(*args).taskgraph.vertices)
        for s in (kept, again)
    ]
    assert again.plan(*args).recomputed > 0
    assert transfers[1] > transfers[0]
    for seed in range(2):
        launch = jo.policies.random(seed, delays=5e-4)
        other = jo.offload(step, device_memory=budget, recompute="always", launch=launch)
        assert all(
            np.array_equal(a, b)
            for a, b in zip(jax.tree.leaves(other(*args)), jax.tree.leaves(got), strict=True)
        )

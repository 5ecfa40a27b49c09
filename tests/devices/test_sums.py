"""`deterministic=False`: sums over devices that take what they add as it comes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from jaxoffload.graphs.sums import first_of_sum
from jaxoffload.runtime import backends
from tests.cuda import fake
from tests.devices.programs import STEPS, mesh_of
from tests.devices.test_collectives import numbers
from tests.devices.test_steps import agreement, judges_of
from tests.foreign import judge

X = P("x")
ROWS = 32 * 1024
KINDS = {
    "psum": (lambda x: lax.psum(x, "x"), P()),
    "pmax": (lambda x: lax.pmax(x, "x"), P()),
    "pmin": (lambda x: lax.pmin(x, "x"), P()),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "x", tiled=True), X),
    "psum_scatter, columns": (
        lambda x: lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True), X,
    ),
}  # fmt: skip

CASES = [
    (name, dtype)
    for name in KINDS
    for dtype in ("float32", "bfloat16", "int32", "complex64", "bool")
    if (dtype != "complex64" or "sum" in name) and (dtype != "bool" or "scatter" not in name)
]
"""JAX has no others."""


def over(count, function, out):
    return jax.shard_map(function, mesh=mesh_of(count), in_specs=X, out_specs=out, check_vma=False)


def spread(rows, columns=16):
    """Numbers of which sums in different orders differ."""
    scale = np.random.default_rng(rows).integers(-3, 4, (rows, columns)).astype(np.float32)
    return numbers((rows, columns), np.float32) * np.float32(10) ** scale


def num_sums(plan):
    first = first_of_sum(plan.memgraph)
    return len(np.unique(first[first >= 0]))


@pytest.mark.parametrize("name, dtype", CASES)
def test_sums_in_any_order_are_right(name, dtype):
    function, out = KINDS[name]
    f = over(4, function, out)
    x = numbers((ROWS, 16), jnp.dtype(dtype))
    want = np.asarray(jax.jit(f)(x))
    exact = None if dtype in ("int32", "bool") else judge.in_float64(f, (x,))
    step = jo.offload(
        f, device_memory=None, cut="always", deterministic=False, check=True,
        launch=jo.policies.random(1, delays=1e-4),
    )  # fmt: skip
    got = np.asarray(step(x))
    assert num_sums(step.last_run) == 4
    if np.issubdtype(got.dtype, np.integer) or got.dtype == np.bool_ or name in ("pmax", "pmin"):
        np.testing.assert_array_equal(got, want)
    else:
        assert not judge.disagreement(want, got, *(exact or ())[:1], ulps=4)


@pytest.mark.parametrize("inside", [False, True], ids=["direct", "inside jit"])
def test_each_part_of_a_sum_is_added_up_as_it_comes(inside):
    """Of four devices each adds three parts to its own: in one of six orders, not always the same.
    In the order of ranks nothing changes from run to run."""
    f = over(4, lambda x: lax.psum(x, "x"), P())
    x = spread(4 * 4096)
    parts = x.reshape(4, 4, 1024, 16)  # of each device, for each rank
    possible = [
        {
            (((parts[rank, rank] + parts[a, rank]) + parts[b, rank]) + parts[c, rank]).tobytes()
            for a, b, c in itertools.permutations({0, 1, 2, 3} - {rank})
        }
        for rank in range(4)
    ]
    assert min(map(len, possible)) >= 3, "the numbers tell orders apart"
    least = jo.offload(f, device_memory=None, cut="always").plan(x).min_device_memory
    seen: dict[bool, set[bytes]] = {True: set(), False: set()}
    for deterministic, seed in itertools.product(seen, range(8)):
        launch = jo.policies.random(seed, delays=3e-4)
        step = jo.offload(
            f, device_memory=least, cut="always", launch=launch, deterministic=deterministic
        )
        got = np.asarray((jax.jit(step) if inside else step)(x))
        seen[deterministic].add(got.tobytes())
        for rank, part in enumerate(got.reshape(4, 1024, 16)):
            assert deterministic or part.tobytes() in possible[rank]
    assert len(seen[True]) == 1
    assert len(seen[False]) > 3


def test_parts_are_put_on_an_imitated_gpus_stream_as_they_come(monkeypatch):
    """Streams that are late. Kernels of a device are on one stream: no two add at once."""
    gpus = fake.backend(4)
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "100")
    monkeypatch.setattr(backends, "several", lambda devices: gpus)
    monkeypatch.setattr(backends, "current_name", lambda: gpus.name)
    f = over(4, lambda x: (lax.psum(x, "x"), lax.psum_scatter(x, "x", tiled=True)), (P(), X))
    x = spread(4 * 4096)
    exact = judge.in_float64(f, (x,))
    want, seen = jax.jit(f)(x), set()
    for seed, check in itertools.product(range(4), (False, True)):
        launch = jo.policies.random(seed, delays=3e-4)
        step = jo.offload(
            f, device_memory=None, cut="always", launch=launch, deterministic=False, check=check
        )
        got = step(x)
        for w, g, e in zip(want, got, exact, strict=True):
            assert not judge.disagreement(np.asarray(w), np.asarray(g), e, ulps=4)
        seen.add(np.asarray(got[0]).tobytes())
    assert num_sums(step.last_run) == 8
    assert step.plan(x).backend is gpus
    assert len(seen) > 1


def test_narrow_numbers_are_rounded_once():
    f = over(8, lambda x: lax.psum(x, "x"), P())
    x = numbers((8 * 16384, 4), jnp.bfloat16)
    want = x.astype(np.float64).reshape(8, 16384, 4).sum(0).astype(np.float32).astype(jnp.bfloat16)
    for seed in range(3):
        launch = jo.policies.random(seed, delays=1e-4)
        step = jo.offload(f, device_memory=None, deterministic=False, launch=launch)
        np.testing.assert_array_equal(np.asarray(step(x)), want)
        assert num_sums(step.last_run) == 8


@pytest.mark.parametrize("share", [0.7, 0.0])
@pytest.mark.parametrize("name, count", [("fsdp", 4), ("data parallel", 4), ("tensor parallel", 4)])
def test_training_steps_are_those_of_jit_within_a_budget(name, count, share):
    sizes = {"fsdp": {}, "data parallel": {"width": 160}, "tensor parallel": {"batch": 512}}
    step, args = STEPS[name](count, **sizes[name])  # what is summed is large
    judges = judges_of(step, args)
    plan = jo.offload(step, device_memory=None, cut="always", deterministic=False).plan(*args)
    assert num_sums(plan) >= count
    budget = max(int(share * plan.resident_peak_bytes), plan.min_device_memory)
    for seed in range(2):
        offloaded = jo.offload(
            step, device_memory=budget, cut="always", deterministic=False, check=True,
            launch=jo.policies.random(seed, delays=1e-4),
        )  # fmt: skip
        assert not agreement(judges, offloaded(*args))
        assert offloaded.last_run.peak_device_bytes <= budget


def test_small_sums_are_made_at_once():
    """A kernel for each part of a few numbers would take longer than to wait for the last."""
    f = over(4, lambda x: lax.psum(x, "x"), P())
    plan = jo.offload(f, device_memory=None, cut="always", deterministic=False).plan(
        numbers((16, 16), np.float32)
    )
    assert num_sums(plan) == 0


def test_a_wish_that_is_none_is_refused():
    with pytest.raises(TypeError, match=r"deterministic='no' is not a bool. Pass True or False"):
        jo.offload(lambda x: x, deterministic="no")

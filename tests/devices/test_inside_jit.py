"""Functions over several devices inside `jax.jit`: one custom call in the program of each, the bits
of direct calls."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoffload as jo
from jaxoffload import _native
from jaxoffload.runtime import backends
from tests.devices.programs import STEPS, fsdp, mesh_of, normal

MESH = mesh_of(4)
W, X = normal(64, 64) / 8, normal(64, 64)
BUDGET = 34 << 10


def product(w, x):
    return jnp.tanh(x @ lax.all_gather(w, "x", tiled=True))


def mapped(function, mesh=MESH, **options):
    specs = {"in_specs": (P("x"), P("x")), "out_specs": P("x"), **options}
    return jax.shard_map(function, mesh=mesh, **specs)


def equal(a, b):
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", STEPS)
def test_steps_have_the_bits_of_direct_calls(name):
    step, args = STEPS[name](4)
    least = jo.offload(step, device_memory=None).plan(*args).min_device_memory
    offloaded = jo.offload(step, device_memory=least)
    want = offloaded(*args)
    got = jax.jit(lambda *a: offloaded(*a))(*args)
    assert equal(want, got)
    assert offloaded.last_run.peak_device_bytes <= least
    for w, g in zip(jax.tree.leaves(jax.jit(step)(*args)), jax.tree.leaves(got), strict=True):
        assert g.sharding.is_equivalent_to(w.sharding, w.ndim)
    text = jax.jit(lambda *a: offloaded(*a)).lower(*args).as_text()
    assert text.count("jaxoffload_run_devices") == 1


def test_loops_and_work_around_the_call():
    step, (params, x, y) = fsdp(4)
    offloaded = jo.offload(step, device_memory="40KiB")

    @jax.jit
    def train(params, x, y):
        def body(params, scale):
            value, params = offloaded(params, x * scale, y)
            return params, 2 * value

        return lax.scan(body, params, jnp.linspace(0.9, 1.1, 5))

    got_params, got = train(params, x, y)
    want = []
    for scale in np.linspace(0.9, 1.1, 5, dtype=np.float32):
        value, params = jax.jit(step)(params, x * scale, y)
        want.append(2 * value)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(got_params, params, rtol=1e-4, atol=1e-5)


@pytest.mark.timeout(120)
def test_what_comes_after_may_exchange():
    """XLA goes on with each device's program where it is told of the end, and waits there."""
    offloaded = jo.offload(mapped(product), device_memory=BUDGET)
    w, x = (jax.device_put(each, NamedSharding(MESH, P("x"))) for each in (W, X))

    def around(call):
        return jax.jit(lambda w, x: (call(w, x) @ w).sum(0))

    step, want = around(offloaded), around(mapped(product))(w, x)
    for _ in range(10):
        np.testing.assert_allclose(step(w, x), want, rtol=1e-4, atol=1e-4)


def test_donated_memory_is_written_again():
    step, (params, x, y) = fsdp(4)
    kept = jo.offload(step, device_memory="40KiB")
    offloaded = jo.offload(step, device_memory="40KiB", donate_argnums=0)

    def addresses(array):
        return sorted(s.data.unsafe_buffer_pointer() for s in array.addressable_shards)

    train = jax.jit(lambda *args: offloaded(*args), donate_argnums=0)
    want = jax.device_put(params, NamedSharding(MESH, P(None, "x")))
    got, places = want + 0, None
    for _ in range(4):
        before, (value, got) = got, train(got, x, y)
        assert before.is_deleted() and places in (None, addresses(got))
        places = addresses(got)
        other, want = jax.jit(kept)(want, x, y)
        assert equal((value, got), (other, want))
    assert "output_to_operand_aliasing={{1}: (1, {})}" in train.lower(got, x, y).compile().as_text()
    assert offloaded.last_run.peak_device_bytes <= 40 << 10
    # What is read once more is copied first.
    (_, new), old = jax.jit(lambda w, x, y: (offloaded(w, x, y), w * 2))(got, x, y)
    assert equal(old, 2 * got) and equal(new, jax.jit(kept)(got, x, y)[1])


def test_a_part_that_others_still_read_is_not_written_over():
    ring = [(i, (i + 1) % 4) for i in range(4)]
    f = mapped(lambda w: lax.ppermute(w, "x", ring), in_specs=P("x"))
    for seed in range(4):
        launch = jo.policies.random(seed, delays=1e-3)
        offloaded = jo.offload(f, device_memory=1 << 20, donate_argnums=0, launch=launch)
        turn = jax.jit(lambda w, offloaded=offloaded: offloaded(w), donate_argnums=0)
        w = jax.device_put(X, NamedSharding(MESH, P("x")))
        for _ in range(4):
            w = turn(w)
        np.testing.assert_array_equal(w, X)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()], ids=str)
def test_arguments_may_be_spread_in_any_way(spec):
    offloaded = jo.offload(mapped(product), device_memory=BUDGET)
    want = offloaded(W, X)
    w, x = (jax.device_put(each, NamedSharding(MESH, spec)) for each in (W, X))
    assert equal(jax.jit(offloaded)(w, x), want)


@pytest.mark.timeout(120)
def test_many_calls_of_one_place_and_of_several_are_in_flight():
    """What the devices bring is never mixed, of calls that overtake each other."""
    launch = jo.policies.random(3, delays=3e-4)
    offloaded = jo.offload(mapped(product), device_memory=BUDGET, launch=launch)
    inner = jax.jit(lambda w, x: offloaded(w, x))  # one lowering, three places

    @jax.jit
    def several(w, x):
        return inner(w, x), inner(w, x + 1), inner(w, -x)

    direct = [[offloaded(W, z) for z in (X + i, X + i + 1, -(X + i))] for i in range(4)]
    found = [several(W, X + i % 4) for i in range(40)]
    for i, each in enumerate(found):
        assert equal(each, direct[i % 4]), i


@pytest.mark.timeout(120)
def test_devices_may_come_to_places_in_different_orders():
    """Of one lowering at two places, half of the devices come to one first, half to the other."""
    offloaded = jo.offload(mapped(product), device_memory=BUDGET)
    inner = jax.jit(lambda w, x: offloaded(w, x))

    def late(x, which):
        def slow(x):
            count = jnp.where(lax.axis_index("x") % 2 == which, 4000, 1)
            return lax.fori_loop(0, count, lambda i, y: jnp.sin(y) + y * 0, x)

        return mapped(slow, in_specs=P("x"), check_vma=False)(x)

    @jax.jit
    def both(w, x):
        first, second = late(x, 0), late(x + 1, 1)
        return first, second, inner(w, first), inner(w, second)

    for _ in range(5):
        first, second, a, b = both(W, X)
        assert equal(a, offloaded(W, np.asarray(first)))
        assert equal(b, offloaded(W, np.asarray(second)))


@pytest.mark.timeout(120)
def test_threads_that_wait_for_each_call():
    step = jax.jit(jo.offload(mapped(product), device_memory=BUDGET))
    inputs = [X + i for i in range(3)]
    want, wrong = [np.asarray(step(W, x)) for x in inputs], []

    def work(i):
        for _ in range(20):
            if not np.array_equal(np.asarray(step(W, inputs[i])), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_constants_and_two_axes():
    table = jnp.asarray(normal(64, 32, seed=5))
    mesh = mesh_of(2, 2)

    def part(w, x):
        full = lax.all_gather(lax.all_gather(w, "y", tiled=True), "x", tiled=True)
        return x @ full @ table + lax.axis_index("x") * 10 + lax.axis_index("y")

    f = mapped(part, mesh, in_specs=(P(("x", "y")),) * 2, out_specs=P(("x", "y")))
    offloaded = jo.offload(f, device_memory=None, vertex_memory=1 << 14)
    want, got = jax.jit(f)(W, X), jax.jit(offloaded)(W, X)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert equal(got, offloaded(W, X))


def test_devices_share_free_memory_once(monkeypatch):
    monkeypatch.setattr(type(backends.current()), "free_memory", lambda self: 160 << 10)
    offloaded = jo.offload(mapped(product), device_memory="auto")
    want = offloaded.plan(W, X).budget
    jax.jit(offloaded)(W, X)
    found = [plan.budget for plan in offloaded._plans()]
    assert found == [want, want] and want > (160 << 10) / 8


def test_plans_end_with_their_programs():
    before = _native.num_registered_plans()
    step = jax.jit(jo.offload(mapped(product), device_memory=BUDGET))
    step(W, X)
    assert _native.num_registered_plans() > before
    del step
    jax.clear_caches()
    assert _native.num_registered_plans() == before


def test_what_cannot_be_is_refused_and_says_what_to_write():
    g = jo.offload(mapped(product), device_memory=BUDGET)
    with pytest.raises(ValueError, match=r"inside jax.jit.*NumPy"):
        jax.jit(lambda x: g(jo.host_put(W), x))(X)
    with pytest.raises(jo.PlanError, match="below the smallest feasible"):
        jax.jit(jo.offload(mapped(product), device_memory=1000))(W, X)
    with pytest.raises(jo.PlanError, match="below the smallest feasible"):
        jax.grad(lambda w: jo.offload(mapped(product), device_memory=1000)(w, X).sum())(W)


@pytest.mark.parametrize("lost", [0, 2])
def test_nobody_waits_for_ever_for_a_device_whose_program_has_failed(lost, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_collective_call_terminate_timeout_seconds=1")
    offloaded = jo.offload(mapped(product), device_memory=BUDGET)
    failing = [True]

    def check(rank, x):
        if failing[0] and rank == lost:
            raise ValueError("no luck")
        return x

    def before(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(check, shape, lax.axis_index("x"), x)

    checked = jax.shard_map(before, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    step = jax.jit(lambda w, x: offloaded(w, checked(x)))
    told = [rf"of 4 devices number {lost} did not come", "no luck"]
    found = []
    for shard in step(W, X).addressable_shards:  # each has its own program's error, or the first
        with pytest.raises(jax.errors.JaxRuntimeError, match="|".join(told)) as error:
            np.asarray(shard.data)
        found.append(str(error.value))
    assert "no luck" in found[lost]
    failing[0] = False
    assert equal(step(W, X), jax.jit(offloaded)(W, X))

"""Optimizers' updates on the host's cores: right for any optimizer, and only where that pays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import compute_on

import jaxoffload as jo
from jaxoffload import policies
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.graphs.taskgraph import VertexKind
from jaxoffload.plan.cost.machines import H200, SMALL_SERVER, Link

WIDTH, LAYERS = 192, 5
MATRIX = 4 * WIDTH**2
SLOW = dataclasses.replace(SMALL_SERVER, to_device=Link(1e8), from_device=Link(1e8))
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "lion": optax.lion(1e-2),
    "momentum": optax.sgd(1e-1, momentum=0.9, nesterov=True),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=32),
    "clipped": optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.adamw(1e-2, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    ),
    "in bfloat16": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
}
SAME_BITS = ("lion",)
"""Whose update has the same bits in one kernel, as on the host's cores, and in several: for others
XLA contracts products and sums otherwise."""


def training(optimizer):
    """A step of a perceptron, (params, state, x) to (params, state, loss); and its arguments."""
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.standard_normal(shape, np.float32) / WIDTH**0.5)

    params = [{"w": normal(WIDTH, WIDTH), "b": normal(WIDTH)} for _ in range(LAYERS)]

    def step(params, state, x):
        def loss(params):
            y = x
            for layer in params:
                y = jnp.tanh(y @ layer["w"] + layer["b"][None])
            return jnp.mean((y - x) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), WIDTH**0.5 * normal(64, WIDTH))


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def differs(got, want):
    """Of each leaf the largest difference, in units of its largest entry."""
    found = []
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        found.append(np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-30))
    return np.array(found)


def in_float64(step, args):
    """What a function gives where its floats are of 64 bits."""
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, copied(args)
        )
        return jax.tree.map(np.asarray, jax.jit(step)(*wide))


def same(got, want):
    return all(map(np.array_equal, jax.tree.leaves(got), jax.tree.leaves(want)))


def on_host(plan):
    return int((plan.memgraph.kind == Kind.HOST_KERNEL).sum())


@pytest.mark.drawn(3)
@pytest.mark.optimized  # jit's own error is the measure
@pytest.mark.parametrize("donated", [(), (0, 1)], ids=["kept", "donated"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_on_the_hosts_cores_is_right(name, donated):
    step, args = training(OPTIMIZERS[name])
    made = {}
    for where in ("never", "always"):
        offloaded = jo.offload(
            step,
            device_memory=6 * MATRIX,
            vertex_memory=2 * MATRIX,
            host_compute=where,
            donate_argnums=donated,
            check=True,
            policy="once",
        )
        made[where] = offloaded(*copied(args))
        assert same(made[where], offloaded(*copied(args)))
        assert on_host(offloaded.last_run) >= (LAYERS if where == "always" else 0)
    if name in SAME_BITS:
        assert same(made["always"], made["never"])
        return
    exact = in_float64(step, args)
    own = differs(jax.jit(step)(*args), exact)
    assert (differs(made["always"], exact) <= 2 * own + 1e-6).all()


def test_updates_that_wait_for_several_gradients():
    """`optax.MultiSteps` chooses by one conditional over all parameters and all of the state."""
    optimizer = optax.MultiSteps(OPTIMIZERS["momentum"], 2)
    step, args = training(optimizer)
    budget = 6 * MATRIX
    offloaded = jo.offload(step, device_memory=budget, donate_argnums=(0, 1), check=True)
    assert offloaded.plan(*args).min_device_memory <= budget
    params, state = copied(args[:2])
    want = args[:2]
    for _ in range(3):
        params, state, loss = offloaded(params, state, args[2])
        *want, expected = jax.jit(step)(*want, args[2])
        assert differs((params, state, loss), (*want, expected)).max() < 1e-4
    assert on_host(offloaded.last_run) > 0
    # Without the host's cores each branch has a plan, which brings all of its operands.
    on_the_device = jo.offload(step, device_memory=budget, host_compute="never", check=True)
    want = jax.jit(step)(*args)
    assert differs(on_the_device(*args), want).max() < 1e-4
    plans = on_the_device._plans()
    assert len(plans) > 1
    assert all(plan.on_host == 0 and plan.peak_device_bytes <= budget for plan in plans)


def test_any_order_of_launch_and_any_budget_give_the_same_bits():
    step, args = training(OPTIMIZERS["clipped"])
    want = None
    for budget in (4 * MATRIX, 6 * MATRIX, 12 * MATRIX):
        for launch in ("fixed", *(policies.random(seed, 200e-6) for seed in range(4))):
            got = jo.offload(
                step,
                device_memory=budget,
                vertex_memory=2 * MATRIX,
                host_compute="always",
                donate_argnums=(0, 1),
                launch=launch,
                check=True,
            )(*copied(args))
            want = got if want is None else want
            assert same(got, want)


def test_state_in_host_memory_and_on_disk(tmp_path):
    step, args = training(OPTIMIZERS["momentum"])
    want = jax.jit(step)(*args)
    want = jax.jit(step)(*want[:2], args[2])
    for lower in (jo.host_put, lambda tree: jo.disk_put(tree, tmp_path)):
        offloaded = jo.offload(
            step,
            device_memory=6 * MATRIX,
            host_memory=16 * MATRIX,
            disk=tmp_path,
            host_compute="always",
            donate_argnums=(0, 1),
            check=True,
        )
        params, state = copied(args[0]), lower(args[1])
        for _ in range(2):
            params, state, loss = offloaded(params, state, args[2])
        assert on_host(offloaded.last_run) >= LAYERS
        state = jax.tree.map(np.asarray, state)
        assert differs((params, state, loss), want).max() < 1e-4


def test_arrays_off_alignment_are_right():
    step, args = training(OPTIMIZERS["momentum"])
    want = jax.jit(step)(*args)

    def shifted(x):
        if not x.nbytes or x.dtype != np.float32:
            return np.asarray(x)
        room = np.empty(x.nbytes + 128, np.uint8)
        start = (-room.ctypes.data) % 64 + 4
        view = room[start : start + x.nbytes].view(np.float32).reshape(x.shape)
        view[...] = x
        return view

    offloaded = jo.offload(step, device_memory=6 * MATRIX, host_compute="always", check=True)
    got = offloaded(*jax.tree.map(shifted, args))
    assert on_host(offloaded.last_run) >= LAYERS and differs(got, want).max() < 1e-5


def test_under_jit():
    step, args = training(OPTIMIZERS["lion"])
    want = jax.jit(step)(*args)
    offloaded = jo.offload(step, device_memory=6 * MATRIX, host_compute="always")
    got = jax.jit(offloaded)(*args)
    assert differs(got, want).max() < 1e-5
    assert on_host(offloaded.last_run) >= LAYERS


def test_the_planner_takes_what_the_simulation_says_is_faster():
    step, args = training(OPTIMIZERS["adamw"])
    own = jo.offload(step, device_memory=6 * MATRIX, donate_argnums=(0, 1))
    chosen = {}
    for name, machine in (("own link", SMALL_SERVER), ("slow link", SLOW)):
        fastest = own.predict(*args, machine=machine)
        never = jo.offload(
            step, device_memory=6 * MATRIX, donate_argnums=(0, 1), host_compute="never"
        ).predict(*args, machine=machine)
        chosen[name] = on_host(fastest)
        assert on_host(never) == 0 and fastest.seconds <= never.seconds
        if name == "slow link":
            assert fastest.seconds < never.seconds / 1.3
    assert chosen["slow link"] >= LAYERS


def in_a_context(function, *args):
    with compute_on.compute_on("device_host"):
        return function(*args)


def transformed(function, *args):
    newer = getattr(compute_on, "compute_on2", compute_on.compute_on)
    wrapped = newer(compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)
    return wrapped(function)(*args)


def _has_transform():
    try:
        jax.make_jaxpr(lambda x: transformed(jnp.sin, x))(1.0)
    except (TypeError, AttributeError):
        return False
    return True


def _has_context():
    try:
        jax.make_jaxpr(lambda x: in_a_context(jnp.sin, x))(1.0)
    except (TypeError, AttributeError):
        return False
    return True


def on_the_host(function, *args):
    """As this JAX has it."""
    return (in_a_context if _has_context() else transformed)(function, *args)


ASKED = {"context": (in_a_context, _has_context), "transform": (transformed, _has_transform)}


def partly_there(wanted):
    """A function of three matrices, part of which the user wants on the host's cores; and those."""

    def function(x, w, table):
        y = jnp.tanh(x @ w)
        table = wanted(lambda y, t: jnp.sin(t * y[:1]) + jnp.cumsum(t, 0), y, table)
        return jnp.tanh(y @ w) @ table, table

    random = np.random.default_rng(0)
    args = [random.standard_normal((WIDTH, WIDTH), np.float32) / WIDTH**0.5 for _ in range(3)]
    return function, args


@pytest.mark.parametrize("way", ASKED)
def test_what_the_user_wants_there_is_there(way):
    wanted, is_known = ASKED[way]
    if not is_known():
        pytest.skip(f"jax {jax.__version__} has no compute_on of this kind")
    function, args = partly_there(wanted)
    want = jax.jit(function)(*args)
    found = {}
    for option in ("auto", "never"):
        offloaded = jo.offload(
            function, device_memory=5 * MATRIX, host_compute=option, cut="always", check=True
        )
        assert differs(offloaded(*args), want).max() < 1e-5
        found[option] = on_host(offloaded.last_run)
        resident = jo.offload(function, device_memory=None, host_compute=option, cut="always")
        assert differs(resident(*args), want).max() < 1e-5
        assert on_host(resident.last_run) == 0
    assert found["auto"] > 0 and found["never"] == 0
    vertices = offloaded.plan(*args).taskgraph.vertices
    assert not any(v.kind is VertexKind.HOST_KERNEL for v in vertices)


def test_reports_name_the_lane():
    step, args = training(OPTIMIZERS["adamw"])
    offloaded = jo.offload(step, device_memory=6 * MATRIX, host_compute="always")
    told = str(offloaded.explain(*args))
    assert "vertices run on the host's cores; of arguments and results" in told
    offloaded(*args)
    run = offloaded.last_run
    assert "host compute" in str(run)
    assert run.lane_busy_seconds["host compute"] > 0


def test_a_result_that_is_a_view_of_an_argument_is_made_on_the_device():
    def function(x, w):
        return x.T, jnp.tanh(x @ w) @ w

    args = np.ones((2, WIDTH, WIDTH), np.float32)
    offloaded = jo.offload(function, device_memory=4 * MATRIX, cut="always", check=True)
    assert differs(offloaded(*args), jax.jit(function)(*args)).max() < 1e-5
    assert on_host(offloaded.last_run) == 0


def test_rates_that_are_measured_are_the_hosts_where_it_is_the_device():
    rates = (("memory_bytes_per_second", 3e10), ("to_device", 1e9))
    here, apart = SMALL_SERVER.with_rates(rates), H200.with_rates(rates)
    assert here.host_memory_bytes_per_second == here.memory_bytes_per_second == 3e10
    assert apart.host_memory_bytes_per_second == H200.host_memory_bytes_per_second


def test_with_room_for_everything_nothing_is_on_the_host():
    step, args = training(OPTIMIZERS["adamw"])
    plan = jo.offload(step, device_memory=None, cut="always", host_compute="always").plan(*args)
    assert not any(v.kind is VertexKind.HOST_KERNEL for v in plan.taskgraph.vertices)


def test_options_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="host_compute='sometimes' is not known"):
        jo.offload(lambda x: x, host_compute="sometimes")
    with pytest.raises(ValueError, match="host_compute='always' needs a device's memory apart"):
        jo.offload(lambda x: x, memory="1GiB", host_compute="always")

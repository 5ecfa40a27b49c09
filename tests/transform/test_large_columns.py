"""Arrays that do not fit into the budget, and are cut along another axis than the leading one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxoffload as jo
from jaxoffload.graphs.memgraph import Kind, Space
from tests.foreign.judge import disagreement, in_float64
from tests.transform.test_large_arrays import cross_entropy

RANDOM = np.random.default_rng(0)
WIDTH, WORDS, TOKENS = 224, 20_011, 64  # a prime number of words, 17 MiB; logits have 4.9 MiB
BUDGET = 4 << 20
HEAD = (RANDOM.standard_normal((WIDTH, WORDS)) / 16).astype(np.float32)
BIAS = RANDOM.standard_normal(WORDS).astype(np.float32)
STATES = RANDOM.standard_normal((TOKENS, WIDTH)).astype(np.float32)
LABELS = RANDOM.integers(0, WORDS, TOKENS).astype(np.int32)


def loss(head, states, labels):
    return cross_entropy(jnp.tanh(states) @ head, labels)


def momentum(head, velocity, states, labels):
    """A step of descent."""
    value, gradient = jax.value_and_grad(loss)(head, states, labels)
    velocity = 0.9 * velocity + gradient
    return head - 0.1 * velocity, velocity, value


PROGRAMS = {
    "logits": (lambda w, b, h: h @ w + b[None], HEAD, BIAS, STATES),
    "loss": (loss, HEAD, STATES, LABELS),
    "states' gradient": (jax.value_and_grad(loss, 1), HEAD, STATES, LABELS),
    "head's gradient": (jax.grad(loss), HEAD, STATES, LABELS),
    "momentum": (momentum, HEAD, 0.01 * HEAD, STATES, LABELS),
    "likeliest": (lambda w, h: jax.lax.top_k(h @ w, 3), HEAD, STATES),
    "probabilities": (lambda w, h: jax.nn.softmax(h @ w, 1) @ w.T, HEAD, STATES),
    "transposed": (lambda w: jnp.sin(w.T) + 1, HEAD),
    "of rows": (lambda t, h: h @ t.T, HEAD.T.copy(), STATES),
    "bfloat16": (
        lambda w, h: h @ w,
        np.concatenate([HEAD, HEAD]).astype(jnp.bfloat16),
        np.concatenate([STATES, STATES], 1).astype(jnp.bfloat16),
    ),
    "batches": (
        lambda w, h: jnp.einsum("btd,dv->bvt", h, w).sum(2), HEAD, STATES.reshape(4, 16, WIDTH),
    ),
}  # fmt: skip


def agrees(function, args, got, ulps=8):
    want, exact = jax.jit(function)(*args), in_float64(function, args)
    for g, w, e in zip(*map(jax.tree.leaves, (got, want, exact)), strict=True):
        assert not disagreement(np.asarray(w), np.asarray(g), e, ulps=ulps)


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_jit(name):
    function, *args = PROGRAMS[name]
    step = jo.offload(function, device_memory=BUDGET, check=True)
    agrees(function, args, step(*args))
    assert step.last_run.peak_device_bytes <= BUDGET


def test_columns_are_read_where_they_are_and_results_put_together_where_they_are_to_be():
    step = jo.offload(momentum, device_memory=BUDGET)
    plan = step.plan(*PROGRAMS["momentum"][1:])
    memgraph = plan.memgraph
    gathered = [v for v in plan.taskgraph.vertices if v.gathered]
    assert len(gathered) >= 2 * 63  # of the head and of the velocity
    reloaded = memgraph.inputs[memgraph.input_offsets[:-1][memgraph.kind == Kind.RELOAD]]
    assert memgraph.version_bytes()[reloaded].max() < HEAD.nbytes / 32
    large = memgraph.version_bytes() == HEAD.nbytes
    assert set(memgraph.space[large]) == {Space.ARGUMENT, Space.RESULT}
    assert memgraph.host_bytes() < HEAD.nbytes  # logits and pieces, not what is put together


def test_bits_are_the_same_in_any_order_and_every_run_is_proven():
    args = PROGRAMS["momentum"][1:]
    want = jo.offload(momentum, device_memory=BUDGET, verify=True)(*args)
    for seed in range(2):
        policy = jo.policies.random(seed, delays=1e-4)
        shuffled = jo.offload(momentum, device_memory=BUDGET, launch=policy, check=True)
        for g, w in zip(*map(jax.tree.leaves, (shuffled(*args), want)), strict=True):
            np.testing.assert_array_equal(g, w)


def test_where_adding_up_fits_columns_are_not_read():
    """Of the whole logits: rows of the head are read once, which are longer."""
    step = jo.offload(loss, device_memory="16MiB")
    agrees(loss, PROGRAMS["loss"][1:], step(*PROGRAMS["loss"][1:]))
    assert not any(v.gathered for v in step.plan(*PROGRAMS["loss"][1:]).taskgraph.vertices)


def test_steps_of_training_give_their_state_back_in_place():
    optimizer = optax.adamw(1e-2)

    def step(head, state, states, labels):
        value, gradient = jax.value_and_grad(loss)(head, states, labels)
        updates, state = optimizer.update(gradient, state, head)
        return optax.apply_updates(head, updates), state, value

    offloaded = jo.offload(step, device_memory=BUDGET, donate_argnums=(0, 1))
    jitted = jax.jit(step)
    mine = theirs = (jnp.asarray(HEAD), optimizer.init(jnp.asarray(HEAD)))
    mine = jax.tree.map(lambda x: jo.host_put(np.array(x)), mine)
    for _ in range(3):
        before = mine[0]
        *mine, value = offloaded(*mine, STATES, LABELS)
        *theirs, wanted = jitted(*theirs, STATES, LABELS)
        assert before.is_deleted()
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(mine[0]), theirs[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("words", [WORDS, 20_480])
def test_columns_on_disk(tmp_path, words):
    """Where they are of equal pieces, rows of these; else single elements."""
    head = np.resize(HEAD, (WIDTH, words))
    labels = LABELS % words
    with pytest.raises(jo.PlanError) as refused:
        jo.offload(momentum, device_memory=1)(head, head, STATES, labels)
    step = jo.offload(
        lambda *args: momentum(*args)[1:], device_memory=refused.value.min_device_memory + BUDGET
    )
    args = head, 0.01 * head, STATES, labels
    got = step(*(jo.disk_put(x, tmp_path) for x in args[:2]), *args[2:])
    agrees(lambda *args: momentum(*args)[1:], args, got)


def test_little_host_memory_is_enough_and_too_little_is_refused_by_its_name(tmp_path):
    """A budget that works with more of it is not blamed."""
    options = {"device_memory": BUDGET, "disk": str(tmp_path)}
    args = PROGRAMS["momentum"][1:]
    with pytest.raises(jo.PlanError, match="host_memory=65536 bytes is below") as refused:
        jo.offload(momentum, host_memory="64KiB", **options)(*args)
    assert "device_memory=" not in str(refused.value)
    agrees(momentum, args, jo.offload(momentum, host_memory="4MiB", **options)(*args))


def test_where_the_budget_is_ram_results_grow_where_they_are_to_be():
    with pytest.raises(jo.PlanError) as refused:
        jo.offload(jax.grad(loss), memory=1000)(HEAD, STATES, LABELS)
    least = refused.value.min_device_memory
    assert least < HEAD.nbytes + (12 << 20)  # the gradient, and little more
    step = jo.offload(jax.grad(loss), memory=least)
    agrees(jax.grad(loss), (HEAD, STATES, LABELS), step(HEAD, STATES, LABELS))


def test_where_the_budget_is_ram_what_takes_a_donated_arguments_place_is_made_on_the_device():
    """There is no host tier in which it could grow beside the argument."""
    options = {"donate_argnums": (0, 1)}
    with pytest.raises(jo.PlanError, match=r"test_large_columns\.py:\d+") as refused:
        jo.offload(momentum, memory=1000, **options)(*PROGRAMS["momentum"][1:])
    least = refused.value.min_device_memory
    args = [jnp.array(x) for x in PROGRAMS["momentum"][1:]]
    step = jo.offload(momentum, memory=least, **options)
    program = step._program(step._spec.bind(args, {}))
    planner = program.plan()._source
    while (pieces := planner._in_pieces) is not None:
        planner = pieces
    assert not planner._large.by_columns
    agrees(momentum, PROGRAMS["momentum"][1:], step(*args))


def test_a_budget_below_the_least_is_refused_with_it():
    args = PROGRAMS["momentum"][1:]
    with pytest.raises(jo.PlanError, match=r"test_large_columns\.py:\d+") as refused:
        jo.offload(momentum, device_memory=1)(*args)
    least = refused.value.min_device_memory
    assert least < BUDGET
    agrees(momentum, args, jo.offload(momentum, device_memory=least)(*args))

"""Recomputation: the same values, fewer of them held; chosen where the link is what is short."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.capture import cost
from jaxoffload.capture.build import build_taskgraph, order_program
from jaxoffload.capture.operations import is_view
from jaxoffload.capture.recompute import recompute
from jaxoffload.capture.scan import unroll
from jaxoffload.graphs.taskgraph import TensorKind
from jaxoffload.plan.alloc.limits import intermediates_peak
from jaxoffload.plan.cost.machines import SMALL_SERVER, Link
from jaxoffload.runtime import backends
from jaxoffload.transform.verification import max_relative_difference
from tests import workloads
from tests.helpers import interpret_equations
from tests.transform.strategies import arguments, programs

RANDOM = np.random.default_rng(0)


def normal(*shape):
    return RANDOM.normal(size=shape).astype(np.float32)


def dropout():
    """Masks made from a key may be made again, and a scan of known length; a loop of unknown
    length may not, nor a sort."""

    def loss(weights, x, key):
        for i, w in enumerate(weights):
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
            x = jnp.where(keep, jax.nn.gelu(x @ w), 0.0)
            x = jax.lax.fori_loop(0, 2, lambda _, y: y * 0.9, x)
            fixed = jax.lax.stop_gradient(x)
            steps = jnp.int32(jnp.abs(fixed[0, 0])) + 2
            x = x * jax.lax.fori_loop(0, steps, lambda _, y: y * 0.9, fixed)
            x = x + jnp.cos(jnp.sort(jax.lax.stop_gradient(x), axis=0)) * x
        return jnp.mean(x * x)

    weights = [normal(32, 32) for _ in range(4)]
    return jax.grad(loss), (weights, normal(16, 32), jax.random.key(1)), ()


WORKLOADS = {
    name: getattr(workloads, name)
    for name in ("mlp", "scan_train_step", "attention", "mixed_dtypes", "linear_algebra")
} | {"dropout": dropout}


def seconds(equation):
    return cost.seconds(equation, SMALL_SERVER)


def ordered_program(function, args):
    jaxpr = jax.make_jaxpr(function)(*args)
    return jaxpr, order_program(unroll(jaxpr, rates=SMALL_SERVER))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", WORKLOADS)
def test_every_share_gives_the_same_bits_operation_by_operation(name):
    function, args, _ = WORKLOADS[name]()
    jaxpr, ordered = ordered_program(function, args)
    leaves = [*jax.tree.leaves(args), *jaxpr.consts]
    want = interpret_equations(ordered, leaves)
    for reach in (0, 3000, 30000):
        for share in (0.3, 1.0, 2.0):
            again = recompute(ordered, reach, share, seconds)
            for parts, others in zip(want, interpret_equations(again, leaves), strict=True):
                for a, b in zip(parts, others, strict=True):
                    np.testing.assert_array_equal(a, b)


@hypothesis.settings(
    max_examples=40, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(program=programs(), reach=st.integers(0, 5000), share=st.floats(0, 2))
def test_any_program_gives_the_same_bits(program, reach, share):
    function, count = program
    args = arguments(count)
    jaxpr, ordered = ordered_program(function, args)
    leaves = [*jax.tree.leaves(args), *jaxpr.consts]
    again = recompute(ordered, reach, share, seconds)
    for parts, others in zip(
        interpret_equations(ordered, leaves), interpret_equations(again, leaves), strict=True
    ):
        for a, b in zip(parts, others, strict=True):
            np.testing.assert_array_equal(a, b)


def layers(depth=8, width=64, batch=256):
    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x * x)

    return jax.grad(loss), ([normal(width, width) / 8 for _ in range(depth)], normal(batch, width))


def peak_of(ordered, num_arguments):
    captured = build_taskgraph(ordered, kinds=[TensorKind.WEIGHT] * num_arguments, max_equations=1)
    captured.taskgraph.check()
    return intermediates_peak(captured.taskgraph)


def test_less_is_held_the_more_is_computed_again():
    function, args = layers()
    leaves = jax.tree.leaves(args)
    _, ordered = ordered_program(function, args)
    reach = 6 * args[1].nbytes
    peaks = [
        peak_of(recompute(ordered, reach, share, seconds), len(leaves)) for share in (0.0, 0.5, 1.0)
    ]
    assert peaks[0] > 1.3 * peaks[2] and peaks[0] >= peaks[1] >= peaks[2]
    again = [e for e in recompute(ordered, reach, 1.0, seconds).equations if e.recomputed]
    assert {e.operation.name for e in again} >= {"tanh", "dot_general"}
    assert recompute(ordered, reach, 0.0, seconds).equations == ordered.equations
    assert recompute(ordered, float("inf"), 1.0, seconds).equations == ordered.equations


def test_more_than_all_is_made_again_from_what_is_made_again():
    """What flows from layer to layer is kept otherwise, as each is made from the one before."""

    @jax.custom_jvp
    def tanh(x):
        return jnp.tanh(x)

    @tanh.defjvp
    def _(primals, tangents):  # of two values, as jax's own before 0.12
        y = jnp.tanh(*primals)
        slope = tangents[0] * (1 - y)
        return y, slope + slope * y

    def loss(weights, x):
        for w in weights:
            x = x + tanh(x @ w)
        return jnp.mean(x * x)

    leaves = [*(normal(32, 32) / 12 for _ in range(12)), normal(512, 32)]
    _, ordered = ordered_program(jax.grad(loss), (leaves[:-1], leaves[-1]))
    reach = 16 * leaves[-1].nbytes
    found = [recompute(ordered, reach, share, seconds) for share in (1.0, 2.0)]
    peaks = [peak_of(each, len(leaves)) for each in found]
    again = [sum(e.recomputed for e in each.equations) for each in found]
    assert peaks[1] < 0.7 * peaks[0] and 0 < again[0] < again[1] < 2 * len(ordered.equations)
    for parts, others in zip(
        interpret_equations(ordered, leaves), interpret_equations(found[1], leaves), strict=True
    ):
        for a, b in zip(parts, others, strict=True):
            np.testing.assert_array_equal(a, b)


def test_loops_and_sorts_are_not_repeated():
    function, args, _ = dropout()
    _, ordered = ordered_program(function, args)
    again = [e for e in recompute(ordered, 0, 1.0, seconds).equations if e.recomputed]
    names = {e.operation.name for e in ordered.equations}
    assert again and names >= {"while", "sort"}
    assert not {e.operation.name for e in again} & {"while", "sort"}


def test_of_what_is_made_twice_one_is_again():
    """Where an operation's own place is gone, its first copy stands for it."""
    _, ordered = ordered_program(*dropout()[:2])
    made = recompute(ordered, 0, 1.0, seconds).equations
    before, after = (
        sum(not is_view(e) for e in equations) for equations in (ordered.equations, made)
    )
    more = after - before
    assert more > 0 and sum(e.recomputed for e in made) == more


def test_a_short_link_is_spared_and_results_agree(monkeypatch):
    function, args = layers(depth=12, batch=512)
    want = jax.jit(function)(*args)
    budget = 3 * 2**19
    plans = {}
    for rate in (1e12, 1e8):
        machine = dataclasses.replace(
            SMALL_SERVER, to_device=Link(rate, 0.0), from_device=Link(rate, 0.0)
        )
        monkeypatch.setattr(backends.current(), "machine", machine)
        step = jo.offload(function, device_memory=budget, check=True)
        plans[rate] = step.plan(*args)  # before a run measures its kernels, and the cut changes
        for got, expected in zip(step(*args), want, strict=True):
            assert max_relative_difference(np.asarray(expected), np.asarray(got)) < 1e-5
    never = jo.offload(function, device_memory=budget, recompute="never").plan(*args)
    assert plans[1e8].timeline.seconds < 1.05 * never.timeline.seconds
    assert plans[1e8].recomputed > plans[1e12].recomputed
    assert "time recomputes what" in str(jo.offload(function, device_memory=budget).explain(*args))
    moved = {rate: p.bytes_offloaded + p.bytes_reloaded for rate, p in plans.items()}
    assert moved[1e8] < 0.6 * moved[1e12]


def test_never_and_always():
    function, args = layers(depth=12, batch=512)
    plans = {
        how: jo.offload(function, device_memory=3 * 2**19, recompute=how).plan(*args)
        for how in ("never", "always")
    }
    assert plans["never"].recomputed == 0 < plans["always"].recomputed
    step = jo.offload(function, device_memory=3 * 2**19, recompute="always")
    assert "time recomputes what" in str(step.explain(*args))
    assert plans["always"].bytes_offloaded < plans["never"].bytes_offloaded
    with pytest.raises(ValueError, match="recompute='often'"):
        jo.offload(function, recompute="often")


def test_what_a_repeated_operation_reads_is_made_again_too_where_it_is_out_of_reach():
    """Else it would have to wait in memory in place of what it makes."""

    def function(x, weights):
        late = jnp.exp(jnp.sin(x))  # the sine is read here, and never again
        y = late
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.sum(y * late)

    args = (normal(16, 16), [normal(16, 16) for _ in range(8)])
    _, ordered = ordered_program(function, args)
    size = 16 * 16 * 4
    again = recompute(ordered, 8 * size, 1.0, seconds).equations
    assert {e.operation.name for e in again if e.recomputed} == {"sin", "exp"}
    near = recompute(ordered, 1000 * size, 1.0, seconds).equations
    assert not any(e.recomputed for e in near)


def chain_scores(scores, table):
    """Sums over all ways through a table (a conditional random field's): a step makes 64 times
    what it carries, and reads it again in the backward pass."""
    sums = scores[0]
    for here in scores[1:]:
        sums = jax.nn.logsumexp(sums[:, :, None] + table[None], axis=1) + here
    return jax.nn.logsumexp(sums, axis=1).sum()


def spectral(x, rate):
    """Steps in frequencies, of which running sums and the largest are taken: what each carries is
    as large as any one thing that it makes."""
    for _ in range(12):
        waves = jnp.fft.rfft2(x)
        x = x + rate * jnp.fft.irfft2(1j * waves) * jnp.fft.irfft2(waves / 2)
        top = jnp.take_along_axis(x, jnp.argmax(x, 1, keepdims=True), 1)
        x = jnp.sin(x) * jnp.cos(x) * jnp.exp(-jnp.cumsum(x * x, 1) / 64) - top / 64
    return jnp.sum(x**2)


@pytest.mark.parametrize(
    ("function", "args", "least", "names"),
    [
        (chain_scores, (normal(24, 16, 64), normal(64, 64)), 0.3, {"exp", "sub"}),
        (spectral, (normal(64, 64), jnp.float32(0.1)), 0.7, {"fft", "cumsum"}),
    ],
)
def test_steps_of_a_loop_are_made_again_from_what_it_carries(function, args, least, names):
    _, ordered = ordered_program(jax.grad(function), args)
    leaves = [*args, *ordered.program.arguments[len(args) :]]
    assert len(leaves) == len(args)
    reach = 24 * max(v.num_bytes() for e in ordered.equations for v in e.outputs)
    again = recompute(ordered, reach, 1.0, seconds)
    assert peak_of(again, 2) < least * peak_of(ordered, 2)
    assert {e.operation.name for e in again.equations if e.recomputed} >= names
    for parts, others in zip(
        interpret_equations(ordered, leaves), interpret_equations(again, leaves), strict=True
    ):
        for a, b in zip(parts, others, strict=True):
            np.testing.assert_array_equal(a, b)


def test_what_would_be_made_again_and_again_is_kept_first():
    """A table that all layers read is made anew for each; a value that one reads, once."""

    def function(x, weights):
        table, once = jnp.sin(x), jnp.cos(x)
        y = x + once
        for w in weights:
            y = jnp.tanh(y @ w) * table
        return jnp.sum(y * once)

    args = (normal(16, 16), [normal(16, 16) for _ in range(8)])
    _, ordered = ordered_program(function, args)
    again = [e for e in recompute(ordered, 3 * 1024, 0.1, seconds).equations if e.recomputed]
    assert [e.operation.name for e in again] == ["cos"]
    all_of_them = recompute(ordered, 3 * 1024, 1.0, seconds).equations
    assert sum(e.recomputed for e in all_of_them if e.operation.name == "sin") > 3

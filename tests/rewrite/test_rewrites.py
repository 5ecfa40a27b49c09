"""Rewritten programs compute the same, in less, and never a matrix for each row."""

import functools
import itertools
import sys

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from benchmarks import graphs
from jaxoffload.capture.whole import bodies_of
from jaxoffload.options import REWRITES
from jaxoffload.plan.cost.machines import SMALL_SERVER
from jaxoffload.rewrite.apply import hint, rewritten

NODES, EDGES, RELATIONS, WIDTH = 60, 900, 5, 8
WAYS = [("typed",), REWRITES]


def _arguments(seed=0):
    rng = np.random.default_rng(seed)
    src, rel, dst = graphs.graph(NODES, EDGES, RELATIONS, 0.25, seed)
    x = jnp.array(rng.normal(size=(NODES, WIDTH)), jnp.float32)
    labels = jnp.array(rng.integers(0, WIDTH, NODES), jnp.int32)
    p = graphs.parameters(RELATIONS, WIDTH, seed)
    return p, x, jo.compact((src, rel)), dst, labels


def _flat(function, args):
    leaves, tree = jax.tree.flatten(args)
    return lambda *flat: jax.tree.leaves(function(*jax.tree.unflatten(tree, flat))), leaves


def _evaluated(closed, leaves):
    return jax.jit(jax.extend.core.jaxpr_as_fun(closed))(*leaves)


def _in_float64(flat, leaves):
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) if x.dtype == np.float32 else x for x in leaves]
        return [np.asarray(x) for x in jax.jit(flat)(*wide)]


def _shapes(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for body in bodies_of(eqn):
            yield from _shapes(body)


def _rewritten(function, args, names=REWRITES):
    """What is rewritten; its results against float64, beside jit's."""
    flat, leaves = _flat(function, args)
    closed = jax.make_jaxpr(flat)(*leaves)
    made, saving = rewritten(closed, names, SMALL_SERVER, False)
    assert made.out_avals == closed.out_avals
    judge = _in_float64(flat, leaves)
    for found, jitted, exact in zip(
        _evaluated(made, leaves), _evaluated(closed, leaves), judge, strict=True
    ):
        scale = np.abs(exact).max() + 1e-30
        ours, theirs = (np.abs(np.asarray(r) - exact).max() / scale for r in (found, jitted))
        assert ours <= 8 * theirs + 3e-6, f"{ours:.1e}, jit {theirs:.1e}"
    return made, saving


@pytest.mark.drawn(4)
@pytest.mark.parametrize("names", WAYS, ids="-".join)
@pytest.mark.parametrize(("layer", "kind"), [*itertools.product(graphs.LAYERS, (0, 1))])
def test_layers_are_equal_within_rounding(layer, kind, names):
    step = list(graphs.programs(graphs.LAYERS[layer]).values())[kind]
    made, saving = _rewritten(step, _arguments(), names)
    if "typed" in names:
        assert saving is not None and saving.seconds[1] < saving.seconds[0]
        largest = max(np.prod(shape) for shape in _shapes(made.jaxpr))
        # The whole product of nodes and types is made where it is less than a row an edge.
        assert largest < EDGES * WIDTH * WIDTH / 2, "a matrix for each edge"


@pytest.mark.parametrize(("layer", "kind"), [("RGAT", "training"), ("HGT", "inference")])
def test_no_plan_has_a_matrix_for_each_edge(layer, kind):
    step, args = graphs.programs(graphs.LAYERS[layer])[kind], _arguments()
    offloaded = jo.offload(step, device_memory=None, rewrites=True, cut="always")
    graph = offloaded.plan(*args).taskgraph
    sizes = [t.bytes for t in graph.tensors] + [v.workspace_bytes for v in graph.vertices]
    assert max(sizes) < EDGES * WIDTH * WIDTH * 4 / 2
    written = jax.make_jaxpr(_flat(step, args)[0])(*_flat(step, args)[1])
    assert max(np.prod(shape) for shape in _shapes(written.jaxpr)) == EDGES * WIDTH * WIDTH


@pytest.mark.parametrize("is_trained", (False, True))
def test_work_is_done_once_for_each_pair(is_trained):
    p, x, rows, dst, _ = _arguments()

    def messages(p, x, rows, dst):
        src, rel = rows.spread()
        found = jnp.exp(jnp.einsum("ed,edf->ef", x[src], p["w"][rel]))
        return (jax.ops.segment_sum(found, dst, NODES) ** 2).sum()

    step = jax.grad(messages, (0, 1)) if is_trained else messages
    made, _ = _rewritten(step, (p, x, rows, dst))
    shapes = [e.outvars[0].aval.shape for e in made.eqns if e.primitive.name == "exp"]
    assert shapes == [(len(rows.rows[0]), WIDTH)]
    without, _ = _rewritten(step, (p, x, rows, dst), ("reorder", "typed"))
    shapes = [e.outvars[0].aval.shape for e in without.eqns if e.primitive.name == "exp"]
    assert shapes == [(EDGES, WIDTH)]


def test_in_the_body_of_a_scan_and_of_checkpoint():
    p, x, rows, dst, _ = _arguments()

    def layers(p, x, rows, dst):
        @jax.checkpoint
        def layer(x):
            return jnp.tanh(graphs.rgcn(p, x, *rows.spread(), dst) / 8)

        return jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=2)[0]

    made, saving = _rewritten(layers, (p, x, rows, dst))
    assert saving is not None
    assert max(np.prod(s) for s in _shapes(made.jaxpr)) < EDGES * WIDTH * WIDTH / 2


def test_derivatives_vmap_and_jit_of_a_rewritten_function():
    p, x, rows, dst, _ = _arguments()
    layer = graphs.programs(graphs.rgat)["inference"]
    offloaded = jo.offload(layer, device_memory="64MiB", rewrites=True)

    def loss(function, p, x):
        return (function(p, x, rows, dst, None) ** 2).sum()

    ours = jax.jit(jax.grad(lambda p: loss(offloaded, p, x)))(p)
    theirs = jax.jit(jax.grad(lambda p: loss(layer, p, x)))(p)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5 * float(jnp.abs(b).max()))
    two = jnp.stack([x, 2 * x])
    ours = jax.vmap(lambda x: offloaded(p, x, rows, dst, None))(two)
    theirs = jax.vmap(lambda x: layer(p, x, rows, dst, None))(two)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
def test_no_dtype_is_changed(dtype):
    args = _arguments()
    step = graphs.programs(graphs.rgcn)["inference"]
    p, x, *rest = jax.tree.map(
        lambda a: a.astype(dtype) if a.dtype == jnp.float32 else a, args, is_leaf=lambda a: False
    )
    flat, leaves = _flat(step, (p, x, *rest))
    closed = jax.make_jaxpr(flat)(*leaves)
    made, saving = rewritten(closed, REWRITES, SMALL_SERVER, False)
    assert saving is not None and made.out_avals == closed.out_avals
    floats = {v.aval.dtype for e in made.eqns for v in e.outvars}
    assert {d for d in floats if jnp.issubdtype(d, jnp.floating)} == {jnp.dtype(dtype)}


def test_types_are_clipped_or_dropped_as_written():
    rng = np.random.default_rng(3)
    x = jnp.array(rng.normal(size=(400, 32)), jnp.float32)
    w = jnp.array(rng.normal(size=(3, 32, 32)), jnp.float32)
    index = jnp.array(rng.integers(-2, 6, 400), jnp.int32)

    def clipped(x, w, index):
        return jnp.einsum("ed,edf->ef", x, w.at[index].get(mode="clip"))

    def filled(x, w, index):
        return jnp.einsum("ed,edf->ef", x, w.at[index].get(mode="fill", fill_value=0))

    def dropped(x, w, index):
        outer = jnp.einsum("ed,ef->edf", x, x @ w[0])
        return jax.ops.segment_sum(outer, index, 3), jax.ops.segment_sum(x @ w[1], index, 3)

    assert _rewritten(clipped, (x, w, index))[1] is not None
    _rewritten(filled, (x, w, index))
    _rewritten(dropped, (x, w, index))


@pytest.mark.parametrize("name", [*graphs.others(True)])
def test_programs_that_are_no_graphs_gain(name):
    step, args = graphs.others(True)[name]
    _, saving = _rewritten(step, args)
    assert saving.seconds[1] < 0.7 * saving.seconds[0]


def test_off_unless_it_saves_a_lot_or_is_asked_for():
    args = _arguments()
    step = graphs.programs(graphs.rgat)["inference"]
    flat, leaves = _flat(step, args)
    closed = jax.make_jaxpr(flat)(*leaves)
    assert rewritten(closed, REWRITES, SMALL_SERVER, True) == (closed, None)  # it is small
    assert rewritten(closed, (), SMALL_SERVER, False) == (closed, None)
    for rewrites, words in (("auto", False), (None, False), (True, True)):
        given = {} if rewrites is None else {"rewrites": rewrites}  # none: off
        told = str(jo.offload(step, device_memory="64MiB", **given).explain(*args))
        assert ("Rewritten:" in told) is words
    large = [
        jax.ShapeDtypeStruct((64 * x.shape[0], *x.shape[1:]), x.dtype)
        if x.shape and x.shape[0] in (EDGES, NODES) or len(x.shape) == 1
        else x
        for x in leaves
    ]  # fmt: skip
    closed = jax.make_jaxpr(flat)(*large)
    assert rewritten(closed, REWRITES, SMALL_SERVER, True)[1] is not None
    told = str(jo.offload(_flat(step, args)[0], device_memory="64MiB").explain(*large))
    assert "Rewritten:" not in told and 'Not rewritten: rewrites="auto" would leave' in told
    asked = jo.offload(_flat(step, args)[0], device_memory="64MiB", rewrites="auto")
    assert "Rewritten:" in str(asked.explain(*large))


def test_a_program_with_many_equations_is_not_looked_through_for_a_line():
    def step(x, w, index, count):
        y = jnp.einsum("ed,edf->ef", x, w[index])
        for _ in range(count):
            y = jnp.sin(y)
        return y

    shapes = [jax.ShapeDtypeStruct(s, np.float32) for s in ((2000, 32), (9, 32, 32))]
    shapes.append(jax.ShapeDtypeStruct((2000,), np.int32))
    for count, is_told in ((0, True), (1001, False)):
        closed = jax.make_jaxpr(functools.partial(step, count=count))(*shapes)
        assert bool(hint(closed, SMALL_SERVER)) is is_told


def test_what_saves_little_is_no_rewrite():
    def step(x, w, index, large):
        return jnp.einsum("ed,edf->ef", x, w[index]), large @ large

    shapes = [jax.ShapeDtypeStruct(s, np.float32) for s in ((200, 16), (9, 16, 16))]
    shapes.append(jax.ShapeDtypeStruct((200,), np.int32))
    for side, is_made in ((8, True), (4096, False)):
        square = jax.ShapeDtypeStruct((side, side), np.float32)
        closed = jax.make_jaxpr(step)(*shapes, square)
        assert (rewritten(closed, REWRITES, SMALL_SERVER, False)[1] is not None) is is_made


@pytest.mark.parametrize(
    ("value", "error"), [("all", TypeError), (("typed", "x"), ValueError), (1.5, TypeError)]
)
def test_options_that_are_none_are_refused(value, error):
    with pytest.raises(error, match="rewrites=.*Pass"):
        jo.offload(lambda x: x, rewrites=value)


def test_a_first_run_is_verified_against_the_program_as_written(monkeypatch):
    module, compared = sys.modules["jaxoffload.transform.offloaded"], []
    compare = module.compare_with_jit
    monkeypatch.setattr(
        module, "compare_with_jit", lambda *args: compared.append(args[0]) or compare(*args)
    )
    step = graphs.programs(graphs.rgcn)["inference"]
    jo.offload(step, device_memory=None, rewrites=True, verify=True)(*_arguments())
    assert (EDGES, WIDTH, WIDTH) in set(_shapes(compared[0].jaxpr))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layer", ["RGCN", "RGAT", "HGT"])
def test_more_rewrites_never_take_longer_than_fewer(layer):
    """By the model, on WordNet's shape: an order that is best for each value by itself may not be
    so for all that share work (HGT's training: 976 ms in place of 895)."""
    nodes, edges, relations, width = 117_659, 377_592, 79, 64
    ids = graphs.graph(nodes, edges, relations, graphs.RATIO)
    rows = jo.compact(ids[:2])
    x = jax.ShapeDtypeStruct((nodes, width), jnp.float32)
    labels = jax.ShapeDtypeStruct((nodes,), jnp.int32)
    arguments = graphs.parameters(relations, width), x, rows, ids[2], labels
    for step in graphs.programs(graphs.LAYERS[layer]).values():
        closed = jax.make_jaxpr(step)(*arguments)
        left = []
        for names in (("typed",), ("reorder", "typed"), ("reorder", "typed", "compact")):
            saving = rewritten(closed, names, SMALL_SERVER, False)[1]
            assert saving is not None
            left.append(saving.seconds[1])
        assert left == sorted(left, reverse=True)

"""Scans whole, in chunks and in steps compute what jit's scan does, by graphs of bounded size."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxoffload as jo
from jaxoffload.capture import build
from jaxoffload.capture.scan import unroll
from jaxoffload.plan.cost.machines import H200, SMALL_SERVER
from tests.helpers import capture, interpret_taskgraph

ALL = float("inf")


def rows(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def assert_same(function, args, piece_bytes, rtol=2e-6, **cut):
    captured, arrays = capture(function, *args, piece_bytes=piece_bytes, **cut)
    wanted = jax.tree.leaves(jax.jit(function)(*args))
    got = iter(interpret_taskgraph(captured, arrays))
    for want in map(np.asarray, wanted):
        if want.size:
            found = next(got).view(want.dtype).reshape(want.shape)
            if want.dtype.kind in "iub":
                np.testing.assert_array_equal(found, want)
            else:
                found, want = found.astype(np.float64), want.astype(np.float64)
                scale = np.abs(want).max()
                np.testing.assert_allclose(found, want, rtol=0, atol=rtol * scale)
    return captured


def scans_in(captured):
    """The lengths of the scans that each vertex runs."""
    return [
        step.operation.length
        for vertex in captured.taskgraph.vertices
        for step in captured.kernels[vertex.kernel].steps
        if step.operation.name == "scan"
    ]


def recurrence(x):
    return lax.scan(lambda c, r: (jnp.tanh(c * 0.9 + r), c * r), x[0], x)


def nested(w, x):
    def layer(h, row):
        last, seen = lax.scan(lambda c, r: (jnp.tanh(c * 0.5 + r), c), h[0], h, reverse=True)
        return jnp.tanh(seen * row[None]) + last[None], last

    h, lasts = lax.scan(layer, x, w)
    return jnp.sum(h * h) + jnp.sum(lasts)


def keys(x):
    def body(key, row):
        key, now = jax.random.split(key)
        return key, row + jax.random.normal(now, row.shape)

    key, ys = lax.scan(body, jax.random.key(3), x)
    return jax.random.key_data(key), ys


def two_lengths(x):
    first = lax.scan(lambda c, r: (c + r, c * r), x[0], x)[1]
    second = lax.scan(lambda c, r: (c - r, jnp.sin(c)), x[0], x[: x.shape[0] // 2])[1]
    return jnp.sum(jnp.concatenate([first, second]) ** 2)


def carries(x):
    """Of several dtypes, weak and strong, one of them passed through, a constant among them."""
    table = np.arange(8, dtype=np.float32)

    def body(c, row):
        count, total, weak, same, half = c
        # Rounded here in any case: some processors' compilers keep float32 until the sum.
        half = lax.reduce_precision(half * row.astype(jnp.bfloat16), 8, 7)
        return (count + 1, total + row * weak + table, weak * 1.0, same, half + 1), count

    start = (0, x[0], 0.5, x[1], jnp.zeros(8, jnp.bfloat16))
    return lax.scan(body, start, x)


def stacks(x):
    """What is done with a stack row by row, or to all rows."""
    ys = lax.scan(lambda c, r: (c + r, jnp.outer(c, r)), x[0], x)[1]
    flat = jnp.tanh(ys).reshape(x.shape[0], -1) * 0.5
    turned = jnp.transpose(ys, (0, 2, 1))
    return (
        flat, turned, ys.max(axis=0), turned.sum(axis=(0, 1)), flat.sum(axis=1), flat.min(),
        jnp.cumsum(flat, 0), ys[-1],
    )  # fmt: skip


X = rows(37, 8)
PROGRAMS = {
    "forward": (recurrence, (X,)),
    "gradient": (jax.grad(lambda x: jnp.sum(recurrence(x)[1] ** 2)), (X,)),
    "reverse": (lambda x: lax.scan(lambda c, r: (c * 0.5 + r, c), x[0], x, reverse=True), (X,)),
    "both ways": (
        lambda x: lax.scan(lambda c, r: (c + r, c * r), x[0], recurrence(x)[1], reverse=True),
        (X,),
    ),
    "no xs": (lambda x: lax.scan(lambda c, _: (jnp.sin(c) + 1, c), x[0], None, length=41), (X,)),
    "no ys": (lambda x: lax.scan(lambda c, r: (jnp.sin(c) + r, None), x[0], x)[0], (X,)),
    "no carry": (lambda x: lax.map(lambda r: jnp.sin(r) * r.sum(), x), (X,)),
    "ys written in the program": (
        lambda x: lax.scan(lambda c, r: (jnp.sin(c) + r, (0.5, c, 7)), x[0], x),
        (X,),
    ),
    "a carry written in the program": (
        lambda x: lax.scan(lambda c, r: ((0.5, c[1] + r), c[0] * r), (2.0, x[0]), x),
        (X,),
    ),
    "nothing but what is written": (lambda x: lax.scan(lambda c, r: (1.5, 2), x.sum(), x), (X,)),
    "nested, with ys written": (
        lambda x: lax.scan(
            lambda c, r: lax.scan(lambda c, s: (jnp.tanh(c + s), 1.0), c, r), x[0, 0], x
        ),
        (X,),
    ),
    "length 0": (lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x[:0]), (X,)),
    "length 1": (lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x[:1]), (X,)),
    "nested": (jax.grad(nested), (rows(6, 8), X)),
    "keys": (keys, (X,)),
    "two lengths": (jax.grad(two_lengths), (X,)),
    "carries": (carries, (X,)),
    "stacks": (stacks, (X,)),
    "unrolled by hand": (
        lambda x: lax.scan(lambda c, r: (jnp.tanh(c + r), c), x[0], x, unroll=5),
        (X,),
    ),
    "associative": (lambda x: lax.associative_scan(jnp.multiply, recurrence(x)[1]), (X,)),
    "computed xs": (lambda x: recurrence(jnp.cumsum(x, 0)), (X,)),
    "vmapped": (jax.vmap(lambda x: recurrence(x)), (rows(3, 37, 8),)),
    "forward mode": (lambda x: jax.jvp(lambda y: recurrence(y)[1], (x,), (x * 2,)), (X,)),
}


@pytest.mark.drawn(18)
@pytest.mark.parametrize("piece_bytes", [ALL, 700, 0])
@pytest.mark.parametrize("name", PROGRAMS)
def test_whole_in_chunks_and_in_steps_match(name, piece_bytes):
    function, args = PROGRAMS[name]
    assert_same(function, args, piece_bytes)


def test_a_small_scan_stays_whole_without_a_limit():
    for name, (function, args) in PROGRAMS.items():
        if name not in ("length 0", "length 1"):
            captured, _ = capture(function, *args, piece_bytes=ALL)
            assert len(captured.taskgraph.vertices) <= 8, name
            assert not unroll(jax.make_jaxpr(function)(*args), rates=SMALL_SERVER).parents[1:], name


def test_chunks_share_executables():
    captured = assert_same(jax.grad(lambda x: recurrence(x)[1].sum()), (rows(960, 8),), 10_000)
    lengths = scans_in(captured)
    assert 8 <= len(lengths) and len(set(lengths)) == 1
    chunks = {k for k, kernel in enumerate(captured.kernels)
              if any(step.operation.name == "scan" for step in kernel.steps)}  # fmt: skip
    assert len(chunks) == 2  # forward (the last one, whose carry nobody reads, too) and backward


def test_what_is_given_for_nothing_makes_no_vertex_the_largest(monkeypatch):
    def both(c, x):
        return lax.scan(lambda c, r: (c * 0.5 + r, (jnp.tanh(c + r), jnp.sin(c + r))), c, x)[1]

    def function(x, y):  # one scan is asked for this, the other for that
        return both(x[0], x)[0], both(y[0], y)[1]

    def largest():
        captured, _ = capture(function, rows(40, 100), rows(40, 100, seed=1), piece_bytes=4000)
        graph = captured.taskgraph
        return max(sum(graph.tensors[t].bytes for t in {*v.inputs, *v.outputs})
                   for v in graph.vertices)  # fmt: skip

    found = largest()
    monkeypatch.setattr(build, "make_alike", lambda clusters: None)
    assert found == largest()


@pytest.mark.parametrize("piece_bytes", [ALL, 20_000])
def test_products_of_a_step_are_made_as_they_are_wanted(piece_bytes):
    """The gradient of a product is written as a transposed one, of steps that stay loops, too."""

    def function(w, x):
        return lax.scan(lambda c, r: (jnp.tanh(r @ w + c), c), x[0], x)[1].sum()

    gradient = jax.grad(function)
    args = rows(12, 12), rows(200, 4, 12, seed=1)
    assert "transpose" in str(jax.make_jaxpr(gradient)(*args))
    captured = assert_same(gradient, args, piece_bytes, rtol=1e-5)
    names = {
        equation.operation.name
        for kernel in captured.kernels
        for step in kernel.steps
        for equation in step.operation.equations or ()
    }
    assert "dot_general" in names and "transpose" not in names


def test_a_loop_keeps_its_unrolling():
    def function(x):
        return lax.scan(lambda c, r: (jnp.tanh(c + r), c), x[0], x, unroll=3)[1]

    captured = assert_same(function, (rows(60, 8),), ALL)
    traced = [jax.make_jaxpr(kernel.apply)(kernel.inputs) for kernel in captured.kernels]
    scans = [e for closed in traced for e in closed.jaxpr.eqns if e.primitive.name == "scan"]
    assert [e.params["unroll"] for e in scans] == [3]


def test_a_step_may_read_an_array_of_its_own():
    table = rows(5, 8, seed=3)
    assert_same(
        lambda x: lax.scan(lambda c, r: (c + jnp.asarray(table)[1] * r, c), x[0], x)[1],
        (rows(40, 8),),
        2_000,
    )


@pytest.mark.parametrize("length", [100, 1_000, 10_000])
def test_the_graph_does_not_grow_with_the_trips(length):
    function = jax.grad(lambda x: jnp.sum(recurrence(x)[1] ** 2))
    for piece_bytes in (ALL, 2_000, 0):
        captured, _ = capture(function, rows(length, 8), piece_bytes=piece_bytes)
        assert len(captured.taskgraph.vertices) <= 6 * 33
        assert len(captured.kernels) <= 64


def test_layers_are_steps_of_their_own_whatever_the_limit():
    weights = rows(3, 512, 512)  # 1 MiB each
    function = jax.grad(lambda w, x: lax.scan(lambda h, m: (jnp.tanh(h @ m), None), x, w)[0].sum())
    captured = assert_same(function, (weights, rows(4, 512)), ALL, rtol=1e-4, max_equations=1)
    assert scans_in(captured) == []
    sizes = {t.bytes for t in captured.taskgraph.tensors if t.argument and t.argument.index == 0}
    assert sizes == {512 * 512 * 4}


def test_work_makes_a_layer_too():
    x = jnp.zeros((256, 1024))
    m = jax.ShapeDtypeStruct((1024, 1024), np.float32)
    # The mean keeps rows together.
    body = lambda h, _: (jnp.tanh(h @ m_ @ m_) - h.mean(), None)  # noqa: E731

    def function(x, w):
        nonlocal m_
        m_ = w
        return lax.scan(body, x, None, length=5)[0]

    m_ = None
    program = unroll(jax.make_jaxpr(function)(x, m), rates=SMALL_SERVER)
    assert len(program.parents) == 1 + 5


def motion(x, operations=180):
    """Steps of hundreds of small operations, as a robot's joints take; gradients need all."""

    def step(x, _):
        for _ in range(operations):
            x = jnp.sin(x) + x * 0.5
        return x, x.mean()

    return jnp.sum(lax.scan(step, x, None, length=4)[1])


@pytest.mark.parametrize("budget, lengths", [(ALL, {4}), (5 * 2**19, {2})])
def test_steps_of_small_operations_stay_in_a_loop_where_that_has_room(budget, lengths):
    """What each hands to the gradient is as much as a layer's, 1.1 MiB, but in arrays of 6 KiB:
    a vertex of them would have less to do than it costs."""
    captured = assert_same(jax.grad(motion), (rows(48, 32),), budget, rtol=1e-5)
    assert set(scans_in(captured)) == lengths


@pytest.mark.parametrize(
    "operations, shape, budget, rates",
    [(180, (48, 32), 0, SMALL_SERVER), (80, (64, 64), ALL, SMALL_SERVER),
     (180, (48, 32), ALL, H200)],
    ids=["where the least memory is wanted", "where they are few", "on a GPU"],
)  # fmt: skip
def test_they_are_steps_of_their_own(operations, shape, budget, rates):
    function = functools.partial(motion, operations=operations)
    program = unroll(jax.make_jaxpr(jax.grad(function))(rows(*shape)), budget, rates=rates)
    assert len(program.parents) == 1 + 4 + 4 and not program.has_loops


def newton(a):
    return lax.fori_loop(0, 9, lambda _, x: (x + a / x) / 2, jnp.ones_like(a))


def by_layers(x, w):
    return lax.fori_loop(0, 5, lambda i, h: jnp.tanh(h @ w[i]), x)


def at_length(a):
    """More operations than each tile's part of them would be worth."""

    def step(_, x):
        for _ in range(400):
            x = (x + a / x) / 2
        return x

    return lax.fori_loop(0, 5, step, jnp.ones_like(a))


def attending(x):
    """Makes a row of scores for each of many short rows."""

    def step(_, x):
        scores = jnp.einsum("bqd,bkd->bqk", x, x)
        return jnp.einsum("bqk,bkd->bqd", jnp.tanh(scores), x)

    return lax.fori_loop(0, 5, step, x)


@pytest.mark.parametrize(
    "function, shapes, steps",
    [(newton, [(256, 512)], 0), (at_length, [(256, 512)], 5), (attending, [(2, 512, 16)], 5),
     (by_layers, [(16, 64), (5, 64, 64)], 5), (by_layers, [(1024, 64), (5, 64, 64)], 0)],
    ids=["elements", "many operations", "large within", "large layers", "small layers"],
)  # fmt: skip
def test_steps_that_map_over_an_array_stay_together(function, shapes, steps):
    """They are split along it; not where each reads a layer of its own out of a larger stack."""
    jaxpr = jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes))
    program = unroll(jaxpr, 0, rates=SMALL_SERVER)
    assert len(program.parents) == 1 + steps


def test_iterations_over_elements_need_an_array_and_a_tile():
    x = rows(512, 1024) ** 2 + 1
    step = jo.offload(lambda x: newton(x).sum(), device_memory=x.nbytes + x.nbytes // 8)
    want = np.sqrt(np.asarray(x, np.float64)).sum()
    assert abs(float(step(x)) / want - 1) < 1e-6
    assert step.last_run.peak_device_bytes <= x.nbytes + x.nbytes // 8


def test_a_nested_scan_stays_a_loop_where_its_layer_is_a_vertex():
    def function(w, x):
        def layer(h, m):
            inner = lax.scan(lambda c, r: (jnp.tanh(c * 0.5 + r), c), h[0], h)[1]
            return jnp.tanh(inner @ m), None

        return lax.scan(layer, x, w)[0]

    captured = assert_same(function, (rows(3, 512, 512) / 23, rows(16, 512)), ALL, rtol=1e-5)
    assert scans_in(captured) == [16] * 3


def attention_by_blocks(q, k, v):
    """Of each block of queries a scan over blocks of keys, its largest score carried along."""

    def of_queries(q):
        def step(carry, block):
            total, largest, weight = carry
            scores = q @ block[0].T
            now = jnp.maximum(largest, scores.max(1))
            each, before = jnp.exp(scores - now[:, None]), jnp.exp(largest - now)
            total = total * before[:, None] + each @ block[1]
            return (total, now, weight * before + each.sum(1)), None

        start = jnp.zeros_like(q), jnp.full(len(q), -jnp.inf), jnp.zeros(len(q))
        (total, _, weight), _ = lax.scan(step, start, (k, v))
        return total / weight[:, None]

    return jnp.sum(lax.map(of_queries, q) ** 2)


def test_what_scans_within_scans_stack_is_read_piece_by_piece():
    """Slices of slices: no array of all that an inner scan stacks is put together for them."""
    args = [jnp.asarray(rows(4, 256, 64)) for _ in range(3)]
    gradient = jax.grad(attention_by_blocks, (0, 1, 2))
    captured = assert_same(gradient, tuple(args), 100_000, rtol=1e-4)
    assert not scans_in(captured)
    names = [s.operation.name for k in captured.kernels for s in k.steps]
    assert names.count("stack") == 0


def test_scans_that_meet_agree_on_their_pieces():
    def function(x, y):  # the second has much larger rows
        first = lax.scan(lambda c, r: (c + r, c * r), x[0], x)[1]
        second = lax.scan(lambda c, r: (c + r[0].sum(), c * r[1][0]), x[0], (y, first * 2.0))[1]
        return second + first

    captured = assert_same(function, (rows(64, 8), rows(64, 40, 8)), 16_000)
    lengths = scans_in(captured)
    assert lengths == [11, 11, 11, 11, 11, 9] * 2
    names = {s.operation.name for k in captured.kernels for s in k.steps}
    assert "join" not in names and not any(name.startswith("slice[") for name in names)


@pytest.mark.parametrize("layers, width", [(6, 1024), (6, 64), (2, 1024)])
def test_layers_read_slices_of_what_is_computed_by_one_executable(layers, width):
    def function(h, x, w):
        def layer(h, both):
            row, m = both
            return jnp.tanh(h @ m + row.mean()), None

        # Not piece by piece: each row takes those before it.
        return lax.scan(layer, h, (lax.cumsum(x, 0), w))[0]

    args = rows(16, 512), rows(layers, width), rows(layers, 512, 512) / 23
    captured = assert_same(function, args, ALL, rtol=1e-5)
    of_each = [{step.operation.name for step in kernel.steps} for kernel in captured.kernels]
    slices = {name for names in of_each for name in names if name.startswith("slice[")}
    are_shared = layers > 2 and width > 64  # else a scalar that says which takes as much
    assert slices == ({"slice[1 rows]"} if are_shared else {f"slice[{i}]" for i in range(layers)})
    assert not are_shared or sum(bool(names & slices) for names in of_each) == 1


@pytest.mark.parametrize("piece_bytes", [600, 0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_over_pieces_are_rounded_once(dtype, piece_bytes):
    def function(x):
        return lax.reduce_sum(lax.scan(lambda c, r: (c, -r), 0.0, x)[1], (0,))

    x = (1 + 0.1 * rows(1000, 8)).astype(dtype)
    captured, arrays = capture(function, x, piece_bytes=piece_bytes)
    assert len(captured.taskgraph.vertices) > 8
    found = interpret_taskgraph(captured, arrays)[0].view(x.dtype).astype(np.float64)
    want = -np.asarray(x).astype(np.float64).sum(axis=0)
    assert (np.abs(found - want) <= 0.51 * float(jnp.finfo(dtype).eps) * np.abs(want)).all()


@st.composite
def scans(draw):
    """(function, args): a scan of drawn length and direction over drawn consts, carries, xs, ys.

    A step brings two states nearer to one another: else fifty would carry a bfloat16's rounding
    anywhere. For the same reason none of those is made an integer.
    """
    length = draw(st.integers(1, 50))
    num = {k: draw(st.integers(0, 3)) for k in ("consts", "carry", "xs", "ys")}
    dtypes = st.sampled_from([np.float32, draw(st.sampled_from([jnp.bfloat16, np.int32]))])
    avals = {
        kind: [((draw(st.integers(1, 5)),), draw(dtypes)) for _ in range(count)]
        for kind, count in num.items()
    }
    weights = draw(st.lists(st.integers(-3, 3), min_size=4, max_size=4))
    reverse, unrolled = draw(st.booleans()), draw(st.sampled_from([1, 1, 3]))
    after = draw(st.sampled_from(["nothing", "rows", "sum", "again"]))
    written = draw(st.lists(st.sampled_from([0.0, 1.5, 3]), max_size=2))

    def mixed(values, shape, dtype):
        total = jnp.zeros(shape, np.float32)
        for weight, value in zip(weights, values, strict=False):
            total = total + weight * jnp.mean(value.astype(np.float32))
        return (jnp.tanh(total / 48) * (30 if dtype == np.int32 else 3)).astype(dtype)

    def function(consts, carry, xs):
        def body(c, x):
            seen = [*c, *(x or ()), *consts]
            new = [mixed(seen[i:] + seen[:i], *aval) for i, aval in enumerate(avals["carry"])]
            new = [n + (old / 4).astype(old.dtype) for n, old in zip(new, c, strict=True)]
            return new, ([mixed(seen[::-1], *aval) for aval in avals["ys"]], written)

        options = {"length": length, "reverse": reverse, "unroll": unrolled}
        carry, (ys, same) = lax.scan(body, carry, xs or None, **options)
        if after == "rows":
            ys = [y * 2 for y in ys]
        if after == "sum":
            ys = [y.astype(np.float32).sum(0) for y in ys]
        if after == "again" and ys:
            carry, more = lax.scan(
                lambda c, y: (c, y[0] + y[0]), carry, ys, reverse=not reverse, length=length
            )
            ys = [more]
        return carry, ys, same

    def made(kind, lead=()):
        return [
            (rows(*lead, *shape, seed=i) * 4).astype(dtype)
            for i, (shape, dtype) in enumerate(avals[kind])
        ]

    return function, (made("consts"), made("carry"), made("xs", (length,)))


@hypothesis.settings(max_examples=30, deadline=None,
                     suppress_health_check=list(hypothesis.HealthCheck))  # fmt: skip
@hypothesis.given(program=scans(), piece_bytes=st.sampled_from([0, 1, 60, 250, 1000, ALL]),
                  max_equations=st.sampled_from([1, 12]))  # fmt: skip
def test_any_scan_in_any_pieces(program, piece_bytes, max_equations):
    function, args = program
    if jax.tree.leaves(jax.eval_shape(function, *args)):
        tolerance = 1e-2  # a bfloat16's rounding, carried on
        assert_same(function, args, piece_bytes, rtol=tolerance, max_equations=max_equations)


PARTS = {
    "iterated": lambda w: [2 * a for a in w],
    "indexed": lambda w: [2 * w[0], 2 * w[-1], 2 * w[1, 2], 2 * w[1, 1:3], 2 * w[1:3]],
    "unstacked": lambda w: [2 * a for a in jnp.unstack(w)],
    "split": lambda w: [2 * a for a in jnp.split(w, [1, 3])],
}
NO_PARTS = {
    "columns": lambda w: [2 * w[:, 1], 2 * w[:, :, 1:3]],
    "every second": lambda w: [2 * w[::2]],
    "computed": lambda w: [2 * a for a in jnp.unstack(jnp.cumsum(w, 0))],
    "split along another axis": lambda w: [2 * a for a in jnp.split(w, 2, axis=1)],
}


def moves_of(function, array):
    """The operations but products of a function of one array, its values checked."""
    captured, arrays = capture(function, array, max_equations=1)
    got = interpret_taskgraph(captured, arrays)
    for a, b in zip(got, jax.tree.leaves(jax.jit(function)(array)), strict=True):
        np.testing.assert_array_equal(a.view(b.dtype).reshape(b.shape), b)
    ordered = build.order_program(unroll(jax.make_jaxpr(function)(array), rates=SMALL_SERVER))
    return {e.operation.name for e in ordered.equations} - {"mul", "squeeze", "reshape"}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_an_argument_are_read_where_they_are(name):
    """A model that loops over its stacked weights in Python needs one layer of them at a time."""
    assert not moves_of(PARTS[name], rows(4, 6, 8))


@pytest.mark.parametrize("name", NO_PARTS)
def test_other_parts_are_computed(name):
    assert moves_of(NO_PARTS[name], rows(4, 6, 8))


def test_data_is_moved_in_operations_that_every_jax_knows():
    """`stack`, `unstack` and `tile` are primitives of jax 0.12, and cut like others."""

    def function(x):
        together = jnp.tile(jnp.stack([x[0], 2 * x[1], x[2] + 1], axis=1), (2, 1, 3))
        return [together, *(jnp.cos(a) for a in jnp.unstack(together, axis=1))]

    assert not moves_of(function, rows(4, 6, 8)) & {"stack", "unstack", "tile"}

"""Splitting: every rule computes what the whole operation does, tile by tile; groups too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse

import jaxoffload as jo
from benchmarks import suite
from jaxoffload.capture import cost, operations
from jaxoffload.capture.along_loops import MappedScan, as_mapped
from jaxoffload.capture.build import build_taskgraph, order_program
from jaxoffload.capture.flat import is_literal
from jaxoffload.capture.operations import tilings, working_set
from jaxoffload.capture.scan import unroll
from jaxoffload.capture.split import split
from jaxoffload.capture.tiled import TiledOperation
from jaxoffload.finetune import model
from jaxoffload.graphs.taskgraph import TaskGraph, TensorKind
from jaxoffload.plan.alloc.limits import min_budget
from jaxoffload.plan.cost.machines import SMALL_SERVER
from jaxoffload.transform.verification import max_relative_difference
from tests.helpers import interpret_taskgraph

RANDOM = np.random.default_rng(0)


def normal(*shape):
    return RANDOM.normal(size=shape).astype(np.float32)


def convolution(x, w):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


def newton(a):
    """Square roots."""
    return lax.fori_loop(0, 5, lambda _, x: (x + a / x) / 2, jnp.ones_like(a))


def recurrence(x, w, h, reverse=False):
    def step(h, x):
        h = jnp.tanh(h + x @ w)
        return h, (h[:, :3], x)

    return lax.scan(step, h, x, reverse=reverse)


def numbered(x):
    """Steps that know their number, and an array that is not cut."""
    plan = lax.fori_loop(0, 3, lambda i, c: (c[0] + i * c[1], c[1] * 2), (x, jnp.ones(())))
    return plan[0]


def means(x):
    """Of each step, joined from all parts; one that is negative, and one after a product."""

    def step(y, _):
        y = jnp.sin(y * 1.3) + x
        return y, (-y.mean(), jnp.max(y), 2 * jnp.sum(y * y, axis=(0, 2)).reshape(2, 3))

    return lax.scan(step, x, None, length=4)


def pairs(x):
    """Two halves of the first dimension can be told apart, its quarters cannot."""

    def step(_, y):
        y = y.reshape(2, 2, 6, 8)
        return jnp.sin(y + lax.broadcasted_iota(y.dtype, y.shape, 0)).reshape(4, 6, 8)

    return lax.fori_loop(0, 3, step, x)


def both(x):
    """Reads parts of what an inner loop carries, and the whole of its means."""

    def step(_, y):
        z, means = lax.scan(lambda z, _: (z * 0.5, z.mean()), jnp.ones_like(x), None, length=2)
        return jnp.sin(y) + z * means.sum()

    return lax.fori_loop(0, 3, step, x)


def walk(seed, width):
    """The mean of some random walks at each step, and of their ends."""

    def step(x, key):
        x = x + jax.random.normal(key, x.shape)
        return x, jnp.mean(x * x)

    keys = jax.random.split(jax.random.key(seed), 5)
    x, means = lax.scan(step, jnp.zeros((width, 64)), keys)
    return jnp.mean(jnp.exp(0.1 * x)), means


def dropout(w, x, seed):
    h = jax.nn.relu(x @ w)
    h = jnp.where(jax.random.bernoulli(jax.random.key(seed), 0.9, h.shape), h / 0.9, 0)
    return jnp.sum((h @ w.T) ** 2)


def repeated(x):
    """What is repeated along a dimension passes through a new one before all others."""
    return lax.fori_loop(0, 3, lambda _, y: jnp.tile(jnp.sin(y), (1, 1, 2))[..., ::2], x)


X, Y, W = normal(4, 6, 8), normal(4, 6, 8), normal(4, 8, 12)
IDS = RANDOM.integers(0, 8, (4, 6, 1)).astype(np.int32)
SEED = np.uint32(7)
OPERATIONS = {
    "add": (jnp.add, X, Y),
    "scalar": (lambda x: x * 2.0, X),
    "select": (lambda x, y: lax.select(x > y, x, y), X, Y),
    "size one": (lambda x, y: x - y, X, X[:, :, :1]),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (4, 6, 8, 2), (0, 1, 2)), X),
    "broadcast scalar": (lambda x: lax.broadcast_in_dim(x, (4, 6), ()), np.float32(3)),
    "iota": (lambda: lax.broadcasted_iota(np.int32, (4, 6, 8), 1),),
    "merge": (lambda x: x.reshape(4, 48), X),
    "cut": (lambda x: x.reshape(2, 2, 6, 4, 2), X),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), X[:, :1]),
    "transpose": (lambda x: x.transpose(2, 0, 1), X),
    "sum": (lambda x: lax.reduce_sum_p.bind(x, axes=(1, 2), out_sharding=None), X),
    "max": (lambda x: jnp.max(x, axis=2), X),
    "min": (lambda x: jnp.min(x, axis=0), X),
    "argmax": (lambda x: lax.argmax(x, 2, np.int32), X),
    "batched product": (lambda x, w: jnp.einsum("btc,bcd->btd", x, w), X, W),
    "product": (lambda x, w: x @ w, X, W[0]),
    "outer": (lambda x, y: jnp.einsum("btc,bsc->bts", x, y), X, Y),
    "convolution": (convolution, normal(4, 6, 6, 8), normal(3, 3, 8, 4)),
    "convolution, backward": (
        lambda x, w: jax.vjp(convolution, x, w)[1](x[..., :4]),
        normal(4, 6, 6, 8),
        normal(3, 3, 8, 4),
    ),
    "sort": (lambda x, y: lax.sort((x, y), dimension=1), X, Y),
    "largest": (lambda x: lax.top_k(x, 3), X),
    "split": (lambda x: lax.split(x, (3, 5), axis=2), X),
    "concatenate": (lambda x, y: jnp.concatenate([x, y], axis=1), X, Y),
    "slice": (lambda x: x[:, 1:3], X),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 0))), X),
    "reverse": (lambda x: x[:, ::-1], X),
    "transform": (lambda x: lax.fft(x, lax.FftType.RFFT, (6, 8)), X),
    "transform back": (lambda x: lax.fft(x + 1j, lax.FftType.IRFFT, (8,)), X[:, :, :5]),
    "running sum": (lambda x: jnp.cumsum(x, axis=2), X),
    "rows": (lambda x, i: x[i[:, :, 0]], normal(8, 12), IDS),
    "add to rows": (lambda x, y, i: x.at[i[..., 0]].add(y), normal(8, 12), normal(4, 6, 12), IDS),
    "take from rows": (lambda x, y, i: x.at[i[..., 0]].subtract(y), normal(8, 12), normal(4, 6, 12),
                       IDS),
    "add to windows": (
        lambda x, y: lax.scatter_add(
            x, np.array([[1], [3]]), y, lax.ScatterDimensionNumbers((1, 2), (), (0,))
        ),
        normal(8, 12),
        normal(2, 4, 12),
    ),
    "Newton's steps": (newton, np.abs(X) + 1),
    "recurrence": (recurrence, normal(5, 6, 8), normal(8, 4), normal(6, 4)),
    "recurrence, reversed": (functools.partial(recurrence, reverse=True), normal(5, 6, 8),
                             normal(8, 4), normal(6, 4)),
    "numbered steps": (numbered, X),
    "steps in steps": (lambda x: lax.fori_loop(0, 2, lambda _, y: newton(y * y + 1) + x, x), X),
    "steps that repeat": (repeated, X),
    "means of steps": (means, X),
    "steps in pairs": (pairs, X),
    "parts and means of a loop": (both, X),
    "bits": (lambda seed: jax.random.bits(jax.random.key(seed), (4, 6, 3)), SEED),
    "bits of a byte": (lambda seed: jax.random.bits(jax.random.key(seed), (4, 6), "uint8"), SEED),
    "bits of keys": (
        lambda seed: jax.vmap(lambda key: jax.random.bits(key, (6, 2)))(
            jax.random.split(jax.random.key(seed), 4)
        ),
        SEED,
    ),
    "search": (lambda x: jnp.searchsorted(jnp.linspace(-2, 2, 9), x), X),
    "pick": (lambda x, i: jnp.take_along_axis(x, i, axis=2, mode="clip"), X, IDS),
}  # fmt: skip


def equations_of(function, *args):
    program = unroll(jax.make_jaxpr(function)(*args), rates=SMALL_SERVER)
    return program, order_program(program)


def part(x, dim, number, count):
    if dim is None:
        return x
    size = x.shape[dim] // count
    return lax.dynamic_slice_in_dim(x, number * size, size, dim)


@pytest.mark.drawn(11)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_tiling_computes_the_operation_tile_by_tile(name):
    """Every equation of the function, by every tiling that is known of it."""
    function, *args = OPERATIONS[name]
    program, ordered = equations_of(function, *args)
    values = dict(zip(program.arguments, args, strict=False))
    for v in program.arguments[len(args) :]:
        values[v] = v.array
    checked = 0
    for equation in ordered.equations:
        read = [x.val if is_literal(x) else values[x] for x in equation.inputs]
        whole = equation.operation.apply(read)
        for count in (2, 3, 4):
            for tiling in tilings(equation, count):
                checked += 1
                tiles = []
                for number in range(count):
                    pairs = zip(read, tiling.inputs, strict=True)
                    mine = [part(x, d, number, count) for x, d in pairs]
                    if tiling.folds is not None and tiles:
                        mine[tiling.folds] = tiles[-1][0]
                    tiles.append(tiling.apply(equation, mine, number, count))
                for i, dim in enumerate(tiling.outputs):
                    want, parts = np.asarray(whole[i]), [t[i] for t in tiles]
                    join = tiling.of_output(i).combine
                    if join is None:
                        got = np.concatenate([np.asarray(p) for p in parts], axis=dim)
                        assert got.dtype == want.dtype
                    else:
                        got = functools.reduce(join, parts)
                    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        values.update(zip(equation.outputs, whole, strict=True))
    assert checked


def attention(q, k, v):
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1]).astype(np.float32)
    mask = jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])[None, :]
    scores = jnp.where(mask[None, None], scores, -1e30)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)


def vocabulary_loss(x, w, targets):
    logits = x @ w
    total = jax.nn.logsumexp(logits, axis=-1)
    return jnp.mean(total - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0])


def places(x):
    """Each step adds where a row is."""
    at = lambda: lax.broadcasted_iota(jnp.float32, x.shape, 0)  # noqa: E731
    return lax.fori_loop(0, 3, lambda _, y: jnp.sin(y + at()), x)


def test_steps_may_repeat_what_is_in_a_row():
    _, ordered = equations_of(repeated, X)
    (loop,) = (e for e in ordered.equations if e.operation.name == "scan")
    assert tilings(loop, 2)


def flattened(x):
    return lax.fori_loop(0, 3, lambda _, y: jnp.sin(y.reshape(-1)).reshape(y.shape), x)


@pytest.mark.parametrize(
    "function, works", [(newton, True), (flattened, False), (places, False)],
    ids=["elements", "rows in a line", "rows by their number"],
)  # fmt: skip
def test_pieces_are_of_any_rows_where_steps_keep_to_each_and_know_no_number(function, works):
    _, ordered = equations_of(function, X)
    (loop,) = (e for e in ordered.equations if e.operation.name == "scan")
    made = as_mapped(loop, operations.ways, loop.outputs[-1:].__contains__)
    assert isinstance(made.operation, MappedScan) == works
    assert tilings(loop, 2)  # tiles are equal, and numbered


@pytest.mark.parametrize(
    "square", [lambda m: m * m, lambda m: m / m, lambda m: 1 / m, lambda m: m + 1, jnp.tanh],
    ids=["product", "quotient", "inverse", "sum", "function"],
)  # fmt: skip
def test_what_is_not_linear_in_a_sum_keeps_a_loop_whole(square):
    def function(x):
        return lax.scan(lambda y, _: (jnp.sin(y), square(y.mean())), x, None, length=3)

    _, ordered = equations_of(function, X)
    (loop,) = (e for e in ordered.equations if e.operation.name == "scan")
    assert not operations.ways(loop)


def messages(x, ends, w):
    sent = jax.nn.relu(x[ends[0]] @ w)
    return x + jnp.zeros_like(x).at[ends[1]].add(sent)


UNET, UNET_SHAPES, _ = suite.unet(size=16, width=4, depth=2, batch=8)
UNET_LEAVES, UNET_TREE = jax.tree.flatten(UNET_SHAPES)


def unet(*leaves):
    return UNET(*jax.tree.unflatten(UNET_TREE, leaves))


def square_sum(f):
    return lambda *a: jnp.sum(f(*a) ** 2)


QKV = [normal(2, 64, 4, 8) for _ in range(3)]
LOSS = (normal(2, 64, 16), normal(16, 500), RANDOM.integers(0, 500, (2, 64)).astype(np.int32))
EDGES = RANDOM.integers(0, 40, (2, 1024)).astype(np.int32)
FACTORS = (normal(64, 8), normal(8, 512))
HALF = [x.astype(jnp.bfloat16) for x in QKV]
FUNCTIONS = {
    "attention": (attention, *QKV),
    "attention, backward": (jax.grad(square_sum(attention), argnums=(0, 1, 2)), *QKV),
    "attention, bfloat16": (jax.grad(square_sum(attention), argnums=(0, 1, 2)), *HALF),
    "loss": (vocabulary_loss, *LOSS),
    "loss, backward": (jax.value_and_grad(vocabulary_loss, argnums=(0, 1)), *LOSS),
    "normalized": (lambda x: (x - x.mean(1, keepdims=True)) / x.std(), normal(64, 512)),
    "U-Net, backward": (unet, *[0.1 * normal(*x.shape) for x in UNET_LEAVES]),
    "messages": (messages, normal(40, 16), EDGES, normal(16, 16)),
    "messages, backward": (
        jax.grad(square_sum(messages), argnums=(0, 2)), normal(40, 16), EDGES, normal(16, 16),
    ),
    "Newton's steps": (lambda x, y: newton(jnp.exp(x @ y)).sum(1), *FACTORS),
    "random walks": (functools.partial(walk, width=128), SEED),
    "dropout, backward": (jax.grad(dropout), normal(8, 512), normal(64, 8), SEED),
    "histograms": (
        lambda x, y: jax.vmap(lambda z: jnp.histogram(z, 8, range=(-2, 2))[0])(jnp.sin(x @ y)),
        *FACTORS,
    ),
    # A result that started from zeros, in place of the first tile, would be zero.
    "largest of negative": (lambda x, y: jnp.max(-1 - jnp.exp(x @ y)), *FACTORS),
    "least of positive": (lambda x, y: jnp.min(1 + jnp.exp(x @ y)), *FACTORS),
    "product of signs": (lambda x, y: jnp.prod(jnp.sign(x @ y)), *FACTORS),
    "all": (lambda x, y: jnp.all(jnp.exp(x @ y) > 0), *FACTORS),
    "large result": (lambda x, y: jnp.exp(x @ y), normal(64, 8), normal(8, 512)),
}  # fmt: skip


@pytest.mark.drawn(12)
@pytest.mark.parametrize("share", [0.5, 0.1, 0.02])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_split_functions_give_what_whole_ones_do(name, share):
    function, *args = FUNCTIONS[name]
    want = jax.tree.leaves(jax.jit(function)(*args))
    program, ordered = equations_of(lambda *a: jax.tree.leaves(function(*a)), *args)
    arrays = [*args, *(v.array for v in program.arguments[len(args) :])]
    kinds = [TensorKind.WEIGHT] * len(arrays)
    before = min_budget(build_taskgraph(ordered, kinds=kinds, max_equations=1).taskgraph)[0]
    parts = split(ordered, share * before)
    captured = build_taskgraph(parts, kinds=kinds, max_equations=1)
    captured.taskgraph.check()
    after = min_budget(captured.taskgraph)[0]
    assert after <= before
    got = interpret_taskgraph(captured, arrays)
    limit = 0.05 if "bfloat16" in name else 1e-5
    for w, g in zip(want, got, strict=True):
        w = np.asarray(w)
        assert max_relative_difference(w, g.view(w.dtype).reshape(w.shape)) < limit
    tiled = [e for e in parts.equations if isinstance(e.operation, TiledOperation)]
    if name != "normalized":  # Not every equation of a gradient has a line; of a group some have.
        assert all(".py:" in e.operation.source for e in tiled)
    if name not in ("large result", "normalized"):  # operands and results alone take as much
        most = 0.7 if name == "U-Net, backward" else 0.5  # results of convolutions are there whole
        assert tiled and after < most * before or share == 0.5


def tile_by_tile(function, *args, share):
    """The only result of a function whose equations are split, and the greatest number of tiles."""
    program, ordered = equations_of(function, *args)
    kinds = [TensorKind.WEIGHT] * len(args)
    before = min_budget(build_taskgraph(ordered, kinds=kinds, max_equations=1).taskgraph)[0]
    parts = split(ordered, share * before)
    tiles = [e.operation.count for e in parts.equations if isinstance(e.operation, TiledOperation)]
    captured = build_taskgraph(parts, kinds=kinds, max_equations=1)
    (got,) = interpret_taskgraph(captured, args)
    return got, max(tiles)


def test_convolutions_are_cut_along_images_rather_than_features():
    """Each tile of few features gathers all images again, once for each place of its kernel."""
    function, *args = FUNCTIONS["U-Net, backward"]
    _, ordered = equations_of(lambda *a: jax.tree.leaves(function(*a)), *args)
    largest = max(map(working_set, ordered.equations))
    tiled = [e for e in split(ordered, largest / 2).equations if _is_tiled(e)]
    convolutions = [e for e in tiled if "conv_general_dilated" in e.operation.name]
    assert len(convolutions) >= 4 and not any(e.operation.reread_bytes for e in tiled)


def test_what_each_tile_reads_again_is_part_of_the_work():
    x, kernel = normal(1, 8, 8, 4), normal(3, 3, 4, 16)  # one image: there is no other way
    _, ordered = equations_of(lambda x, k: jnp.exp(_convolution(x, k)).sum((0, 1, 2)), x, kernel)
    largest = max(map(working_set, ordered.equations))
    parts = split(ordered, largest / 16)
    (tiled,) = (e for e in parts.equations if _is_tiled(e))
    patches = 8 * 8 * 3 * 3 * 4 * 4
    assert tiled.operation.reread_bytes == (tiled.operation.count - 1) * patches > 0
    read = x.nbytes + kernel.nbytes + 16 * 4
    assert cost.traffic(tiled) == read + tiled.operation.reread_bytes
    kinds = [TensorKind.WEIGHT] * 2
    graph = build_taskgraph(parts, kinds=kinds, max_equations=1).taskgraph
    made = 2 * 4 * 8 * 8 * 16 / 2  # what the convolution makes is read again, from a cache
    steps = tiled.operation.count * len(tiled.operation.equations) * cost.BYTES_OF_A_STEP
    assert max(v.traffic for v in graph.vertices) == cost.traffic(tiled) + made + steps


def _is_tiled(equation):
    return isinstance(equation.operation, TiledOperation)


def _convolution(x, kernel):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float32])
@pytest.mark.parametrize("name", ["sum", "product"])
def test_many_tiles_add_up_to_a_rounding(name, dtype):
    """All of one sign and of an awkward scale: each rounding of a running sum would be seen."""
    x = (0.1 + 0.01 * RANDOM.random(4096)).astype(dtype)
    y = (0.1 + 0.01 * RANDOM.random(8)).astype(dtype)

    def f(x, y):
        z = x[:, None] * y[None, :]
        return lax.reduce_sum(z, (0,)) if name == "sum" else x @ jnp.tanh(z)

    got, tiles = tile_by_tile(f, x, y, share=0.02)
    assert tiles > 32
    x, y = np.float64(x), np.float64(y)
    z = x[:, None] * y[None, :]
    want = z.sum(0) if name == "sum" else x @ np.tanh(z)
    # One of the result, and those of the terms, which may lean one way.
    roundings = {"sum": 1, "product": 2}[name] if dtype == np.float32 else 3
    limit = roundings * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.float64(got.view(dtype)), want, rtol=limit)


def test_a_sum_over_many_tiles_may_be_infinite():
    x = np.ones(4096, np.float32)
    x[100] = np.inf
    got, tiles = tile_by_tile(
        lambda x, y: lax.reduce_sum(x[:, None] * y[None, :], (0,)),
        x,
        np.ones(8, np.float32),
        share=0.02,
    )
    assert tiles > 4 and np.isposinf(got.view(np.float32)).all()


def test_layers_share_the_kernel_of_their_split_parts():
    config = model.Config(64, 32, 3, 4, 4, 64)
    shapes = model.init_shapes(config), jax.ShapeDtypeStruct((1, 256), np.int32)
    flat, tree = jax.tree.flatten(shapes)
    program, ordered = equations_of(
        lambda *leaves: model.forward(config, *jax.tree.unflatten(tree, leaves)), *flat
    )
    parts = split(ordered, 300_000)
    keys = [e.operation.key for e in parts.equations if isinstance(e.operation, TiledOperation)]
    assert len(keys) >= 3 and len(set(keys)) <= len(keys) - 2


def test_a_gradient_by_a_kernel_is_split_for_what_it_copies():
    """Operands and result alone would be small enough."""

    def gradient(kernels, x, y):
        return jax.vjp(lambda kernels: convolution(x, kernels), kernels)[1](y)[0]

    x = normal(16, 16, 16, 8)
    _, ordered = equations_of(gradient, normal(3, 3, 8, 8), x, x)
    for share, is_split in ((4.2, False), (3, True)):  # times the operands' bytes
        equations = split(ordered, share * x.nbytes).equations
        assert any(isinstance(e.operation, TiledOperation) for e in equations) == is_split


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_attention_over_16k_tokens_needs_an_eighth_at_most(backward):
    """From shapes alone; plain attention, whose scores take 4 GiB."""
    shape = jax.ShapeDtypeStruct((1, 16384, 4, 32), np.float32)
    f = jax.grad(square_sum(attention), argnums=(0, 1, 2)) if backward else attention
    program, ordered = equations_of(lambda *a: jax.tree.leaves(f(*a)), shape, shape, shape)
    kinds = [TensorKind.WEIGHT] * len(program.arguments)

    def least(parts) -> int:
        graph: TaskGraph = build_taskgraph(parts, kinds=kinds, max_equations=1).taskgraph
        return min_budget(graph)[0]

    before = least(ordered)
    assert 8 * least(split(ordered, before / 16)) <= before


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
def test_a_budget_that_no_whole_operation_fits_works():
    q, k, v = (normal(1, 1024, 4, 16) for _ in range(3))
    f = jax.value_and_grad(square_sum(attention), argnums=(0, 1, 2))
    scores = 4 * 1024 * 1024 * 4
    want = jax.jit(f)(q, k, v)
    for policy in ("work-conserving", jo.policies.random(1, delays=1e-4)):
        step = jo.offload(f, device_memory=scores // 2, launch=policy, check=True)
        got = step(q, k, v)
        assert step.last_run.peak_device_bytes <= scores // 2
        for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            assert max_relative_difference(np.asarray(w), np.asarray(g)) < 1e-4
    plan = step.plan(q, k, v)
    plan.verify()
    assert any(vertex.name.startswith("tiled") for vertex in plan.taskgraph.vertices)
    assert plan.min_device_memory < scores // 2
    jo.offload(f, device_memory=plan.min_device_memory)(q, k, v)


def test_products_with_sparse_matrices_are_cut_along_their_entries():
    """What their values are multiplied with, a row for each entry, is never there whole."""
    entries, width = 8000, 32
    at = RANDOM.integers(0, 300, (entries, 2))
    rows = entries * width * 4

    def loss(values, x, w):
        matrix = sparse.BCOO((values, at), shape=(300, 300))
        return ((matrix @ jnp.tanh(matrix.T @ (x @ w))) ** 2).sum()

    step = jax.grad(loss, argnums=(0, 1, 2))
    operands = normal(entries), normal(300, width), normal(width, width)
    offloaded = jo.offload(step, device_memory=rows // 2)
    for want, got in zip(jax.jit(step)(*operands), offloaded(*operands), strict=True):
        # Either is within 1e-5 of the same in float64.
        assert max_relative_difference(np.asarray(want), np.asarray(got)) < 5e-5
    names = [v.name for v in offloaded.plan(*operands).taskgraph.vertices]
    assert any(name.startswith("tiled") for name in names)

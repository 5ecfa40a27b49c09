"""The table of operations: its names are JAX's, and what it says of them is so."""

import itertools

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.lax import linalg

import jaxoffload as jo
from jaxoffload.capture import operations
from jaxoffload.capture.build import order_program
from jaxoffload.capture.flat import is_literal
from jaxoffload.capture.mapped import map_over_stack
from jaxoffload.capture.scan import unroll
from jaxoffload.plan.cost.machines import SMALL_SERVER

OWN = {
    "collective", "start", "slice[", "columns[", "combine[", "read rows", "write rows",
    "write piece", "iota[", "random_bits[", "gather[", "scatter[", "stack", "cholesky[",
    "triangular_solve[", "transpose[", "dot_general["
}  # fmt: skip
UNLISTED = {
    "split", "scatter-sub", "random_wrap", "random_unwrap", "geqrf", "lu_pivots_to_permutation"
}  # fmt: skip
"""JAX's, though not among those that it shows."""
SINCE_JAX_0_12 = {"log2", "one_minus_square", "polynomial"}
ELEMENTWISE = [name for name, known in operations.TABLE.items() if known.is_elementwise]
ARGUMENTS = {
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "convert_element_type": lambda x: lax.convert_element_type(x, jnp.int32),
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 7),
    "acos": lambda x: lax.acos(x / 4),
    "asin": lambda x: lax.asin(x / 4),
    "atanh": lambda x: lax.atanh(x / 4),
    "erf_inv": lambda x: lax.erf_inv(0.9 * jnp.tanh(x)),
    "select_n": lambda x, y: lax.select_n(x > y, x, y),
    "real": lambda x: lax.real(lax.complex(x, x + 1)),
    "imag": lambda x: lax.imag(lax.complex(x, x + 1)),
    "conj": lambda x: lax.real(lax.conj(lax.complex(x, x + 1))),
    "bessel_i0e": lax.bessel_i0e,
    "bessel_i1e": lax.bessel_i1e,
    "complex": lambda x, y: jnp.abs(lax.complex(x, y)),
    "clz": lambda x: lax.clz(x.astype(jnp.int32)),
    "polynomial": lambda x: lax.polynomial(x, [1.0, x, 2.0, -0.5]),
    "polygamma": lambda x: lax.polygamma(jnp.ones_like(x), x),
    "regularized_incomplete_beta": lambda x, y: lax.betainc(x, y, x / 4),
    "eq_to": lambda x, y: jex.core.primitives.eq_to_p.bind(x, y),
    "le_to": lambda x, y: jex.core.primitives.le_to_p.bind(x, y),
    "lt_to": lambda x, y: jex.core.primitives.lt_to_p.bind(x, y),
    "add_any": lambda x, y: jax.vjp(lambda a: (a * y, a * x), x)[1]((x, y))[0],
}
LOGIC = {"and", "or", "xor", "not", "population_count", "shift_left", "shift_right_arithmetic",
         "shift_right_logical"}  # fmt: skip


def test_every_name_is_one_of_jaxs():
    """A name that is misspelt would be an entry for nothing."""
    known = {getattr(p, "name", None) for p in vars(jex.core.primitives).values()}
    later = SINCE_JAX_0_12 if jax.__version_info__ < (0, 12) else set()
    assert set(operations.TABLE) <= known | OWN | UNLISTED | later


def operands_of(name, count):
    source = np.random.default_rng(0)
    if name in LOGIC:
        return [source.integers(0, 31, (6, 4)).astype(np.int32) for _ in range(count)]
    return [source.uniform(1.1, 2, (6, 4)).astype(np.float32) for _ in range(count)]


def function_of(name):
    """A function of arrays that is this primitive, and how many it takes."""
    found = ARGUMENTS.get(name)
    found = found or getattr(lax, name, None) or getattr(lax, f"bitwise_{name}")
    for count in (1, 2, 3):
        try:
            jaxpr = jax.make_jaxpr(found)(*operands_of(name, count))
        except TypeError:
            continue
        assert name in str(jaxpr), jaxpr
        return found, count
    raise AssertionError(f"{name}: how is it called?")


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_operations_do_the_same_wherever_an_element_is(name):
    if name in SINCE_JAX_0_12 and not hasattr(lax, name):
        pytest.skip(f"jax {jax.__version__} has no {name}")
    function, count = function_of(name)
    operands = operands_of(name, count)
    want = np.asarray(function(*operands))
    assert want.shape == (6, 4)
    got = function(*(x[::-1, ::-1].copy() for x in operands))
    np.testing.assert_allclose(np.asarray(got)[::-1, ::-1], want, rtol=1e-6)
    changed = [x.copy() for x in operands]
    for x in changed:
        x[2, 3] += 1
    differs = np.asarray(function(*changed)) != want
    assert not np.delete(differs.ravel(), 2 * 4 + 3).any()


STACKED = {
    "add": lambda x, y: x + y,
    "scale": lambda x, y: 3.0 * x,
    "broadcast": lambda x, y: lax.broadcast_in_dim(y.sum(0), (6, 4), (1,)),
    "broadcast along": lambda x, y: lax.broadcast_in_dim(x, (6, 4, 5), (0, 1)),
    "sum of rows": lambda x, y: x.sum(1),
    "sum of all": lambda x, y: x.sum(0),
    "largest": lambda x, y: x.max((0, 1)),
    "reshape": lambda x, y: x.reshape(6, 2, 2),
    "transpose": lambda x, y: lax.transpose(x.reshape(6, 2, 2), (0, 2, 1)),
    "squeeze": lambda x, y: lax.squeeze(x.reshape(6, 4, 1), (2,)),
    "words": lambda x, y: lax.bitcast_convert_type(x, jnp.int32),
    "window": lambda x, y: lax.dynamic_slice(3.0 * x, (7, 1), (6, 2)),
    "written": lambda x, y: lax.dynamic_update_slice(3.0 * x, y[:, :2], (7, 1)),
    "bytes": lambda x, y: lax.bitcast_convert_type(x, jnp.uint8),
    "largest of windows": lambda x, y: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID", None, (1, 1)
    ),
    "sums of windows": lambda x, y: lax.reduce_window(
        x, 0.0, lax.add, (1, 2), (1, 1), ((0, 0), (1, 0)), (1, 2), (1, 1)
    ),
    "products of windows": lambda x, y: lax.reduce_window(
        x, 1.0, lambda a, b: a * b, (1, 3), (1, 1), "SAME"
    ),
    "scattered to the largest": lambda x, y: jax.grad(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID").sum()
    )(x),
}


@pytest.mark.parametrize("rows", [None, 1, 2, 3])
@pytest.mark.parametrize("name", STACKED)
def test_an_operation_works_on_a_stack_piece_by_piece(name, rows):
    x, y = operands_of("add", 2)
    program = unroll(jax.make_jaxpr(STACKED[name])(x, y), rates=SMALL_SERVER)
    values, checked = dict(zip(program.arguments, (x, y), strict=True)), 0
    for equation in order_program(program).equations:
        read = [v.val if is_literal(v) else values[v] for v in equation.inputs]
        (whole,) = equation.operation.apply(read)
        values[equation.outputs[0]] = whole
        mapped = map_over_stack(equation, 6, rows)
        if mapped is None:
            continue
        checked += 1
        got = in_pieces(mapped, read, rows)
        np.testing.assert_allclose(got, whole, rtol=1e-6)
    assert checked


def in_pieces(mapped, operands, rows):
    """The result of an operation that was applied to pieces of some rows, out of six."""
    pieces, several = [], []
    followed = mapped.followed
    if followed is not None and followed.backwards:
        return _backwards(mapped, operands, rows)
    for first in range(0, 6, rows or 1):
        part = first if rows is None else slice(first, first + rows)
        mine = [
            v if dim is None else v[(slice(None),) * dim + (part,)]
            for v, dim in zip(operands, mapped.inputs, strict=True)
        ]
        mine += [jnp.int32(first)] if mapped.is_placed else []
        if mapped.folds is not None and pieces:
            mine[mapped.folds] = pieces[-1]
        operation = mapped.operation
        if followed is not None and pieces:
            operation, mine = followed.next, [*mine, pieces[-1]]
        several += (made := operation.apply(mine) if operation else mine)
        pieces.append(made[0])
    if mapped.folds is not None:
        return pieces[-1]
    if mapped.merged is not None:
        made = [(v.shape, v.dtype) for v in mapped.merged.made(rows)]
        assert [(v.shape, v.dtype) for v in several] == len(pieces) * made
        return mapped.merged.join(len(pieces)).apply(several)[0]
    if mapped.combine is not None:
        return list(itertools.accumulate(pieces, mapped.combine))[-1]
    return np.stack(pieces) if rows is None else np.concatenate(pieces, mapped.dim)


def _backwards(mapped, operands, rows):
    """The same of an operation that begins with the last piece."""
    (x,), (dim,) = operands, mapped.inputs
    pieces = []
    for first in reversed(range(0, 6, rows)):
        part = x[(slice(None),) * dim + (slice(first, first + rows),)]
        operation = mapped.followed.next if pieces else mapped.operation
        pieces += operation.apply([part, *pieces[-1:]])
    return np.concatenate(pieces[::-1], mapped.dim)


IDS = np.array([[3], [0], [5], [3], [-1], [2]], np.int32)
ANYWHERE = {
    **{name: STACKED[name] for name in ("add", "broadcast", "sum of rows", "sum of all")},
    "turned": lambda x, y: 2.0 * (x @ y.T).T,
    "product": lambda x, y: (x + 1) @ (y.T * 2.0),
    "summed product": lambda x, y: x.T @ y,
    "running sums": lambda x, y: lax.cumsum(x, 0) + lax.cumsum(y, 0, reverse=True),
    "running products": lambda x, y: lax.cumprod(jnp.cos(x), 0).T + lax.cumprod(y.T, 1),
    "running extremes": lambda x, y: lax.cummax(x, 0) + lax.cummin(y, 0, reverse=True),
    "running logarithms": lambda x, y: lax.cumlogsumexp(x.T, 1, reverse=True) + y.T,
    "numbers": lambda x, y: lax.broadcasted_iota(jnp.int32, (5, 6), 1) * 2,
    "bits": lambda x, y: jax.random.normal(jax.random.key(3), (4, 6)) + x.T,
    "entries": lambda x, y: jnp.take_along_axis(x @ y.T, IDS, 1),
    "entries, filled": lambda x, y: jnp.take_along_axis(x @ y.T, 2 * IDS, 1, fill_value=7.0),
    "entries, the nearest": lambda x, y: jnp.take_along_axis(x @ y.T, 2 * IDS, 1, mode="clip"),
    "rows": lambda x, y: (2.0 * x)[IDS[:, 0]],
    "written entries": lambda x, y: (x @ y.T).at[jnp.arange(6), IDS[:, 0]].set(5.0),
    "added rows": lambda x, y: (2.0 * x).at[IDS[:, 0]].add(y),
    "largest": lambda x, y: lax.top_k(jnp.round(x @ y.T), 2)[1] + lax.top_k(x.T @ x, 2)[1][:1, :1],
    "place of the largest": lambda x, y: jnp.argmax(jnp.round(x), 0),
    "place of the first NaN": lambda x, y: jnp.argmin(jnp.where(jnp.round(x) > 1, x, jnp.nan), 0),
    "gradient by words": lambda x, y: jax.grad(lambda t: (t[IDS[:, 0]] * y).sum())(x),
}
"""Which may be cut along any dimension of six, and what they are cut along."""


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("name", ANYWHERE)
def test_an_operation_works_on_pieces_along_any_dimension(name, rows):
    """Of each operand and of the result; NaN where jit has it."""
    x, y = operands_of("add", 2)
    program = unroll(jax.make_jaxpr(ANYWHERE[name])(x, y), rates=SMALL_SERVER)
    values, checked = {v: v.array for v in program.arguments[2:]}, 0
    values.update(zip(program.arguments, (x, y), strict=False))
    for equation in order_program(program).equations:
        read = [v.val if is_literal(v) else values[v] for v in equation.inputs]
        whole, *_ = made = equation.operation.apply(read)
        values.update(zip(equation.outputs, made, strict=True))
        for value in (*equation.values(), *equation.outputs):
            for dim in (d for d, size in enumerate(value.shape) if size == 6):
                mapped = map_over_stack(equation, 6, rows, {value: dim})
                if mapped is None:
                    continue
                stacks = mapped.stacks(equation)
                assert (value, dim) in stacks or all(d == 0 for _, d in stacks)
                checked += (value, dim) in stacks
                got = in_pieces(mapped, read, rows)
                np.testing.assert_allclose(got, whole, rtol=1e-6, atol=1e-6)
    assert checked


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cumlogsumexp", "cummax"])
def test_running_sums_of_narrow_floats_are_not_handed_on(name):
    """From piece to piece they would be rounded."""
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        closed = jax.make_jaxpr(lambda x: getattr(lax, name)(x, 0))(jnp.ones((6, 2), dtype))
        (equation,) = unroll(closed, rates=SMALL_SERVER).equations
        is_cut = map_over_stack(equation, 6, 2, {equation.outputs[0]: 0}) is not None
        assert is_cut == (dtype == jnp.float32 or name == "cummax")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "uint8", "int8", "float32", "complex64"])
def test_numbers_are_counted_in_integers(dtype):
    """A first row is none of a narrow float's numbers, or more than a narrow integer can be."""
    closed = jax.make_jaxpr(lambda: lax.iota(jnp.dtype(dtype), 6011))()
    (equation,) = unroll(closed, rates=SMALL_SERVER).equations
    (whole,) = equation.operation.apply([])
    mapped = map_over_stack(equation, 6011, 2, {equation.outputs[0]: 0})
    for first in (0, 255, 2047, 4097, 6009):
        (part,) = mapped.operation.apply([jnp.int32(first)])
        np.testing.assert_array_equal(part, whole[first : first + 2])
    (way,) = operations.tilings(equation, 6011)
    (tile,) = way.apply(equation, [], 2047, 6011)
    np.testing.assert_array_equal(tile, whole[2047:2048])


def test_what_no_number_of_a_row_can_tell_is_not_in_pieces():
    """An int32 that is more is another row."""
    for length, is_cut in ((2**31 - 1, True), (2**31, False)):
        closed = jax.make_jaxpr(lambda: lax.iota(jnp.uint8, length))  # noqa: B023
        (equation,) = unroll(closed(), rates=SMALL_SERVER).equations
        at = {equation.outputs[0]: 0}
        assert (map_over_stack(equation, length, 2, at) is not None) == is_cut


SQUARES = np.random.default_rng(1).uniform(1, 2, (6, 2, 3, 3)).astype(np.float32)
SQUARES += SQUARES.swapaxes(-1, -2) + 4 * np.eye(3, dtype=np.float32)
MATRICES = {
    "cholesky": lambda x: jnp.linalg.cholesky(x, symmetrize_input=False),
    "eig": jnp.linalg.eig,
    "eigh": jnp.linalg.eigh,
    "geqrf": lambda x: jnp.linalg.qr(x, mode="raw"),
    "hessenberg": linalg.hessenberg,
    "householder_product": lambda x: linalg.householder_product(x, x[..., 0]),
    "lu": linalg.lu,
    "lu_pivots_to_permutation": lambda x: linalg.lu_pivots_to_permutation(
        x[..., 0].astype(jnp.int32) % 3, 5
    ),
    "qr": linalg.qr,
    "schur": linalg.schur,
    "svd": jnp.linalg.svd,
    "triangular_solve": lambda x: linalg.triangular_solve(x, x + 1, lower=True),
    "tridiagonal": linalg.tridiagonal,
    "tridiagonal_solve": lambda x: linalg.tridiagonal_solve(x[..., 0], x[..., 0] + 9, x[..., 0], x),
}


@pytest.mark.parametrize("name", MATRICES)
def test_what_is_done_with_matrices_is_done_with_parts_of_a_batch(name):
    program = unroll(jax.make_jaxpr(MATRICES[name])(SQUARES), rates=SMALL_SERVER)
    values, checked = dict(zip(program.arguments, [SQUARES], strict=True)), set()
    for equation in order_program(program).equations:
        read = [v.val if is_literal(v) else values[v] for v in equation.inputs]
        whole = equation.operation.apply(read)
        values.update(zip(equation.outputs, whole, strict=True))
        if equation.operation.name != name:
            continue
        ways = operations.tilings(equation, 2)
        assert {way.inputs[0] for way in ways} == {0, 1}, "all of the batch, nothing of a matrix"
        for way in ways:
            parts = [
                way.apply(equation, [
                    x if d is None else np.split(np.asarray(x), 2, axis=d)[part]
                    for x, d in zip(read, way.inputs, strict=True)
                ], part, 2)
                for part in range(2)
            ]  # fmt: skip
            for k, d in enumerate(way.outputs):
                got = np.concatenate([np.asarray(part[k]) for part in parts], axis=d)
                np.testing.assert_array_equal(got, whole[k])
                checked.add(k)
    assert checked


@pytest.mark.parametrize("left", [True, False])
def test_systems_are_solved_by_parts_of_their_right_hand_sides(left):
    """Of a matrix that is no batch."""
    matrix, sides = SQUARES[0, 0], operands_of("add", 1)[0][:, :3]
    sides = sides.T if left else sides

    def solve(a, b):
        return linalg.triangular_solve(a, b, left_side=left)

    program = unroll(jax.make_jaxpr(solve)(matrix, sides), rates=SMALL_SERVER)
    (equation,) = order_program(program).equations
    (way,) = operations.tilings(equation, 2)
    assert (way.inputs, way.outputs) == ((None, int(left)), (int(left),))
    parts = [
        way.apply(equation, [matrix, part], k, 2)[0]
        for k, part in enumerate(np.split(sides, 2, axis=int(left)))
    ]
    np.testing.assert_allclose(np.concatenate(parts, int(left)), solve(matrix, sides), rtol=1e-5)


@pytest.mark.parametrize("what", ["window", "stride", "padding", "dilation"])
def test_windows_that_reach_over_a_dimension_are_not_cut_along_it(what):
    x = np.random.default_rng(2).normal(size=(4, 4, 4)).astype(np.float32)

    def f(x):
        return lax.reduce_window(
            x, 0.0, lax.add,
            (1, 2 if what == "window" else 1, 2),
            (1, 2 if what == "stride" else 1, 2),
            ((0, 0), (1, 1) if what == "padding" else (0, 0), (0, 0)),
            (1, 2 if what == "dilation" else 1, 1),
        )  # fmt: skip

    program = unroll(jax.make_jaxpr(f)(x), rates=SMALL_SERVER)
    equation = order_program(program).equations[-1]
    assert equation.operation.name == "reduce_window_sum"
    assert [way.outputs for way in operations.tilings(equation, 2)] == [(0,)]


ROWS = np.array([3, 1, 3, 5])
UPDATES = {
    "dynamic_update_slice": lambda y, u: lax.dynamic_update_slice(y, u, (2, 0)),
    "scatter": lambda y, u: y.at[ROWS[1:]].set(u[1:], unique_indices=True),
    "scatter-add": lambda y, u: y.at[ROWS].add(u),
    "scatter-sub": lambda y, u: y.at[ROWS].subtract(u),
    "scatter-mul": lambda y, u: y.at[ROWS].multiply(u),
    "scatter-min": lambda y, u: y.at[ROWS].min(u),
    "scatter-max": lambda y, u: y.at[ROWS].max(u),
}


def test_every_update_has_a_case():
    names = {n for n, known in operations.TABLE.items() if known.overwrites == "first"}
    # Of others tests/transform/: of rows test_rows_below.py, of panels test_matrices.py.
    assert names - OWN == set(UPDATES)


@pytest.mark.parametrize("reads_again", [False, True], ids=["", "read later"])
@pytest.mark.parametrize("name", UPDATES)
def test_an_update_takes_its_operands_place_where_nobody_reads_that_again(name, reads_again):
    def function(x, u):
        y = jnp.sin(x)
        z = UPDATES[name](y, u)
        return jnp.cos(z), (y * 2 if reads_again else x + 1)

    x, u = np.linspace(-1, 1, 96).reshape(8, 12), np.linspace(0.5, 3, 48).reshape(4, 12)
    args = x.astype(np.float32), u.astype(np.float32)
    assert name in str(jax.make_jaxpr(function)(*args))
    step = jo.offload(function, device_memory=2304, cut="always", vertex_memory=1, check=True)
    for got, want in zip(step(*args), jax.jit(function)(*args), strict=True):
        np.testing.assert_array_equal(got, want)
    vertices = step.plan(*args).taskgraph.vertices
    (update,) = (v for v in vertices if v.name == name)
    assert bool(update.overwrites) != reads_again

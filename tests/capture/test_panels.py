"""Matrices panel by panel: the steps give what the whole operation does, and need no matrix whole.

Numbers are judged against float64, beside JAX's own on the whole matrix.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import linalg

from jaxoffload.capture.build import order_program
from jaxoffload.capture.demand import Large
from jaxoffload.capture.scan import unroll
from jaxoffload.plan.cost.machines import SMALL_SERVER
from tests.helpers import interpret_equations

EVEN, UNEVEN = 64, 61
"""Rows: eight panels of eight, and a last one of five."""


def in_panels(function, *args):
    """The results, operation by operation where large arrays are in pieces; the largest value that
    an operation reads or makes in bytes, and the names of the operations."""
    program = unroll(jax.make_jaxpr(function)(*args), rates=SMALL_SERVER, large=Large(1024))
    parts = interpret_equations(order_program(program), args)
    values = {v for e in program.equations for v in (*e.values(), *e.outputs)}
    largest = max(v.num_bytes() for v in values if v.argument is None)
    results = [np.concatenate([part.reshape(-1) for part in result]) for result in parts]
    return results, largest, {e.operation.name for e in program.equations}


def random(*shape, dtype=np.float32, seed=0):
    source = np.random.default_rng(seed)
    made = source.normal(size=shape)
    if np.issubdtype(dtype, np.complexfloating):
        made = made + 1j * source.normal(size=shape)
    return made.astype(dtype)


def error(got, exact):
    """The largest, over the largest element."""
    return np.abs(got - exact).max() / np.abs(exact).max()


@pytest.mark.drawn()
@pytest.mark.parametrize("few", [False, True], ids=["", "few sides"])
@pytest.mark.parametrize("unit", [False, True], ids=["", "unit"])
@pytest.mark.parametrize("how", ["", "transposed", "conjugate"])
@pytest.mark.parametrize("lower", [False, True], ids=["upper", "lower"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("n", [EVEN, UNEVEN])
def test_triangular_systems_are_solved_panel_by_panel(n, left, lower, how, unit, few):
    dtype = np.complex64 if how == "conjugate" else np.float32
    # The other triangle is not read, nor is a diagonal of ones.
    a = random(n, n, dtype=dtype) / 8 + (100 if unit else 3) * np.eye(n, dtype=dtype)
    sides = random(n, 3 if few else n, dtype=dtype, seed=1)
    sides = sides if left else np.ascontiguousarray(sides.T)
    params = {
        "left_side": left,
        "lower": lower,
        "transpose_a": bool(how),
        "conjugate_a": how == "conjugate",
        "unit_diagonal": unit,
    }

    def solve(a, sides):
        # Not of arguments: these are read in pieces whatever is done with them.
        return linalg.triangular_solve(jnp.cos(a * 0) * a, sides * 1, **params) * 1

    wide = a.astype(np.complex128 if how == "conjugate" else np.float64)
    triangle = np.tril(wide, -1) if lower else np.triu(wide, 1)
    triangle += np.eye(n) if unit else np.diag(np.diag(wide))
    triangle = triangle.T if how else triangle
    triangle = triangle.conj() if how == "conjugate" else triangle
    exact = np.linalg.solve(triangle, sides) if left else np.linalg.solve(triangle.T, sides.T).T
    (got,), largest, names = in_panels(solve, a, sides)
    got = got.reshape(sides.shape)
    assert "triangular_solve[panel]" in names and "triangular_solve" not in names
    assert error(got, exact) <= 4 * error(np.asarray(solve(a, sides)), exact) + 1e-7
    assert largest <= a.nbytes // 4, "no more than a few panels at once"


@pytest.mark.parametrize("symmetrized", [False, True], ids=["", "symmetrized"])
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize("n", [EVEN, UNEVEN])
def test_a_matrix_is_factored_panel_by_panel(n, dtype, symmetrized):
    root = random(n, n, dtype=dtype)
    a = root @ root.conj().T / n + np.eye(n, dtype=dtype)

    def factor(a):
        made = jnp.cos(a * 0) * a
        return jnp.tril(linalg.cholesky(made, symmetrize_input=symmetrized))

    exact = np.linalg.cholesky(a.astype(np.complex128))
    (got,), largest, names = in_panels(factor, a)
    assert "cholesky[panel]" in names and "cholesky" not in names
    assert error(got.reshape(n, n), exact) <= 4 * error(np.asarray(factor(a)), exact) + 1e-7
    assert largest <= a.nbytes // 4


@pytest.mark.parametrize("row", [0, 20, EVEN - 1])
def test_what_has_no_factor_is_nan_as_jax_has_it(row):
    """All of it, although the rows before the first that has none are fine."""
    a = (np.eye(EVEN) * np.where(np.arange(EVEN) == row, -1, 1)).astype(np.float32)
    factor = lambda a: jnp.tril(linalg.cholesky(a + 0.0 * jnp.cos(a), symmetrize_input=False))  # noqa: E731
    (got,), _, names = in_panels(factor, a)
    assert "cholesky[panel]" in names
    want = np.asarray(factor(a))
    assert np.isnan(want).any()
    np.testing.assert_array_equal(got.reshape(want.shape), want)


PRODUCTS = {
    "rows": lambda a, b: a.T @ b,
    "columns and rows": lambda a, b: a @ b,
    "columns": lambda a, b: a @ b.T,
}


@pytest.mark.parametrize("over", PRODUCTS)
@pytest.mark.parametrize("n", [EVEN, UNEVEN])
def test_panels_are_multiplied_panel_by_panel(n, over):
    """Where factors and product are matrices that others keep in panels."""
    root = random(n, n)
    a = (root @ root.T / n + np.eye(n)).astype(np.float32)

    def multiply(a):
        factor = linalg.cholesky(jnp.cos(a * 0) * a, symmetrize_input=False)
        made = PRODUCTS[over](jnp.tril(factor), jnp.sin(a))
        return linalg.triangular_solve(factor, made, left_side=True, lower=True)

    factor = np.linalg.cholesky(a.astype(np.float64))
    exact = np.linalg.solve(factor, PRODUCTS[over](factor, np.sin(a.astype(np.float64))))
    (got,), largest, names = in_panels(multiply, a)
    assert "dot_general[panel]" in names and "dot_general" not in names
    assert error(got.reshape(n, n), exact) <= 4 * error(np.asarray(multiply(a)), exact) + 1e-6
    assert largest <= a.nbytes // 4


def test_steps_of_equal_keys_make_the_same_of_the_same():
    """Panels of both sizes of matrices have eight rows; an executable stands for all of its key."""

    def work(a):
        factor = jnp.tril(linalg.cholesky(jnp.cos(a), symmetrize_input=True))
        solved = linalg.triangular_solve(factor, jnp.sin(a), left_side=True, lower=True)
        narrow = jnp.sin(solved)[:, :40]
        found = [times(factor, solved) + jnp.cos(solved).T for times in PRODUCTS.values()]
        return [*found, narrow @ narrow.T + jnp.cos(factor)]

    made = {}
    for n in (EVEN, UNEVEN):
        closed = jax.make_jaxpr(work)(np.zeros((n, n), np.float32))
        for equation in unroll(closed, rates=SMALL_SERVER, large=Large(1024)).equations:
            if equation.operation.name.endswith("[panel]"):
                read = tuple(x.aval.shape for x in equation.inputs)
                shapes = [v.shape for v in equation.outputs]
                assert made.setdefault((equation.operation.key, read), shapes) == shapes
    assert len(made) > 30


@pytest.mark.drawn(1)
@pytest.mark.parametrize("n", [EVEN, UNEVEN])
def test_gradients_need_products_and_transposes_of_panels(n):
    """Of a likelihood as Gaussian processes have it: no matrix is whole in its gradient either."""
    points, values = random(n, 3), random(n, seed=1)

    def likelihood(scale, points, values):
        distances = ((points[:, None] - points[None]) ** 2).sum(-1)
        factor = jnp.linalg.cholesky(jnp.exp(-scale * distances) + 0.1 * jnp.eye(n))
        solved = jax.scipy.linalg.solve_triangular(factor, values, lower=True)
        logs = jnp.log(jnp.where(jnp.eye(n, dtype=bool), factor, 1)).sum()
        return 0.5 * solved @ solved + logs

    step = jax.value_and_grad(likelihood, argnums=(0, 1))
    args = (np.float32(0.7), points, values)
    flat = lambda *args: jax.tree.leaves(step(*args))  # noqa: E731
    got, largest, names = in_panels(flat, *args)
    assert {"dot_general[panel]", "transpose[panel]"} <= names
    assert largest <= 3 * (n * n * 4) // 4, "a few panels; of the points' differences, as large"
    with jax.enable_x64(True):
        exact = flat(*(np.asarray(x, np.float64) for x in args))
    for g, w, e in zip(got, flat(*args), exact, strict=True):
        w, e = np.asarray(w).reshape(-1), np.asarray(e).reshape(-1)
        assert error(g, e) <= 4 * error(w, e) + 1e-6

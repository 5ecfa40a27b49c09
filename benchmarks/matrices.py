"""Dense linear algebra within a share of what `jax.jit` needs: Gaussian processes, least squares.

Matrices of one size, which are factored and solved panel by panel where they do not fit. Given are
the budget over one matrix, seconds over jit's (in turn, medians), the first call over jit's first,
and the error against float64 over jit's own.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_factor, cho_solve, solve_triangular

import jaxoffload as jo
from benchmarks.measure import interleaved, machine, save
from benchmarks.ratios import difference, jit_peak_bytes

SHARES, SMALL_SHARES = (0.5, 0.25, 0.15), (1.25,)
"""Of the bytes that jit needs."""
POINTS, FEW_POINTS = 4096, 256
"""Rows of a matrix; few where it is in one piece."""


def covariance(scales: Any, x: Any, z: Any) -> Any:
    """Of Gaussian kernels: (points,) dimensions each, a variance and a width as logarithms."""
    squares = (x * x).sum(-1)[:, None] + (z * z).sum(-1)[None] - 2 * x @ z.T
    return jnp.exp(scales[0] - jnp.maximum(squares, 0) * jnp.exp(scales[1]))


def likelihood(scales: Any, x: Any, y: Any) -> Any:
    """Of a Gaussian process: the negative logarithm, without constants."""
    matrix = covariance(scales, x, x) + jnp.exp(scales[2]) * jnp.eye(len(x))
    factor = jnp.linalg.cholesky(matrix)
    solved = solve_triangular(factor, y, lower=True)
    return 0.5 * solved @ solved + jnp.log(jnp.diag(factor)).sum()


def prediction(scales: Any, x: Any, y: Any, z: Any) -> Any:
    """Its mean and variance at other points."""
    matrix = covariance(scales, x, x) + jnp.exp(scales[2]) * jnp.eye(len(x))
    factor, between = cho_factor(matrix, lower=True), covariance(scales, x, z)
    variance = jnp.exp(scales[0]) - (between * cho_solve(factor, between)).sum(0)
    return between.T @ cho_solve(factor, y), variance


def least_squares(a: Any, b: Any) -> Any:
    """With a penalty, by the normal equations."""
    matrix = a.T @ a + len(a) * jnp.eye(len(a))
    return jax.scipy.linalg.solve(matrix, b, assume_a="pos")


def problem(name: str, n: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function of matrices of `n` rows and columns, and its arguments."""
    source = np.random.default_rng(3)
    numbers = lambda *shape: source.normal(size=shape).astype(np.float32)  # noqa: E731
    scales = np.array([0.1, -1.0, -1.0], np.float32)
    if name == "least squares":
        return least_squares, (numbers(n, n), numbers(n, n // 2))
    process = scales, numbers(n, 4), numbers(n)
    if name == "likelihood, gradient":
        return jax.value_and_grad(likelihood, (0, 1)), process
    return prediction, (*process, numbers(n // 2, 4))


PROBLEMS = ("likelihood, gradient", "prediction", "least squares")


def run(small: bool = False, out: str | None = None) -> None:
    """Prints the table; the small mode has matrices of a few rows, which fit."""
    print(machine())
    print("| problem | budget | over one matrix | time over jit's | first call | error |")
    print("|---|---|---|---|---|---|")
    rows = []
    for name in PROBLEMS:
        points, shares = (FEW_POINTS, SMALL_SHARES) if small else (POINTS, SHARES)
        rows += measured(name, points, shares)
        jax.clear_caches()
    save("matrices", rows, out)


def measured(name: str, n: int, shares: Sequence[float]) -> list[dict[str, Any]]:
    """The rows of one problem."""
    function, arguments = problem(name, n)
    needed = jit_peak_bytes(function, arguments, ())
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: np.asarray(a, np.float64), arguments)
        exact = jax.tree.map(np.asarray, jax.jit(function)(*wide))
    plain = jax.jit(function)
    first = _seconds(lambda: plain(*arguments))
    error = _error(plain(*arguments), exact)
    rows = []
    for share in shares:
        jo.clear_caches()  # of executables that two budgets share
        step = jo.offload(function, device_memory=int(share * needed))
        began = _seconds(lambda step=step: step(*arguments))
        timings = interleaved(
            {
                "jit": lambda: jax.block_until_ready(plain(*arguments)),
                "offloaded": lambda step=step: jax.block_until_ready(step(*arguments)),
            },
            5,
        )
        rows.append(
            {
                "problem": name,
                "points": n,
                "share": share,
                "matrices": share * needed / (4 * n * n),
                "over_jit": timings["offloaded"].ratio(timings["jit"]),
                "first_over_jit": began / first,
                "error_over_jit": _error(step(*arguments), exact) / error,
            }
        )
        print(_line(rows[-1]), flush=True)
    return rows


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def _error(got: Any, exact: Any) -> float:
    return difference(exact, jax.tree.map(lambda x: np.asarray(x, np.float64), got))


def _line(row: dict[str, Any]) -> str:
    return (
        f"| {row['problem']} | {row['share']:.0%} | {row['matrices']:.2f} | {row['over_jit']:.2f} "
        f"| {row['first_over_jit']:.1f} | {row['error_over_jit']:.1f} |"
    )

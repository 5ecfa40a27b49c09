"""Error of sums, products, norms and running sums against float64, ours beside that of `jax.jit`.

Prints, for each operation, size and dtype, jit's error and ours with no limit and, where a budget
changes the cut, at about half of the memory that everything takes and at the least that is
feasible, where operations are split. Errors are the greatest difference from float64, over what the
sum of the terms' magnitudes would be, so that cancellation does not flatter or blame anyone.

The rule, which `tests/accuracy` holds every operation to: at most twice jit's error, and one
rounding of the result's dtype.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxoffload as jo
from benchmarks.measure import machine, save

PIECE = 2**22
"""Elements of a large array that are widened to float64 at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """Something that adds or multiplies many terms.

    Attributes:
      function: of the arguments, in any dtype.
      arguments: (size, source of random numbers) to float32 arguments of about so many terms.
      magnitude: of the absolute arguments, what errors are measured by; None: the result itself.
    """

    function: Callable[..., Any]
    arguments: Callable[[int, np.random.Generator], tuple[np.ndarray, ...]]
    magnitude: Callable[..., Any] | None = None


def positive(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers of one sign and an awkward scale: their sums never cancel."""
    return (0.1 + 0.03 * random.random(shape)).astype(np.float32)


def mixed(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers of both signs: their sums cancel."""
    return (7.3 * random.standard_normal(shape) + 0.1).astype(np.float32)


def near_one(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers whose products along the last dimension neither vanish nor overflow."""
    return np.exp(random.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)


def vector(draw: Callable[..., np.ndarray]) -> Callable[..., tuple[np.ndarray, ...]]:
    """Arguments: one vector."""
    return lambda size, random: (draw(random, size),)


def matrix(rows: int, columns: int, draw: Callable[..., np.ndarray] = positive) -> Any:
    """Arguments: one matrix, the dimension of -1 as long as the size asks."""

    def arguments(size: int, random: np.random.Generator) -> tuple[np.ndarray, ...]:
        shape = [size // -(rows * columns) if n == -1 else n for n in (rows, columns)]
        return (draw(random, *shape),)

    return arguments


def outer(f: Callable[[jax.Array], Any]) -> Callable[[jax.Array, jax.Array], Any]:
    """The operation on all sums of an element of each argument, which exist tile by tile."""
    return lambda x, y: f(x[:, None] * y[None, :])


def sides(size: int, random: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Arguments of `outer`."""
    side = math.isqrt(size)
    return positive(random, side), positive(random, side)


def pair(draw: Callable[..., np.ndarray], x: tuple[int, ...], y: tuple[int, ...]) -> Any:
    """Arguments: two arrays, dimensions of -1 as long as the size."""

    def arguments(size: int, random: np.random.Generator) -> tuple[np.ndarray, ...]:
        shapes = [[size if n == -1 else n for n in shape] for shape in (x, y)]
        return draw(random, *shapes[0]), draw(random, *shapes[1])

    return arguments


def labelled(size: int, random: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Arguments: terms, and the one of eight sums that each belongs to."""
    return positive(random, size), random.integers(0, 8, size).astype(np.int32)


def of_stack(size: int, random: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Arguments: rows for a scan."""
    return (positive(random, min(size // 4, 40), 4),)


def stack_sum(x: jax.Array) -> jax.Array:
    """A sum over what a scan stacks."""
    stack = lax.scan(lambda c, row: (c, row * row), jnp.zeros((), x.dtype), x)[1]
    return lax.reduce_sum(stack, (0,))


def bias_gradient(x: jax.Array) -> jax.Array:
    """The gradient of a bias that is added to each row of a scan."""

    def loss(bias: jax.Array) -> jax.Array:
        stack = lax.scan(lambda c, row: (c, row * row), jnp.zeros((), x.dtype), x + bias[None])[1]
        return stack.sum(dtype=jnp.promote_types(x.dtype, jnp.float32))

    return jax.grad(loss)(jnp.zeros(x.shape[1:], x.dtype))


def convolution_gradient(x: jax.Array) -> jax.Array:
    """The gradient of a convolution's weights."""
    x = x.reshape(-1, 8, 8, 4)

    def loss(w: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers).sum()

    return jax.grad(loss)(jnp.zeros((3, 3, 4, 4), x.dtype))


def in_a_loop(x: jax.Array) -> jax.Array:
    """A sum inside a loop that stays one vertex."""
    return lax.fori_loop(0, 2, lambda i, total: total * 0 + x.sum(), jnp.zeros((), x.dtype))


def in_a_branch(x: jax.Array) -> jax.Array:
    """A sum inside a branch."""
    return lax.cond(x[0] > 0, lambda x: x.sum(), lambda x: x[0], x)


def by_a_function(x: jax.Array) -> jax.Array:
    """A sum whose addition is a function of the user's."""
    return lax.reduce(x, np.zeros((), x.dtype), lambda a, b: a + b, (0,))


def normalized(x: jax.Array) -> jax.Array:
    """Layer normalization of rows."""
    x = x - x.mean(axis=-1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return x @ y


OPERATIONS: dict[str, Operation] = {
    "sum": Operation(jnp.sum, vector(positive)),
    "sum, one value": Operation(jnp.sum, lambda n, _: (np.full(n, 0.1, np.float32),)),
    "sum that cancels": Operation(jnp.sum, vector(mixed), jnp.sum),
    "sum by a function": Operation(by_a_function, vector(positive)),
    "sum of columns": Operation(lambda x: x.sum(0), matrix(-1, 24)),
    "sum of few columns": Operation(lambda x: x.sum(0), matrix(-1, 3)),
    "sum of rows": Operation(lambda x: x.sum(1), matrix(24, -1)),
    "sum of blocks": Operation(lambda x: x.reshape(8, -1, 5, 4).sum((0, 2)), matrix(-1, 160)),
    "sum of slices": Operation(lambda x: x.reshape(4, -1, 8).sum(1), matrix(-1, 32)),
    "sum in a loop": Operation(in_a_loop, vector(positive)),
    "sum in a branch": Operation(in_a_branch, vector(positive)),
    "sum of a stack": Operation(stack_sum, of_stack),
    "bias gradient": Operation(bias_gradient, of_stack),
    "mean of squares": Operation(lambda x: jnp.mean(x * x), vector(mixed)),
    "norm": Operation(lambda x: jnp.sqrt(jnp.sum(x * x)), vector(positive)),
    "variance": Operation(jnp.var, vector(mixed)),
    "normalized": Operation(normalized, matrix(8, -1, mixed), lambda x: jnp.full(x.shape, 1.0)),
    "logsumexp": Operation(lambda x: jax.nn.logsumexp(x), vector(mixed)),
    "softmax": Operation(lambda x: jax.nn.softmax(x, axis=-1), matrix(8, -1)),
    # Of one product, either error may be small by chance.
    "products": Operation(lambda x: jnp.prod(x, axis=1), matrix(30, -1, near_one)),
    "maximum": Operation(jnp.max, vector(mixed)),
    "running sum": Operation(lambda x: jnp.cumsum(x, axis=1), matrix(4, -1)),
    "running logsumexp": Operation(lax.cumlogsumexp, vector(positive)),
    "running product": Operation(lax.cumprod, vector(near_one)),
    "vector by vector": Operation(dot, pair(positive, (-1,), (-1,))),
    "vectors that cancel": Operation(dot, pair(mixed, (-1,), (-1,)), dot),
    "row by column": Operation(dot, pair(positive, (1, -1), (-1, 1))),
    "two rows by two columns": Operation(dot, pair(positive, (2, -1), (-1, 2))),
    "matrix by vector": Operation(dot, pair(positive, (16, -1), (-1,))),
    "matrix by matrix": Operation(dot, pair(mixed, (16, -1), (-1, 24)), dot),
    "convolution gradient": Operation(convolution_gradient, matrix(-1, 256)),
    "segment sum": Operation(lambda x, i: jax.ops.segment_sum(x, i, 8), labelled),
    "add to rows": Operation(lambda x, i: jnp.zeros(8, x.dtype).at[i].add(x), labelled),
    "tiled sum": Operation(outer(jnp.sum), sides),
    "tiled sum of columns": Operation(outer(lambda z: jnp.exp(z).sum(0)), sides),
    "tiled mean of squares": Operation(outer(lambda z: jnp.mean(z * z)), sides),
    "tiled logsumexp": Operation(outer(lambda z: jax.nn.logsumexp(z, axis=0)), sides),
    "tiled product": Operation(outer(lambda z: jnp.exp(z).T @ jnp.sin(z)[:, :4]), sides),
}


CUT_BY_BUDGET = {name for name in OPERATIONS if name.startswith("tiled")} | {
    "sum of a stack",
    "bias gradient",
}
"""Operations whose cut a budget changes; the others are one vertex at any."""


def in_dtype(args: Any, dtype: Any) -> list[Any]:
    """Arguments with their inexact arrays in a dtype."""
    return [jnp.asarray(x, dtype) if x.dtype.kind == "f" else jnp.asarray(x) for x in args]


def exact(function: Callable[..., Any], args: Any) -> np.ndarray:
    """The function in float64, as `jax.jit` computes it."""
    with jax.enable_x64(True):
        wide = [np.asarray(x) for x in args]
        wide = [x if x.dtype.kind in "iu" else x.astype(np.float64) for x in wide]
        return np.asarray(jax.jit(function)(*wide))


def error(got: Any, want: np.ndarray, magnitude: np.ndarray) -> float:
    """The greatest difference from float64, over the magnitudes' greatest."""
    difference = np.abs(np.asarray(got).astype(np.float64) - want)
    return float(np.max(difference / np.abs(magnitude).max()))


def budgets(function: Callable[..., Any], args: Any) -> dict[str, int]:
    """About half of what everything takes, and the least that is feasible."""
    plan = jo.offload(function, device_memory=None, cut="always").plan(*args)
    least = plan.min_device_memory
    return {"half": max(least, plan.resident_peak_bytes // 2), "least": least}


def errors(operation: Operation, size: int, dtype: Any, names: tuple[str, ...]) -> dict[str, float]:
    """The error of `jax.jit`, and ours at each budget: "all" (no limit), "half" or "least"."""
    args = in_dtype(operation.arguments(size, np.random.default_rng(size)), dtype)
    want = magnitude = exact(operation.function, args)
    if operation.magnitude is not None:
        magnitude = exact(operation.magnitude, [jnp.abs(x) for x in args])
    found = {"jit": error(jax.jit(operation.function)(*args), want, magnitude)}
    limits = {} if names == ("all",) else budgets(operation.function, args)
    for name in names:
        step = jo.offload(operation.function, device_memory=limits.get(name), cut="always")
        found[name] = error(step(*args), want, magnitude)
    return found


def rounding(dtype: Any) -> float:
    """One rounding of a result."""
    return float(jnp.finfo(dtype).eps)


LARGE = ("sum", "sum, one value", "mean of squares", "norm", "variance", "vector by vector")


def exact_in_pieces(name: str, x: np.ndarray) -> np.ndarray:
    """Of a large array and itself: float64 a piece at a time, and pieces added exactly."""
    sums, squares = [], []
    for start in range(0, x.size, PIECE):
        pieces = x[start : start + PIECE].astype(np.float64)
        sums.append(float(pieces.sum()))
        squares.append(float((pieces * pieces).sum()))
    total, square = math.fsum(sums), math.fsum(squares)
    mean = total / x.size
    return np.float64(
        {
            "sum": total,
            "sum, one value": total,
            "mean of squares": square / x.size,
            "norm": math.sqrt(square),
            "variance": square / x.size - mean * mean,
            "vector by vector": square,
        }[name]
    )


def _large_errors(name: str, size: int) -> dict[str, float]:
    """As `errors`, of one large array, with no limit only: there is nothing to split."""
    x = OPERATIONS[name].arguments(size, np.random.default_rng(size))[0]
    function = OPERATIONS[name].function
    if name == "vector by vector":
        function = lambda x: x @ x  # noqa: E731
    want = exact_in_pieces(name, x)
    return {
        "jit": error(jax.jit(function)(x), want, want),
        "all": error(jo.offload(function, device_memory=None, cut="always")(x), want, want),
    }


def run(small: bool = False, out: str | None = None) -> list[dict[str, Any]]:
    """Measures every operation and prints a table; exits where one breaks the rule."""
    print(machine())
    rows = []
    names = ("sum", "sum of a stack", "tiled sum") if small else tuple(OPERATIONS)
    for name in names:
        budgets = ("all", "half", "least") if name in CUT_BY_BUDGET else ("all",)
        for size in (2**12,) if small else (2**14, 2**20):
            for dtype in (jnp.float32, jnp.bfloat16):
                found = errors(OPERATIONS[name], size, dtype, budgets)
                rows.append(_row(name, size, dtype, found))
    for name in LARGE if not small else ():
        rows.append(_row(name, 2**27, jnp.float32, _large_errors(name, 2**27)))
    save("accuracy", rows, out)
    broken = [row for row in rows if not row["holds"]]
    if broken:
        raise SystemExit(f"{len(broken)} of {len(rows)} break the rule: {broken}")
    return rows


def _row(name: str, size: int, dtype: Any, found: dict[str, float]) -> dict[str, Any]:
    allowed = 2 * found["jit"] + rounding(dtype)
    ours = {label: value for label, value in found.items() if label != "jit"}
    holds = all(value <= allowed for value in ours.values())
    figures = ", ".join(f"{label} {value:.1e}" for label, value in ours.items())
    print(
        f"{name:>24} 2^{math.log2(size):<4.3g} {jnp.dtype(dtype).name:>8}: jit {found['jit']:.1e}; "
        f"{figures}{'' if holds else '  over the bound'}",
        flush=True,
    )
    return {
        "operation": name,
        "size": size,
        "dtype": jnp.dtype(dtype).name,
        **found,
        "rounding": rounding(dtype),
        "holds": holds,
    }

"""One function run by `jax.jit` and by `offload`, and both judged by float64.

The rule, for each result: the same shape, dtype and weak type; integers and booleans bit for bit;
floats NaN and infinite at the same elements, and elsewhere no further from float64 than twice what
`jax.jit` is, plus one unit of the dtype's rounding at the scale of the result's largest value.
Where float64 is no judge (it overflows, or computes something else, as random bits and the signs of
eigenvectors do), `jax.jit` takes its place, itself a few units off.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np


def run(function, *args, **kwargs):
    """A call's results as a pytree of NumPy arrays, and their weak types; or what it raised."""
    try:
        out = function(*args, **kwargs)
        return None, jax.tree.map(on_host, out), jax.tree.map(_is_weak, out)
    except Exception as error:
        return error, None, None


def on_host(x):
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _is_weak(x):
    return bool(getattr(x, "weak_type", False))


def is_float(dtype):
    return jnp.issubdtype(dtype, np.inexact)


def in_float64(function, args):
    """The function's results in double precision; None where it cannot be had."""

    def widen(x):
        dtype = getattr(x, "dtype", None)
        if dtype is None or not is_float(dtype):
            return x
        return np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64)

    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error, out, _ = run(jax.jit(function), *jax.tree.map(widen, args))
    return None if error else jax.tree.leaves(out)


JITS_OWN = 4
"""Units of rounding that jit is given where nothing better judges it."""


def disagreement(want, got, exact=None, ulps=1):
    """What is wrong with `got`, in words; "" if nothing is.

    Args:
      want: what `jax.jit` gave.
      exact: the same in double precision, or None.
      ulps: what is allowed beside twice jit's error: one where both compute by the same operations.
    """
    if want.shape != got.shape:
        return f"shape {got.shape}, not {want.shape}"
    if want.dtype != got.dtype:
        return f"dtype {got.dtype}, not {want.dtype}"
    if not is_float(want.dtype):
        bad = int(np.sum(want != got))
        return f"{bad} of {want.size} elements differ" if bad else ""
    eps = float(jnp.finfo(want.dtype).eps)
    want, got = _parts(want), _parts(got)
    for name, test in (("NaN", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
        bad = int(np.sum(test(want) != test(got)))
        if bad:
            return f"{name} at {bad} of {want.size} other elements"
    finite = np.isfinite(want)
    want, got = want[finite], got[finite]
    if exact is not None:
        exact = _parts(exact)
        exact = exact[finite] if exact.shape == finite.shape else None
    scale = np.abs(want).max(initial=0.0)
    judged = exact is not None and np.isfinite(exact).all()
    if judged:
        # Further off than this, float64 has computed something else.
        judged = np.abs(want - exact).max(initial=0.0) <= min(4096 * eps, 0.1) * scale
    if not judged:
        exact, ulps = want, JITS_OWN * ulps
    own = np.abs(want - exact).max(initial=0.0)
    error = np.abs(got - exact).max(initial=0.0)
    if error <= 2 * own + ulps * eps * scale:
        return ""
    judge = "float64" if judged else "jit"
    return (
        f"off by {error / (eps * scale or 1):.3g} ulps of the largest value from {judge}, "
        f"jit by {own / (eps * scale or 1):.3g}"
    )


def _parts(array):
    """Real and imaginary parts as float64."""
    array = np.asarray(array)
    if not np.iscomplexobj(array):
        return array.astype(np.float64)
    return np.stack([array.real, array.imag]).astype(np.float64)


def bit_difference(want, got):
    """Where two arrays differ in shape, dtype or bits, in words; NaN equals NaN."""
    if want.shape != got.shape or want.dtype != got.dtype:
        return f"{got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
    if want.tobytes() == got.tobytes():
        return ""
    kind = np.dtype(f"u{want.dtype.itemsize}") if want.dtype.kind != "c" else None
    if kind is None:
        text = bit_difference(want.real.copy(), got.real.copy())
        return text or bit_difference(want.imag.copy(), got.imag.copy())
    differ = np.ascontiguousarray(want).view(kind) != np.ascontiguousarray(got).view(kind)
    if is_float(want.dtype):
        differ &= ~(np.isnan(want) & np.isnan(got))
    bad = np.flatnonzero(differ.reshape(-1))
    if not bad.size:
        return ""
    w, g = want.reshape(-1)[bad[0]], got.reshape(-1)[bad[0]]
    return f"{bad.size} of {want.size} elements differ: {g!r}, not {w!r}"

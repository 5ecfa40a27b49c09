"""`verify=True`: the offloaded run beside plain `jax.jit` on the same arguments.

Results may differ by rounding: XLA fuses a whole program otherwise than its vertices. Where they
differ by more than a few roundings, the program is evaluated in float64, as a judge between the
two: a result passes if it is not much further from float64 than jit's own. So an ill-conditioned
program gives no alarm, and a sum that has lost a part of its terms does, in bfloat16 as well.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend as jex
import numpy as np
from jax import lax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.evaluate import Evaluator
from jaxoffload.errors import VerificationError

ROUNDINGS = 64
"""Differences that need no judge, in units of the dtype's rounding, of each result's largest value;
for narrow dtypes 2% or one rounding, whichever is more."""
TIMES_JITS_ERROR = 4
"""A result may be so many times as far from float64 as jit's, beside those roundings."""
UNJUDGED_ROUNDINGS = 4096
"""Tolerance where float64 is no judge, 5% at most: a training step chains a thousand operations."""


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """Results of plain `jax.jit`, as NumPy arrays, and the way to those of float64."""

    results: list[np.ndarray]
    in_float64: Callable[[], list[np.ndarray] | None]

    def check(self, name: str, flat: Sequence[Any]) -> None:
        """Compares.

        Raises:
          VerificationError: names the result and the difference.
        """
        found = [np.asarray(x) for x in flat]
        differences = [
            max_relative_difference(w, g) for w, g in zip(self.results, found, strict=True)
        ]
        if all(d <= rounding(w.dtype) for d, w in zip(differences, self.results, strict=True)):
            return
        exact = self.in_float64()
        for j, (want, got) in enumerate(zip(self.results, found, strict=True)):
            if differences[j] <= rounding(want.dtype):
                continue
            if exact is not None and is_judged(want.dtype):
                mine, jits = (_error(exact[j], x) for x in (got, want))
                if mine <= TIMES_JITS_ERROR * jits + rounding(want.dtype):
                    continue
                judged = f"; float64 says that it is {mine:.3g} off, and jax.jit {jits:.3g}"
            else:
                if differences[j] <= unjudged(want.dtype):
                    continue
                judged = f" ({unjudged(want.dtype):.3g})"
            raise VerificationError(
                f"offload({name}): verify=True: flat result {j} differs from jax.jit by "
                f"{differences[j]:.3g} of its largest value, more than rounding explains{judged}. "
                "Please report it with the output of `explain`."
            )


def compare_with_jit(jaxpr: Any, leaves: Sequence[Any]) -> Expected:
    """Runs the jaxpr under plain `jax.jit`, donating nothing."""
    results = jax.jit(jex.core.jaxpr_as_fun(jaxpr))(*leaves)
    # The run that follows may take the arguments' memory.
    kept = [
        x if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) else np.array(x) for x in leaves
    ]
    return Expected([np.array(x) for x in results], lambda: in_float64(jaxpr, kept))


_SPECIAL = {"jax_debug_nans": np.isnan, "jax_debug_infs": np.isinf}
"""Settings, and the values that they look for."""


def check_special_values(name: str, flat: Sequence[Any]) -> None:
    """What `jax_debug_nans` and `jax_debug_infs` ask for, as `jax.jit` does it.

    Raises:
      FloatingPointError: a result holds what is looked for.
    """
    if not compat.looks_for_special_values():
        return
    for setting, is_special in _SPECIAL.items():
        if not getattr(jax.config, setting):
            continue
        for j, result in enumerate(flat):
            if not jax.dtypes.issubdtype(result.dtype, np.inexact):
                continue
            if is_special(np.asarray(result)).any():
                raise FloatingPointError(
                    f"offload({name}): flat result {j} holds a value that {setting} looks for "
                    f"({is_special.__name__}). Call the function without offload to see which "
                    "operation made it."
                )


def is_judged(dtype: Any) -> bool:
    """Whether float64 says more about a dtype than the dtype itself."""
    return jax.dtypes.issubdtype(dtype, np.inexact) and jax.numpy.finfo(dtype).bits < 64


def rounding(dtype: Any) -> float:
    """Largest relative difference that needs no judge; 0 for integers."""
    if not jax.dtypes.issubdtype(dtype, np.inexact):
        return 0.0
    eps = float(jax.numpy.finfo(dtype).eps)
    return min(ROUNDINGS * eps, max(0.02, eps))


def unjudged(dtype: Any) -> float:
    """Largest relative difference that rounding explains where there is no judge."""
    if not jax.dtypes.issubdtype(dtype, np.inexact):
        return 0.0
    eps = float(jax.numpy.finfo(dtype).eps)
    return min(UNJUDGED_ROUNDINGS * eps, max(0.05, eps))


def _error(exact: np.ndarray, got: np.ndarray) -> float:
    """How far an array is off float64, over the greatest magnitude; inf where that says nothing."""
    return max_relative_difference(exact, got.astype(exact.dtype))


def max_relative_difference(want: np.ndarray, got: np.ndarray) -> float:
    """The greatest difference over the greatest finite magnitude; inf where one alone is finite."""
    if want.shape != got.shape or want.dtype != got.dtype:
        return float("inf")
    if not want.size:
        return 0.0
    wide = np.complex128 if np.iscomplexobj(want) else np.float64
    want, got = want.astype(wide), got.astype(wide)
    finite = np.isfinite(want)
    if not np.array_equal(finite, np.isfinite(got)):
        return float("inf")
    if not np.array_equal(want[~finite], got[~finite], equal_nan=True):
        return float("inf")
    scale = np.abs(want[finite]).max(initial=0.0)
    worst = np.abs(want[finite] - got[finite]).max(initial=0.0)
    return float(worst / scale) if scale else float(worst)


# Evaluation in float64 ---------------------------------------------------------------------------

_BITS = frozenset({"bitcast_convert_type", "nextafter"})
"""Operations that mean something else in another dtype."""
_SCATTERS = {
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}
"""Their params hold a jaxpr of their own dtype."""


def in_float64(jaxpr: Any, leaves: Sequence[Any]) -> list[np.ndarray] | None:
    """A closed jaxpr's results, every inexact value in it a float64 or complex128.

    Operations that cannot be had so (custom calls, for one) work in their own dtype.

    Returns:
      None where the program cannot be evaluated at all.
    """

    with jax.enable_x64(True):
        try:
            results = jax.jit(lambda *leaves: _Doubled().run(jaxpr, leaves))(*leaves)
        except Exception:  # whatever an operation has against float64
            return None
        return [np.asarray(x) for x in results]


def _double(dtype: Any) -> Any:
    if jax.dtypes.issubdtype(dtype, np.complexfloating):
        return np.dtype(np.complex128)
    if jax.dtypes.issubdtype(dtype, np.floating):
        return np.dtype(np.float64)
    return dtype


def _as(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


class _Doubled(Evaluator):
    """Inexact values are float64."""

    def value(self, var: Any, value: Any) -> Any:
        return _as(jax.numpy.asarray(value), _double(var.aval.dtype))

    def literal(self, atom: Any) -> Any:
        return jax.numpy.asarray(atom.val, _double(atom.aval.dtype))

    def operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name == "reduce_precision":
            return operands
        if name not in _BITS and not _applies_function(eqn):
            try:
                return _apply_wide(eqn, operands)
            except Exception:  # there is no such operation in float64
                pass
        narrow = [_as(x, atom.aval.dtype) for x, atom in zip(operands, eqn.invars, strict=True)]
        return super().operation(eqn, narrow)


def _applies_function(eqn: Any) -> bool:
    """Whether it is a scatter by a function of the user's, as a jaxpr of its own dtype."""
    return eqn.params.get("update_jaxpr") is not None and eqn.primitive.name not in _SCATTERS


def _apply_wide(eqn: Any, operands: list[Any]) -> list[Any]:
    if (scatter := _SCATTERS.get(eqn.primitive.name)) is not None:
        names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return [scatter(*operands, **{name: eqn.params[name] for name in names})]
    return compat.evaluate(eqn, operands, {k: _double_param(v) for k, v in eqn.params.items()})


def _double_param(value: Any) -> Any:
    return _double(value) if isinstance(value, np.dtype) else value

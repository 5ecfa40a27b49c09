"""`verify=True`: the offloaded run beside plain `jax.jit` on the same arguments."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend as jex
import numpy as np

from jaxoffload.errors import VerificationError

ULPS = 4096
"""Tolerance in units of the dtype's rounding, of each result's largest value. XLA fuses a whole
program otherwise than its vertices, and a training step chains some thousand operations."""


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """Results of plain `jax.jit`, as NumPy arrays."""

    results: list[np.ndarray]

    def check(self, name: str, flat: Sequence[Any]) -> None:
        """Compares.

        Raises:
          VerificationError: names the result and the difference.
        """
        for j, (want, got) in enumerate(zip(self.results, flat, strict=True)):
            difference = max_relative_difference(want, np.asarray(got))
            if difference > tolerance(want.dtype):
                raise VerificationError(
                    f"offload({name}): verify=True: flat result {j} differs from jax.jit by "
                    f"{difference:.3g} of its largest value, more than the "
                    f"{tolerance(want.dtype):.3g} that rounding explains."
                )


def compare_with_jit(jaxpr: Any, leaves: Sequence[Any]) -> Expected:
    """Runs the jaxpr under plain `jax.jit`, donating nothing."""
    results = jax.jit(jex.core.jaxpr_as_fun(jaxpr))(*leaves)
    return Expected([np.array(x) for x in results])


def check_special_values(name: str, flat: Sequence[Any]) -> None:
    """What `jax_debug_nans` and `jax_debug_infs` ask for, as `jax.jit` does it.

    Raises:
      FloatingPointError: a result holds what is looked for.
    """
    config = jax.config
    for setting, is_special in (("jax_debug_nans", np.isnan), ("jax_debug_infs", np.isinf)):
        if not getattr(config, setting):
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


def tolerance(dtype: Any) -> float:
    """Largest relative difference that rounding explains; 0 for integers."""
    if not jax.dtypes.issubdtype(dtype, np.inexact):
        return 0.0
    return ULPS * float(jax.numpy.finfo(dtype).eps)


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

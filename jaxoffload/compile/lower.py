"""A kernel to StableHLO, in the form that the runtime executes.

The executable is `f(*inputs, *places)`: `places` are dummies for the outputs that do not overwrite
an input, in output order. They and the overwritten inputs are donated, so XLA writes every output
where the plan wants it. Nothing is left out when unused: the parameter order is a contract. What
has elements of less than a byte goes in and out as uint8 (capture/words.py).
"""

from typing import Any

import jax
import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.kernel import Kernel
from jaxoffload.capture.words import code_of, decoded, encoded
from jaxoffload.compile import callbacks, convolutions, products, reductions, transpositions

RULES = {
    **reductions.RULES,
    **products.RULES,
    **transpositions.RULES,
    **convolutions.RULES,
    **callbacks.RULES,
}


def lower(kernel: Kernel, platform: str) -> Any:
    """The kernel, lowered by JAX for a platform."""
    count = len(kernel.inputs)
    places = kernel.output_avals[len(kernel.overwrites) :]
    donated = [read for read, _ in kernel.overwrites]
    donated += range(count, count + len(places))
    read, made = list(map(_code, kernel.inputs)), list(map(_code, kernel.output_avals))

    def body(*operands: Any) -> list[Any]:
        results = kernel.apply(list(map(decoded, operands[:count], read)))
        return list(map(encoded, results, made))

    function = jax.jit(body, donate_argnums=donated, keep_unused=True)
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype if _code(a) is None else np.uint8)
        for a in (*kernel.inputs, *places)
    ]
    # Every output finds its donor, so that JAX has nothing to warn of.
    rules = RULES if platform == "cpu" else {}  # for GPUs XLA has better of its own
    with compat.no_mesh():
        return compat.lower(compat.unchecked(function.trace)(*shapes), platform, rules)


def _code(aval: Any) -> Any:
    """How a tensor is moved; keys need no other program, JAX lowers them to their words."""
    code = code_of(aval)
    return None if isinstance(code, str) else code


def portable(lowered: Any, stablehlo_version: str) -> bytes:
    """A lowered kernel as a portable StableHLO artifact.

    Args:
      stablehlo_version: the newest version that the consumer reads, "1.9.0".
    """
    return compat.portable_stablehlo(lowered, stablehlo_version)

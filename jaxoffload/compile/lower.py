"""A kernel to StableHLO, in the form that the runtime executes.

The executable is `f(*inputs, *places)`: `places` are dummies for the outputs that do not overwrite
an input, in output order. They and the overwritten inputs are donated, so XLA writes every output
where the plan wants it. Nothing is left out when unused: the parameter order is a contract.
"""

from typing import Any

import jax

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.kernel import Kernel
from jaxoffload.compile import convolutions, products, reductions

RULES = {**reductions.RULES, **products.RULES, **convolutions.RULES}


def lower(kernel: Kernel, platform: str) -> Any:
    """The kernel, lowered by JAX for a platform."""
    count = len(kernel.inputs)
    places = kernel.output_avals[len(kernel.overwrites) :]
    donated = [read for read, _ in kernel.overwrites]
    donated += range(count, count + len(places))
    function = jax.jit(
        lambda *operands: kernel.apply(operands[:count]), donate_argnums=donated, keep_unused=True
    )
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*kernel.inputs, *places)]
    # Every output finds its donor, so that JAX has nothing to warn of.
    rules = RULES if platform == "cpu" else {}  # for GPUs XLA has better of its own
    return compat.lower(function.trace(*shapes), platform, rules)


def portable(lowered: Any, stablehlo_version: str) -> bytes:
    """A lowered kernel as a portable StableHLO artifact.

    Args:
      stablehlo_version: the newest version that the consumer reads, "1.9.0".
    """
    return compat.portable_stablehlo(lowered, stablehlo_version)

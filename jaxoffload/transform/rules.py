"""What JAX's transformations make of an offloaded function.

`vmap` and `checkify` give another function, which is offloaded too. Differentiation from outside,
transposition and `jet` come after the function was captured, so they evaluate it in plain JAX: the
results are right, it is not offloaded, and a warning says so.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import ad

from jaxoffload import _jax_compat as compat
from jaxoffload.errors import warn
from jaxoffload.graphs.taskgraph import TensorKind
from jaxoffload.transform.primitive import Derived, bind, in_plain_jax, leaves_of, offload_p


def _say(params: dict[str, Any], what: str, remedy: str) -> None:
    warn(f"offload({params['name']}) is {what} from outside, so it is not offloaded. {remedy}")


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    remedy = "Write offload(jax.grad(f)) instead of jax.grad(offload(f))."
    _say(params, "differentiated", remedy)
    zeros = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(jax.jit(in_plain_jax(params)), list(primals), zeros)


def _transpose(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    _say(params, "transposed", "Write offload(jax.linear_transpose(f, ...)) to have it offloaded.")
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]

    def function(*varying: Any) -> list[Any]:
        everything = list(operands)
        for i, x in zip(linear, varying, strict=True):
            everything[i] = x
        return in_plain_jax(params)(*everything)

    avals = [operands[i].aval for i in linear]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    found = jax.linear_transpose(jax.jit(function), *shapes)(
        [ad.instantiate_zeros(ct) for ct in cotangents]
    )
    results: list[Any] = [None] * len(operands)
    for i, cotangent in zip(linear, found, strict=True):
        results[i] = cotangent
    return results


def _jet(primals: Sequence[Any], series: Sequence[Any], **params: Any) -> Any:
    _say(params, "differentiated", "Write offload(lambda x: jet.jet(f, ...)) to have it offloaded.")
    return compat.jet(in_plain_jax(params), primals, series)


def _batch(axis: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    tier_leaves = params["tier_leaves"]
    axes = tuple(leaves_of(dims, tuple((i, None) for i, _ in tier_leaves)))
    leaves = leaves_of(operands, tier_leaves)

    def make() -> tuple[Any, Any, tuple[Any, ...], Derived]:
        return params["jaxpr"], *compat.batched(params["jaxpr"], axis, axes), Derived()

    key = (id(params["jaxpr"]), axis, axes, compat.trace_context())
    _, jaxpr, out_axes, derived = params["derived"].get().batched.get(key, make)
    others = {k: v for k, v in params.items() if k not in ("jaxpr", "derived", "tier_leaves")}
    return bind(leaves, jaxpr, derived=derived.link, **others), list(out_axes)


def _check(error: Any, enabled: Any, *operands: Any, **params: Any) -> Any:
    """The function with its checks, which take and give the state of what failed before."""
    tier_leaves = params["tier_leaves"]
    leaves = leaves_of(operands, tier_leaves)
    values, jaxpr, tree = compat.checked(params["jaxpr"], error, enabled, leaves)
    count = len(values)
    outs = bind(
        [*values, *leaves],
        jaxpr,
        derived=Derived().link,
        name=params["name"],
        argument_names=("what was checked before",) * count + params["argument_names"],
        kinds=(TensorKind.TEMPORARY,) * count + params["kinds"],
        donated=(False,) * count + params["donated"],
        options=params["options"],
    )
    return jax.tree.unflatten(tree, outs)


def register() -> None:
    """Tells JAX of these rules."""
    ad.primitive_jvps[offload_p] = _jvp
    ad.primitive_transposes[offload_p] = _transpose
    compat.register_batcher(offload_p, _batch)
    compat.register_check(offload_p, _check)
    compat.register_jet(offload_p, _jet)

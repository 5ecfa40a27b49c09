"""What JAX's transformations make of an offloaded function.

`vmap`, `checkify`, differentiation and transposition give other functions, which are offloaded too
(derivatives.py). `jet` evaluates it in plain JAX: the results are right, it is not offloaded, and a
warning says so.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import ad

from jaxoffload import _jax_compat as compat
from jaxoffload.errors import warn
from jaxoffload.graphs.taskgraph import TensorKind
from jaxoffload.transform.derivatives import Linearized, Transposed, linearized, transposed
from jaxoffload.transform.derived import Derived
from jaxoffload.transform.primitive import bind, in_plain_jax, leaves_of, offload_p


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    """The forward pass, then the derivative of the tangents, each a call of its own."""
    tier_leaves = params["tier_leaves"]
    absent = tuple((i, None) for i, _ in tier_leaves)
    leaves, moves = leaves_of(primals, tier_leaves), leaves_of(tangents, absent)
    varies = tuple(t is not None and _is_tangent(t) for t in moves)
    key = ("linearized", id(params["jaxpr"]), varies, compat.trace_context())

    def make() -> tuple[Any, Linearized]:
        return params["jaxpr"], linearized(params["jaxpr"], varies)  # the jaxpr keeps its id

    split = params["derived"].get().derivatives.get(key, make)[1]
    count, names = len(split.has_tangent), _names(params, len(leaves))
    found = _call(split.forward, leaves, params, names, params["kinds"], split.derived[0])
    outs, kept = found[:count], found[count:]
    given = [leaves[i] for i in split.taken]
    moving = [t for t, varying in zip(moves, varies, strict=True) if varying]
    steps = iter(
        _call(
            split.linear,
            [*given, *kept, *moving],
            params,
            (*(names[i] for i in split.taken), *_RESIDUAL * len(kept), *_TANGENT * len(moving)),
            tuple(params["kinds"][i] for i in split.taken)
            + (TensorKind.ACTIVATION,) * (len(kept) + len(moving)),
            split.derived[1],
        )
    )
    return outs, [
        next(steps) if has else ad.Zero(x.aval.to_tangent_aval())
        for x, has in zip(outs, split.has_tangent, strict=True)
    ]


_RESIDUAL, _TANGENT, _COTANGENT = ("what is kept for the derivative",), ("tangent",), ("cotangent",)


def _is_tangent(tangent: Any) -> bool:
    """Whether there is something in a tangent, which may be a Python number: integers have none."""
    is_empty = getattr(tangent, "dtype", None) == jax.dtypes.float0
    return not (is_empty or isinstance(tangent, ad.Zero))


def _names(params: dict[str, Any], count: int) -> tuple[str, ...]:
    names = params["argument_names"]
    return (*names, *("",) * (count - len(names)))


def _call(
    jaxpr: Any,
    leaves: Sequence[Any],
    params: dict[str, Any],
    names: tuple[str, ...],
    kinds: tuple[TensorKind, ...],
    derived: Derived,
) -> list[Any]:
    """A jaxpr that was made from the primitive's, with its options."""
    return bind(
        leaves,
        jaxpr,
        derived=derived.link,
        name=params["name"],
        argument_names=names,
        kinds=kinds,
        donated=(False,) * len(leaves),
        options=params["options"],
    )


def _transpose(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    tier_leaves = params["tier_leaves"]
    leaves = leaves_of(operands, tier_leaves)
    is_linear = tuple(ad.is_undefined_primal(x) for x in leaves)
    is_zero = tuple(isinstance(ct, ad.Zero) for ct in cotangents)
    if all(is_zero):
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands]
    key = ("transposed", id(params["jaxpr"]), is_linear, is_zero, compat.trace_context())

    def make() -> tuple[Any, Transposed]:
        return params["jaxpr"], transposed(params["jaxpr"], is_linear, is_zero)

    backward = params["derived"].get().derivatives.get(key, make)[1]
    names = _names(params, len(leaves))
    others = [i for i, each in enumerate(is_linear) if not each]
    shown = [ct for ct, zero in zip(cotangents, is_zero, strict=True) if not zero]
    found = iter(
        _call(
            backward.jaxpr,
            [*(leaves[i] for i in others), *shown],
            params,
            (*(names[i] for i in others), *_COTANGENT * len(shown)),
            tuple(params["kinds"][i] for i in others) + (TensorKind.ACTIVATION,) * len(shown),
            *backward.derived,
        )
    )
    return [next(found) if ad.is_undefined_primal(x) else None for x in operands]


def _jet(primals: Sequence[Any], series: Sequence[Any], **params: Any) -> Any:
    warn(
        f"offload({params['name']}) is differentiated from outside, so it is not offloaded. Write "
        "offload(lambda x: jet.jet(f, ...)) to have it offloaded."
    )
    return compat.jet(in_plain_jax(params), primals, series)


def _batch(axis: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    tier_leaves = params["tier_leaves"]
    axes = tuple(leaves_of(dims, tuple((i, None) for i, _ in tier_leaves)))
    leaves = leaves_of(operands, tier_leaves)

    def make() -> tuple[Any, Any, tuple[Any, ...], Derived]:
        return params["jaxpr"], *compat.batched(params["jaxpr"], axis, axes), Derived()

    key = (id(params["jaxpr"]), axis, axes, compat.trace_context())
    _, jaxpr, out_axes, derived = params["derived"].get().batched.get(key, make)
    others = {
        k: v for k, v in params.items() if k not in ("jaxpr", "derived", "tier_leaves", "fixed")
    }
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

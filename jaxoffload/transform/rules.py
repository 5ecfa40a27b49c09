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
from jaxoffload.transform.derivatives import (
    Derivative,
    Linearized,
    linearized,
    pushed,
    transposed,
)
from jaxoffload.transform.derived import Derived, lowered
from jaxoffload.transform.primitive import bind, in_plain_jax, leaves_of, offload_p


def _linearize(is_vjp: bool, varies: Sequence[bool], *primals: Any, **params: Any) -> Any:
    """The forward pass, what it keeps, and the derivative, each pass a call of its own."""
    tier_leaves = params["tier_leaves"]
    leaves = leaves_of(primals, tier_leaves)
    varying = leaves_of(varies, tuple((i, False) for i, _ in tier_leaves))
    # Integers have no tangents.
    on = tuple(each and _is_inexact(x) for each, x in zip(varying, leaves, strict=True))
    key = ("linearized", id(params["jaxpr"]), on, is_vjp, compat.trace_context())

    def make() -> tuple[Any, Linearized]:
        return params["jaxpr"], linearized(_written(params), on, is_vjp)  # the jaxpr keeps its id

    split = params["derived"].get().derivatives.get(key, make)[1]
    count, names = len(split.has_tangent), _names(params, len(leaves))
    found = _call(split.forward, leaves, params, names, params["kinds"], split.derived[0])
    outs = found[:count]

    def derivative(residuals: Sequence[Any], *tangents: Any) -> list[Any]:
        moves = leaves_of(tangents, tuple((i, None) for i, _ in tier_leaves))
        moving = [t for t, varying in zip(moves, on, strict=True) if varying]
        kept = len(residuals) - len(split.taken)
        found = []
        if any(split.has_tangent):
            found = _call(
                split.linear,
                [*residuals, *moving],
                params,
                (*(names[i] for i in split.taken), *_RESIDUAL * kept, *_TANGENT * len(moving)),
                tuple(params["kinds"][i] for i in split.taken)
                + (TensorKind.ACTIVATION,) * (kept + len(moving)),
                split.derived[1],
            )
        steps = iter(found)
        return [
            next(steps) if has else ad.Zero(x.aval.to_tangent_aval())
            for x, has in zip(outs, split.has_tangent, strict=True)
        ]

    return (
        outs,
        list(split.has_tangent),
        [*(leaves[i] for i in split.taken), *found[count:]],
        derivative,
    )


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    """Results and their tangents, where a transformation (`jax.jvp`, or that of a checkpoint) asks
    for both at once."""
    varies = [_is_tangent(t) for t in tangents]
    try:
        outs, _, residuals, derivative = _linearize(False, varies, *primals, **params)
    except (NotImplementedError, TypeError, ValueError):
        try:
            return _pushed(primals, tangents, **params)
        except (NotImplementedError, TypeError):
            # Some operation knows its backward pass alone, which may be what is asked for next.
            outs, _, residuals, derivative = _linearize(True, varies, *primals, **params)
    return outs, derivative(residuals, *tangents)


def _pushed(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    """Results and tangents by one call: some operation gives both at once."""
    tier_leaves = params["tier_leaves"]
    leaves = leaves_of(primals, tier_leaves)
    moves = leaves_of(tangents, tuple((i, None) for i, _ in tier_leaves))
    varies = tuple(t is not None and _is_tangent(t) for t in moves)
    key = ("pushed", id(params["jaxpr"]), varies, compat.trace_context())

    def make() -> tuple[Any, Derivative]:
        return params["jaxpr"], pushed(_written(params), varies)

    both = params["derived"].get().derivatives.get(key, make)[1]
    moving = [t for t, varying in zip(moves, varies, strict=True) if varying]
    found = _call(
        both.jaxpr,
        [*leaves, *moving],
        params,
        (*_names(params, len(leaves)), *_TANGENT * len(moving)),
        params["kinds"] + (TensorKind.ACTIVATION,) * len(moving),
        *both.derived,
    )
    outs = found[: len(params["jaxpr"].out_avals)]
    steps = iter(found[len(outs) :])
    return outs, [
        next(steps) if _is_inexact(x) else ad.Zero(x.aval.to_tangent_aval()) for x in outs
    ]


def _written(params: dict[str, Any]) -> Any:
    """The jaxpr with the rules of its operations, where there are any beside JAX's own."""
    return params["derived"].written or params["jaxpr"]


_RESIDUAL, _TANGENT, _COTANGENT = ("what is kept for the derivative",), ("tangent",), ("cotangent",)


def _is_inexact(x: Any) -> bool:
    return jax.typeof(x).to_tangent_aval().dtype != jax.dtypes.float0


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


def _refuse(*operands: Any, **params: Any) -> Any:
    """What takes the place of a derivative that has its transpose alone."""
    raise TypeError(
        f"offload({params['name']}) is differentiated forward (jax.jvp), and calls an operation "
        "that has a rule for the backward pass alone (custom_vjp). Use jax.vjp or jax.grad."
    )


def _transpose(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    tier_leaves = params["tier_leaves"]
    leaves = leaves_of(operands, tier_leaves)
    is_linear = tuple(ad.is_undefined_primal(x) for x in leaves)
    is_zero = tuple(isinstance(ct, ad.Zero) for ct in cotangents)
    if all(is_zero):
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands]
    key = ("transposed", id(params["jaxpr"]), is_linear, is_zero, compat.trace_context())

    def make() -> tuple[Any, Derivative]:
        return params["jaxpr"], transposed(_written(params), is_linear, is_zero)

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
        made, out_axes = compat.batched(_written(params), axis, axes)
        jaxpr, derived = lowered(made)
        return params["jaxpr"], jaxpr, out_axes, derived

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
    compat.register_linearization(offload_p, _linearize)
    ad.primitive_transposes[offload_p] = _transpose
    offload_p.to_lojax = _refuse  # JAX asks for it where a jaxpr has such operations
    compat.register_batcher(offload_p, _batch)
    compat.register_check(offload_p, _check)
    compat.register_jet(offload_p, _jet)

"""What cannot be cut into vertices, and runs whole or not at all.

A vertex runs at a time that nobody chose, on one device, and knows nothing of what is around the
function. What has effects, spreads work over devices, or speaks to a transformation around the
function is therefore left to `jax.jit`.
"""

from collections.abc import Callable, Iterator
from typing import Any

from jaxoffload import _jax_compat as compat

_FEEDS = frozenset({"infeed", "outfeed"})
"""They have effects in the order of the program, of which JAX says nothing."""
_HARMLESS = frozenset({None, "call"})
_SPREAD = frozenset({"shard_map", "xla_pmap", "pmap"})


def reason_to_run_whole(jaxpr: Any) -> str | None:
    """Why a closed jaxpr cannot be cut, with the user's line and what to do; None if it can be."""
    return next(filter(None, map(reason_of, jaxpr.eqns)), None)


def must_run_whole(jaxpr: Any) -> bool:
    """Whether nothing that is still to come can make a closed jaxpr one that can be cut.

    `vmap` takes named axes away and `checkify` checks; `shard_map` leaves its axes there.
    """
    kinds = set(map(compat.effect_kind, jaxpr.effects)) - _HARMLESS
    if kinds and (
        kinds == {"check"} or (kinds == {"named axis"} and not compat.in_manual_region())
    ):
        return False
    return reason_to_run_whole(jaxpr) is not None


def spreads(eqn: Any) -> bool:
    """Whether an equation spreads work over several devices."""
    return eqn.primitive.name in _SPREAD or compat.devices_of_constraint(eqn) > 1


def reason_of(eqn: Any) -> str | None:
    """Why an equation cannot be a part of a vertex, or the first such reason in its bodies."""
    name, line = eqn.primitive.name, compat.source_line(eqn.source_info)
    if spreads(eqn):
        return (
            f"{name} at {line} spreads work over several devices, and vertices run on one. Offload "
            "what each device computes instead: jax.shard_map(offload(f), ...)."
        )
    for body in bodies_of(eqn):
        # Effects that the equation does not have are its own affair, such as a kernel's Refs.
        inner = body.eqns if eqn.effects else (e for e in body.eqns if not e.effects)
        if (reason := next(filter(None, map(reason_of, inner)), None)) is not None:
            return reason
    kinds = {compat.effect_kind(effect): effect for effect in eqn.effects}
    if name in _FEEDS:
        return _ordered(f"{name} at {line}", None)
    for kind, effect in kinds.items():
        if kind is not None and kind not in _HARMLESS:
            return _REASONS[kind](f"{name} at {line}", effect)
    return None


def with_bodies(eqn: Any) -> Iterator[Any]:
    """An equation and all equations in its bodies."""
    yield eqn
    for body in bodies_of(eqn):
        for inner in body.eqns:
            yield from with_bodies(inner)


def every_equation(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of its loops and calls, too."""
    return (inner for eqn in jaxpr.eqns for inner in with_bodies(eqn))


def bodies_of(eqn: Any) -> Iterator[Any]:
    """The open jaxprs among an equation's params."""
    for param in eqn.params.values():
        for item in param if isinstance(param, tuple | list) else (param,):
            body = item.jaxpr if isinstance(item, compat.ClosedJaxpr) else item
            if isinstance(body, compat.Jaxpr):
                yield body


def _ordered(what: str, effect: Any) -> str:
    return (
        f"{what} is ordered among all that the program does, and vertices run at times that nobody "
        "chose. Call the offloaded function outside of jax.jit and on one device, where the order "
        "of its own is kept; leave ordered=True out; or return the value and use it after the "
        "call."
    )


def _named_axis(what: str, effect: Any) -> str:
    return (
        f"{what} is over the axis {effect.name!r} of a transformation around the offloaded "
        "function, of which vertices know nothing. Offload the whole of it: "
        f"offload(jax.vmap(f, axis_name={effect.name!r}))."
    )


def _check(what: str, effect: Any) -> str:
    return (
        f"{what} is a check that has not been made into a result. Offload what checkify gives: "
        "offload(checkify.checkify(f)), or call checkify.checkify(offload(f))."
    )


def _ref(what: str, effect: Any) -> str:
    return (
        f"{what} reads or writes a Ref that is not the function's own, and vertices run at times "
        "that nobody chose. Pass its value as an argument and return the new one, or make the Ref "
        "in the function."
    )


def _other(what: str, effect: Any) -> str:
    return (
        f"{what} has an effect outside the function ({type(effect).__name__}), and vertices run at "
        "times that nobody chose. Move it out of the offloaded function."
    )


_REASONS: dict[str, Callable[[str, Any], str]] = {
    "ordered": _ordered, "named axis": _named_axis, "check": _check, "ref": _ref, "other": _other,
}  # fmt: skip

"""Equations of a jaxpr: what they say, and how they are applied."""

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import callback as _callback
from jax._src import checkify as _checkify
from jax._src import config as _config
from jax._src import core as _core
from jax._src import debugging as _debugging
from jax._src import effects as _effects
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.interpreters import pxla as _pxla

from jaxoffload._jax_compat.tracing import no_mesh
from jaxoffload._jax_compat.types import ClosedJaxpr, JaxprEqn, Primitive, ShapedArray, partitions


def with_results(closed: Any, outvars: Sequence[Any]) -> Any:
    """A closed jaxpr that gives other variables of itself."""
    return closed.replace(jaxpr=closed.jaxpr.replace(outvars=list(outvars)))


def evaluate(eqn: JaxprEqn, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Applies one equation, with other params if need be, under the settings it was traced with.

    No mesh is around it: what says where results are to be is left out.
    """
    params = {k: None if k in ("sharding", "out_sharding") else v for k, v in params.items()}
    context = getattr(eqn, "ctx", None)
    with context.manager if context is not None else contextlib.nullcontext(), no_mesh():
        functions, bind_params = _bind_params(eqn.primitive, params)
        out = eqn.primitive.bind(*functions, *operands, **bind_params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _bind_params(primitive: Any, params: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    found = primitive.get_bind_params(params)
    return found if isinstance(found, tuple) else ((), found)


_CALLS = (_debugging.DebugEffect, _callback.IOEffect)
_ORDERED_CALLS = (_debugging.OrderedDebugEffect, _callback.OrderedIOEffect)


def effect_kind(effect: Any) -> str | None:
    """What an effect is: "call" (of a function of the host's, whenever the program comes to it),
    "ordered" (such a call, after all those before it), "named axis", "check", "ref", "other"; None
    where it is the function's own affair."""
    if isinstance(effect, _core.InternalMutableArrayEffect):
        return None
    kinds = {
        "call": _CALLS,
        "ordered": _ORDERED_CALLS,
        "named axis": _core.NamedAxisEffect,
        "check": _checkify.ErrorEffect,
        "ref": _effects.JaxprInputEffect,
    }
    return next((name for name, kind in kinds.items() if isinstance(effect, kind)), "other")


CONSTRAINTS = frozenset({"sharding_constraint", "reshard", "mesh_cast"})
"""Operations that say how their operand is to be spread."""


def wanted_sharding(eqn: JaxprEqn) -> Any:
    """What an equation of CONSTRAINTS says."""
    return eqn.params.get("sharding", eqn.params.get("dst_sharding"))


def devices_of_constraint(eqn: JaxprEqn) -> int:
    """Over how many devices an equation constrains its operand to be spread; 1 for any other."""
    if eqn.primitive.name not in CONSTRAINTS:
        return 1
    sharding = wanted_sharding(eqn)
    spec = getattr(sharding, "spec", None)
    is_cut = spec is None or any(part is not None for part in partitions(spec))
    if not (is_cut or getattr(spec, "unreduced", ())):
        return 1  # every device is to have all of it
    mesh = getattr(sharding, "mesh", None)
    if mesh is not None:  # an abstract one knows no devices, and that of no axes no size
        return mesh.size or 1
    return len(getattr(sharding, "device_set", ())) or 1


CALLBACKS = {
    _callback.pure_callback_p: _callback.pure_callback_impl,
    _callback.io_callback_p: _callback.io_callback_impl,
    _debugging.debug_callback_p: _debugging.debug_callback_impl,
    _debugging.debug_print_p: _debugging.debug_print_impl,
}
"""Primitives that call a function of the host's, and how JAX calls it: with arrays in host memory
and the equation's params."""


def with_a_result(eqn: JaxprEqn) -> JaxprEqn:
    """An equation without results, that has an effect; a scan gives a byte for each step then."""
    if eqn.primitive.name != "scan":
        return eqn
    closed = eqn.params["jaxpr"]
    byte = np.dtype(np.uint8)
    given = with_results(closed, [_core.Literal(byte.type(0), ShapedArray((), byte))])
    out = _core.Var(ShapedArray((eqn.params["length"],), byte))
    return eqn.replace(outvars=[out], params={**eqn.params, "jaxpr": given})


def platforms_of(eqn: JaxprEqn) -> Sequence[Sequence[str] | None] | None:
    """Of a conditional that chooses by platform the names of each branch, None for any other; None
    of any other equation."""
    return eqn.params.get("branches_platforms") if eqn.primitive.name == "cond" else None


def call_in_place(eqn: JaxprEqn, body: ClosedJaxpr, operands: Sequence[Any]) -> JaxprEqn:
    """A call of a closed jaxpr on operands in an equation's place."""
    return eqn.replace(
        primitive=_core.closed_call_p,
        invars=list(operands),
        params={"call_jaxpr": body},
        effects=body.effects,
    )


def calls_back(jaxpr: Any) -> bool:
    """Whether an equation of an open jaxpr, or of one in it, is of `CALLBACKS`."""
    return any(eqn.primitive in CALLBACKS for eqn in jaxpr.eqns) or any(
        map(calls_back, _core.subjaxprs(jaxpr))
    )


def inner_jaxprs(eqn: JaxprEqn) -> list[Any]:
    """The open jaxprs in an equation's parameters."""
    return list(_core.jaxprs_in_params(eqn.params))


def without_internal_refs(closed: Any) -> Any:
    """The same closed jaxpr, with the Refs that it makes for itself replaced by values."""
    if any(isinstance(e, _core.InternalMutableArrayEffect) for e in closed.effects):
        return _pxla._discharge_internal_refs(closed)
    return closed


def equation_context(eqn: JaxprEqn) -> tuple[Any, ...]:
    """The settings that `evaluate` puts an equation under, to be compared."""
    context = getattr(eqn, "ctx", None)
    if context is None:
        return ()
    metadata = context.xla_metadata
    return (
        context.compute_type,
        context.threefry_partitionable,
        getattr(context, "cur_abstract_mesh", None),
        getattr(context, "remove_size_one_mesh_axis", None),
        None if metadata is None else tuple(sorted(metadata.items())),
    )


def is_on_host(eqn: JaxprEqn) -> bool:
    """Whether an equation was traced to run on the host's cores (`compute_on`)."""
    return getattr(getattr(eqn, "ctx", None), "compute_type", None) == "device_host"


def asks_for_host(eqn: JaxprEqn) -> bool:
    """Whether that is asked for an equation, or for what it calls."""
    by_name = eqn.primitive.name == "compute_on" and eqn.params["compute_type"] == "device_host"
    return by_name or is_on_host(eqn)


def put(eqn: JaxprEqn, on_host: bool) -> JaxprEqn:
    """An equation that is to run on the host's cores, or is not."""
    context = getattr(eqn, "ctx", None)
    if context is None or is_on_host(eqn) == on_host:
        return eqn
    with context.manager:  # which puts the setting back
        _config.compute_on_context_manager.set_local("device_host" if on_host else None)
        return eqn.replace(ctx=type(context)())


def puts_in_spaces(eqn: JaxprEqn) -> bool:
    """Whether a `device_put` names memory spaces, and no device."""
    spaces = (type(None), jax.memory.Space)
    return all(isinstance(place, spaces) for place in eqn.params["devices"])


def lowered_operations(closed: Any) -> Any:
    """The same jaxpr with operations of JAX's own, where it has some that a library or a newer
    transformation (`jax_remat3`) defines in terms of others; types defined so stay."""
    jaxpr = getattr(closed, "jaxpr", closed)
    if not getattr(jaxpr, "is_high", False):
        return closed
    if any(getattr(aval, "is_high", False) for aval in (*closed.in_avals, *closed.out_avals)):
        return closed
    return _partial_eval.lower_jaxpr2(closed)


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Numbers of constants and of carried values among a scan's operands.

    jax 0.10 writes them into the params, jax 0.11 a tree of the operands.
    """
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].update(tuple(range(len(eqn.invars)))).unpack()
    return len(list(consts)), len(list(carry))


@functools.cache
def own_primitives(num_modules: int) -> frozenset[int]:
    """Ids of the primitives that JAX itself defines, in modules that are loaded.

    Args:
      num_modules: how many there are: another number asks anew.
    """
    found = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "jax":
            found.update(id(x) for x in vars(module).values() if isinstance(x, Primitive))
    return frozenset(found)


def is_own_primitive(primitive: Any) -> bool:
    """Whether JAX itself defines a primitive: its name and JAX's version then say what it does."""
    return id(primitive) in own_primitives(len(sys.modules))


def in_dense_operations(primitive: Primitive) -> Callable[..., Any] | None:
    """What an operation on `jax.experimental.sparse`'s BCOO arrays is lowered to, or None.

    Returns:
      A function of its arrays and params; None for another, or where a library is to run it.
    """
    if not primitive.name.startswith("bcoo_") or _config.bcoo_cusparse_lowering.value:
        return None
    module = sys.modules.get("jax.experimental.sparse.bcoo")
    return getattr(module, f"_{primitive.name}_impl", None)


def is_tree_of_params(value: Any) -> bool:
    """Whether a param is a tree of JAX's own that says which operands are what (`scan_counts`)."""
    return type(value).__module__ == "jax._src.flattree"

"""Calls over several devices inside `jax.jit` and other transformations.

Takes a call that is lowered for several devices. Where a function has shard_maps, they say how its
arrays are cut. Of another nobody knows while a program is traced and lowered; XLA's partitioner
does, and asks what each device has to do. What is planned then is the function over several devices
(capture/spread.py), as for direct calls, and each device's program has its part of the one custom
call (devices_call.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.collectives import Axes
from jaxoffload.capture.placing import Spec
from jaxoffload.capture.spread import Spread, is_spread, partition, spread, wanted_mesh
from jaxoffload.capture.spread_factors import likenesses
from jaxoffload.capture.spread_hints import part_of, spec_of
from jaxoffload.capture.whole import every_equation, spreads
from jaxoffload.errors import CaptureError, PlanError
from jaxoffload.options import Options
from jaxoffload.runtime.request import pair_donated
from jaxoffload.search.whole import Whole, is_always_cut, may_run_whole
from jaxoffload.transform.derived import Link
from jaxoffload.transform.devices_call import Asked, call_of_all, call_of_each
from jaxoffload.transform.held import Held
from jaxoffload.transform.primitive import evaluate, lower, offload_p
from jaxoffload.transform.shards import options_of_each, request_of_each
from jaxoffload.transform.targets import kept_by


def _lower(backend_name: str, context: Any, *operands: Any, **params: Any) -> Any:
    if not (compat.is_export(context) or compat.is_lowering_kernels()):
        call = _as_written(params)
        if call is not None:
            return mlir.lower_fun(call, multiple_results=True)(context, *operands)
    if backend_name != "cpu" or not _is_over_devices(context, params):
        return lower(backend_name, context, *operands, **params)
    kept: list[Any] = []  # by the program
    compat.keep_alive(context, Held(params["name"], kept))
    call = custom_partitioning(lambda *operands: offload_p.bind(*operands, **params))
    settings = compat.LoweringSettings()  # a program may be compiled elsewhere

    def parts(mesh: Any, arguments: Sequence[Any], results: Sequence[Any]) -> Any:
        with settings.restored():
            return _parts(params, kept, settings, mesh, arguments, results)

    call.def_partition(parts, sharding_rule=_rule(params))
    return compat.lower_partitioned(context, call, *operands)


def _as_written(params: dict[str, Any]) -> Callable[..., list[Any]] | None:
    """The call on all devices of a function whose shard_maps say how they take its arguments; None
    where there are none, or nobody knows what each device does."""
    jaxpr, derived = params["jaxpr"], params["derived"]
    if params["tier_leaves"]:
        return None
    mesh = compat.context_mesh()
    own = () if mesh is None else (mesh,)

    def make() -> tuple[Any, Callable[..., list[Any]] | None]:
        if not is_spread(jaxpr):
            return jaxpr, None
        try:
            made = derived.get().spread_as_written(jaxpr, lambda: spread(jaxpr, own))
        except CaptureError:
            return jaxpr, None
        asked = _asked(params, made, params["options"])

        def call(*leaves: Any) -> list[Any]:
            return call_of_all(leaves, made, asked, derived)

        call.__name__ = params["name"]
        return jaxpr, jax.jit(call)

    # The jaxpr is kept, and so its id.
    key = ("as written", id(jaxpr), mesh, params["donated"], params["options"])
    return derived.get().plans.get(key, make)[1]


def _evaluate(*operands: Any, **params: Any) -> list[Any]:
    """What an eager transformation makes of a call."""
    params["donated"] = (False,) * len(params["donated"])
    arrays = _arrays(operands, params)
    call = _as_written(params)
    if call is None and not params["tier_leaves"] and _are_spread(arrays):
        jaxpr = params["jaxpr"]
        key = ("partitioned", id(jaxpr), params["options"])
        make = lambda: (jaxpr, jax.jit(functools.partial(offload_p.bind, **params)))  # noqa: E731
        call = params["derived"].get().plans.get(key, make)[1]
    outs = evaluate(*arrays, **params) if call is None else call(*arrays)
    return compat.typed(outs, [a.weak_type for a in params["jaxpr"].out_avals])


def _arrays(operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Operands as the jaxpr has them: an eager transformation passes a number of Python's on, as a
    cotangent for one, and one of NumPy's with a dtype of its own."""
    below = {i for i, _ in params["tier_leaves"]}
    avals = [a for i, a in enumerate(params["jaxpr"].in_avals) if i not in below]
    arrays = [
        x if isinstance(x, jax.Array) else np.asarray(x, aval.dtype)
        for x, aval in zip(operands, avals, strict=False)
    ]
    return [*arrays, *operands[len(arrays) :]]  # stamps may follow


def _are_spread(operands: Sequence[Any]) -> bool:
    """Whether arrays, or what `jax.set_mesh` has set, are of several devices."""
    return compat.context_mesh() is not None or any(
        isinstance(x, jax.Array) and len(x.sharding.device_set) > 1 for x in operands
    )


def _is_over_devices(context: Any, params: dict[str, Any]) -> bool:
    """Whether XLA is to be asked how arguments are cut."""
    if not compat.is_to_be_partitioned(context) or params["tier_leaves"] or params["fixed"]:
        return False
    jaxpr = params["jaxpr"]
    if compat.is_export(context) or compat.is_lowering_kernels() or jaxpr.effects:
        return False
    if not (jaxpr.in_avals and jaxpr.out_avals):  # XLA refuses a rule for such an operation
        return False
    options = params["options"]
    if options.memory is not None or not may_run_whole(options, ()):
        return False
    if is_always_cut(options):
        return True
    # What fits one device as it is XLA may divide.
    whole = Whole(jaxpr, params["donated"], params["name"])
    return not whole.surely_fits(options.device_memory)


def _rule(params: dict[str, Any]) -> SdyShardingRule:
    """Which dimensions of operands and results are cut alike. A result is like one operand, and no
    operand is like another: nothing that is given is moved for what is wanted."""
    jaxpr = params["jaxpr"]
    pairs = pair_donated(jaxpr.in_avals, jaxpr.out_avals, params["donated"])
    inputs = [
        ArrayMapping(*[f"a{i}_{d}" for d in range(len(aval.shape))])
        for i, aval in enumerate(jaxpr.in_avals)
    ]
    outputs = []
    for j, (aval, likeness) in enumerate(
        zip(jaxpr.out_avals, likenesses(jaxpr, pairs), strict=True)
    ):
        own = [f"r{j}_{d}" for d in range(len(aval.shape))]
        if likeness is not None:
            source, dims = likeness
            own = [n if d is None else inputs[source][d] for n, d in zip(own, dims, strict=True)]
        outputs.append(ArrayMapping(*own))
    return SdyShardingRule(tuple(inputs), tuple(outputs))


def _parts(
    params: dict[str, Any],
    kept: list[Any],
    settings: compat.LoweringSettings,
    mesh: Any,
    arguments: Sequence[Any],
    results: Sequence[Any],
) -> Any:
    """What XLA's partitioner is told: how operands are to be cut, what each device does of them,
    and how results are cut then.

    Args:
      kept: takes what lives as long as the program.
      settings: of the place where it was lowered.
      arguments, results: shapes, with the shardings that XLA would give them.
    """
    cut, wanted = _specs(arguments, mesh), _specs(results, mesh)
    is_cut = any(map(any, cut)) or wanted_mesh(params["jaxpr"]) is not None
    made = _spread(params, mesh, cut, wanted) if is_cut else None
    if isinstance(made, CaptureError) and any(map(spreads, every_equation(params["jaxpr"]))):
        raise CaptureError(str(made))  # one device cannot do all of it
    if not isinstance(made, Spread):  # each device does all
        function = functools.partial(offload_p.bind, **params)
        in_specs, out_specs = ([PartitionSpec()] * len(each) for each in (arguments, results))
    else:
        asked = _asked(params, made, options_of_each(params["options"], made.devices))
        function = call_of_each(made, asked, params["derived"])
        in_specs, out_specs = made.in_specs, made.out_specs
    of_each = _Part(function, params["derived"], kept, settings)

    def part(*local: Any) -> list[Any]:
        with settings.restored(), compat.no_mesh():  # no type says how one device's part is cut
            return list(part_p.bind(*local, of_each=of_each))

    there = [[NamedSharding(mesh, spec) for spec in each] for each in (in_specs, out_specs)]
    return mesh, part, there[1], tuple(there[0])


def _asked(params: dict[str, Any], made: Spread, options: Options) -> Asked:
    """What is planned, with the options of each device."""
    request = request_of_each(
        made,
        params["name"],
        params["kinds"],
        params["donated"],
        options,
        argument_names=params["argument_names"],
    )
    return Asked(request, made.devices)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """What a device does, as a param: a part of a program, which keeps nothing alive by itself.

    Attributes:
      derived: takes what refuses it.
      kept: takes what is to live as long as the program.
      settings: in which it is lowered.
    """

    function: Callable[..., Any]
    derived: Link
    kept: list[Any]
    settings: compat.LoweringSettings


part_p = compat.Primitive("jaxoffload_part")
part_p.multiple_results = True


@part_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, of_each: _Part) -> tuple[list[Any], Any]:
    made = jax.make_jaxpr(of_each.function)(*avals)
    return list(made.out_avals), made.effects


def _lower_part(context: Any, *operands: Any, of_each: _Part) -> Any:
    with of_each.settings.restored(), kept_by(of_each.kept):
        try:
            return mlir.lower_fun(of_each.function, multiple_results=True)(context, *operands)
        except PlanError as error:
            of_each.derived.get().refusal = error
            raise


def _spread(
    params: dict[str, Any], mesh: Any, in_specs: Sequence[Spec], out_specs: Sequence[Spec]
) -> Spread | CaptureError:
    """The program of each device, or why there is none."""
    jaxpr, derived = params["jaxpr"], params["derived"].get()
    pairs = pair_donated(jaxpr.in_avals, jaxpr.out_avals, params["donated"])

    def make() -> tuple[Any, Spread | CaptureError]:
        try:
            found = spread(
                jaxpr, [mesh], [*map(partition, in_specs)], pairs, [*map(partition, out_specs)]
            )
        except CaptureError as error:
            return jaxpr, error
        return jaxpr, found

    # The jaxpr is kept, and so its id.
    key = ("spread", id(jaxpr), mesh, tuple(in_specs), tuple(out_specs))
    return derived.plans.get(key, make)[1]


def _specs(shapes: Sequence[Any], mesh: Any) -> list[Spec]:
    """How arrays are cut. What cannot be divided equally every device has."""
    axes = Axes(dict(zip(mesh.axis_names, mesh.devices.shape, strict=True)))
    found = []
    for x in shapes:
        spec = spec_of(x.sharding.spec, len(x.shape))
        for d in range(len(spec)):
            if part_of(x.shape[d : d + 1], spec[d : d + 1], axes) is None:
                spec = (*spec[:d], (), *spec[d + 1 :])
        found.append(spec)
    return found


def register() -> None:
    """Tells JAX of it."""
    offload_p.def_impl(_evaluate)
    compat.needs_devices_to_be_lowered(offload_p)
    mlir.register_lowering(part_p, _lower_part, platform="cpu", cacheable=False)
    for name in ("cpu", "cuda"):
        mlir.register_lowering(
            offload_p, functools.partial(_lower, name), platform=name, cacheable=False
        )

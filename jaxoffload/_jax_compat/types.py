"""Types of JAX, and what an abstract value, an array or a dtype is."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
from jax._src import array as _array
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src.lax import lax as _lax

ClosedJaxpr = jex.core.ClosedJaxpr
Jaxpr = jex.core.Jaxpr
JaxprEqn = jex.core.JaxprEqn
Literal = jex.core.Literal
Primitive = jex.core.Primitive
DropVar = _core.DropVar
ShapedArray = _core.ShapedArray
Tracer = jax.core.Tracer
ArrayImpl = _array.ArrayImpl
"""The type of arrays that hold numbers. To compare types takes far less than `isinstance` with
`jax.Array`, which asks Python."""


def physical(aval: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the bytes of an array or abstract value (a PRNG key is uint32 words)."""
    if not isinstance(aval, ShapedArray):
        aval = ShapedArray(aval.shape, aval.dtype)
    aval = _core.physical_aval(aval)
    return tuple(aval.shape), np.dtype(aval.dtype)


def byte_count(aval: Any) -> int:
    """Bytes of an array or abstract value; nothing for what has no memory (a token)."""
    if not hasattr(aval, "dtype"):
        return 0
    shape, dtype = physical(aval)
    return math.prod(shape) * dtype.itemsize


def product_types(algorithm: Any, *dtypes: Any) -> tuple[Any, Any, Any]:
    """The dtypes in which a product's factors are taken, and summed.

    Args:
      algorithm: `jax.lax.DotAlgorithm`, or a preset.
      dtypes: of both factors and of the result.
    """
    return _lax.get_algorithm_compute_types(algorithm, *dtypes)


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of typed PRNG keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def is_key_dtype(value: Any) -> bool:
    """Whether something is a dtype of typed PRNG keys."""
    return isinstance(value, _dtypes.ExtendedDType) and is_key(value)


def bits(dtype: Any) -> int:
    """Bits of an element, which below eight are fewer than those of NumPy's elements."""
    return _dtypes.itemsize_bits(dtype)


def is_small(dtype: Any) -> bool:
    """Whether elements of a dtype take less than a byte, so that XLA packs them on a GPU."""
    return not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) and bits(dtype) in (2, 4)


def is_array_like(x: Any) -> bool:
    """Whether a function of arrays may return it."""
    return _core.valid_jaxtype(x)


def is_extended(aval: Any) -> bool:
    """Whether a value's dtype is known to JAX only (PRNG keys, for one)."""
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)


def is_ref(x: Any) -> bool:
    """Whether a leaf is a mutable array."""
    return isinstance(x, jax.Ref)


def is_symbolic(x: Any) -> bool:
    """Whether a leaf's shape is not known yet."""
    return not all(isinstance(size, int) for size in getattr(x, "shape", ()))


def key_impl_name(dtype: Any) -> str:
    """The name of a key dtype's PRNG implementation, as `wrap_key_data` takes it."""
    return dtype._impl.name


def mean_nothing(value: Any) -> bool:
    """Whether a mesh, a sharding or an environment of named axes says nothing: one device, and no
    axis has a name."""
    if isinstance(value, jax.sharding.NamedSharding):
        mesh, spec = value.mesh, value.spec
        return mean_nothing(mesh) and not any(partitions(spec)) and value.memory_kind is None
    if isinstance(value, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        return value.empty
    if isinstance(value, _core.AxisEnv):
        return not (value.axis_sizes or value.spmd_axis_names or value.explicit_mesh_axis_names)
    return type(value).__name__ == "UnspecifiedValue"


def own_key_impl(impl: Any) -> str | None:
    """The name of an implementation of PRNG keys, if it is one of JAX's own."""
    if type(impl).__name__ != "PRNGImpl":
        return None
    modules = [getattr(part, "__module__", "") for part in impl if callable(part)]
    return impl.name if all(module.startswith("jax.") for module in modules) else None


def placement(aval: Any) -> tuple[Any, ...]:
    """What an abstract value says beside shape, dtype and weak type, to be compared."""
    manual = getattr(aval, "mat", None)
    parts = ("varying", "unreduced", "reduced", "unreduced_kind")
    layout = getattr(aval, "layout", None)
    return (
        aval.sharding,
        aval.memory_space,
        getattr(aval, "vma", None),
        *(getattr(manual, part, None) for part in parts),
        None if type(layout).__name__.startswith("AutoLayout") else layout,
    )


def is_in_host_space(x: Any) -> bool:
    """Whether an array, a tracer or an abstract value has JAX's memory space for host memory."""
    aval = getattr(x, "aval", x)
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def is_on_device(x: Any) -> bool:
    """Whether it is an array in the memory of a device, as far as JAX's memory spaces say."""
    return isinstance(x, jax.Array) and not is_in_host_space(x)


def without_space(aval: Any) -> Any:
    """An abstract value in the usual memory space."""
    return aval.update(memory_space=jax.memory.Space.Device) if is_in_host_space(aval) else aval


def put_in_spaces(arrays: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Arrays or tracers where abstract values have them: JAX looks for operations of its own to
    tell which results of a program are in host memory, and on a GPU believes no others."""
    return [
        jax.device_put(x, jax.memory.Space.Host) if is_in_host_space(aval) else x
        for x, aval in zip(arrays, avals, strict=True)
    ]


def shape_struct(shape: Any, dtype: Any, weak: bool, where: Any) -> Any:
    """What is traced with for an array.

    Args:
      where: as `sharding_in_type` has it.
    """
    if where is jax.memory.Space.Host:
        return ShapedArray(shape, dtype, weak_type=weak, memory_space=where)
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak, sharding=where)


def sharding_in_type(array: Any) -> Any:
    """How an array, or what has its shape, is spread, where that is part of its type: over axes of
    a mesh that are explicit; `jax.memory.Space.Host` of one in host memory. None elsewhere."""
    is_traced = isinstance(array, Tracer)
    sharding = explicit(array.aval if is_traced else array)
    if _size(sharding) > (0 if is_traced else 1):
        return sharding
    may_be = is_traced or _size(getattr(array, "sharding", None)) <= 1
    return jax.memory.Space.Host if may_be and is_in_host_space(array) else None


def explicit(array: Any) -> Any:
    """How an array or abstract value is spread over axes of a mesh that are explicit, or None."""
    sharding: Any = getattr(array, "sharding", None)
    return sharding if _size(sharding) and _EXPLICIT in sharding.mesh.axis_types else None


_EXPLICIT = jax.sharding.AxisType.Explicit


def _size(sharding: Any) -> int:
    """Devices of a sharding's mesh; 0 where it has none."""
    mesh = getattr(sharding, "mesh", None)
    return 0 if mesh is None else mesh.size


def partitions(spec: Any) -> tuple[Any, ...]:
    """The axes along each dimension that a PartitionSpec names: JAX lets nobody iterate over one
    that says "reduced" or "unreduced"."""
    return spec.partitions if hasattr(spec, "partitions") else tuple(spec)


def zeros(like: Any) -> Any:
    """Zeros of a shape and a dtype, spread as its type says."""
    if (sharding := explicit(like)) is None:
        return jnp.zeros(like.shape, like.dtype)
    return jnp.zeros(like.shape, like.dtype, out_sharding=sharding)

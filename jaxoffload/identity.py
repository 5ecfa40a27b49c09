"""What makes two things the same: literals, params, operations, kernels, statics, contexts.

Everything that is kept and found again (a traced program, a kernel, an executable) is kept by a
`Key`. Keys are made of structure and bytes, never of printed text, which rounds numbers and leaves
constants out, and never by Python's `==` on numbers, for which 1, 1.0 and True are one and 0.0 is
-0.0. They are interned: equal parts give the same object, so that a key costs one hash of its own
parts when it is made and nothing when it is compared.

What JAX compares by itself is taken as it compares it: avals, dtypes, shardings, the structure of
pytrees. A param that has no hash, and every function, is the same only as itself.
"""

import dataclasses
import hashlib
import struct
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxoffload import _jax_compat as compat

_DERIVATIVES = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd"})
"""Params that say how to differentiate: of no account to who evaluates, never the same twice."""
_DIGESTED = 256
"""Arrays of more bytes than this are kept as a digest: 256 bits of BLAKE2b."""


class Key:
    """An identity. Two keys are the same object exactly if their parts are equal.

    Attributes:
      parts: hashable.
    """

    __slots__ = ("__weakref__", "parts")

    def __init__(self, parts: tuple[Any, ...]):
        self.parts = parts

    def __repr__(self) -> str:
        return f"Key{self.parts!r}"


@dataclasses.dataclass(frozen=True)
class _Known:
    # Collecting garbage under it may run anything, once more this, too.
    lock: Any = dataclasses.field(default_factory=threading.RLock)
    keys: weakref.WeakValueDictionary[tuple[Any, ...], Key] = dataclasses.field(
        default_factory=weakref.WeakValueDictionary
    )


_known = _Known()


def intern(*parts: Any) -> Key:
    """The key of some parts, which must be hashable. It lives as long as somebody has it."""
    with _known.lock:
        key = _known.keys.get(parts)
        if key is None:
            key = _known.keys[parts] = Key(parts)
        return key


class _ById:
    """Compares by identity and keeps its object alive, so that an id is never used twice."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any):
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


def array_key(array: Any) -> Any:
    """Dtype, shape and bytes of an array or a number of a certain dtype."""
    dtype = getattr(array, "dtype", None)
    if dtype is not None and compat.is_key(dtype):
        return ("keys", dtype, array_key(jax.random.key_data(array)))
    array = np.asarray(array)
    words = np.ascontiguousarray(array).tobytes()
    if len(words) > _DIGESTED:
        words = hashlib.blake2b(words, digest_size=32).digest()
    return ("array", array.dtype, array.shape, words)


def aval_key(aval: Any) -> Any:
    """Shape and dtype of an abstract value."""
    return (tuple(aval.shape), aval.dtype)


def _number_key(value: Any) -> Any:
    """A number, string or the like with its type and its bits; None for anything else."""
    kind = type(value)
    if isinstance(value, np.generic | np.ndarray):
        return (kind, *array_key(value))
    if value is None or kind in (str, bytes):
        return (kind, value)
    dtype = getattr(value, "dtype", None)  # of JAX's own numbers
    if isinstance(value, int):  # bool, too, and enumerations of ints
        return (kind, dtype, int(value))
    if isinstance(value, float):
        return (kind, dtype, struct.pack("<d", value))
    if isinstance(value, complex):
        return (kind, dtype, struct.pack("<dd", value.real, value.imag))
    return None


def static_key(value: Any) -> Any:
    """A static argument: type and bits, inside containers and dataclasses, too; of other types what
    they themselves call equal, as `jax.jit` has it."""
    known = _number_key(value)
    if known is not None:
        return known
    kind = type(value)
    if isinstance(value, tuple | list):
        return (kind, tuple(map(static_key, value)))
    if isinstance(value, frozenset | set):
        return (kind, frozenset(map(static_key, value)))
    if isinstance(value, dict):
        return (kind, frozenset((static_key(k), static_key(v)) for k, v in value.items()))
    if dataclasses.is_dataclass(value):
        fields = (f.name for f in dataclasses.fields(value) if f.compare)
        inner = tuple(static_key(getattr(value, name)) for name in fields)
        return (kind, inner, _hashable(value))
    return (kind, _hashable(value))


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return _ById(value)
    return value


def param_key(value: Any) -> Any:
    """A param of a primitive."""
    if isinstance(value, compat.ClosedJaxpr):
        return jaxpr_key(value.jaxpr, value.consts)
    if isinstance(value, compat.Jaxpr):
        return jaxpr_key(value)
    known = _number_key(value)
    if known is not None:
        return known
    kind = type(value)
    if isinstance(value, tuple | list):
        return (kind, tuple(map(param_key, value)))
    if isinstance(value, dict):
        return (kind, tuple(sorted((str(k), param_key(k), param_key(v)) for k, v in value.items())))
    if isinstance(value, type):
        return (kind, value)
    if hasattr(value, "__array__"):
        return (kind, *array_key(value))
    if callable(value):
        return (kind, _ById(value))
    return (kind, _hashable(value))


def context_key(eqn: Any) -> Any:
    """The settings that an equation was traced with, and is evaluated under."""
    return None if eqn is None else tuple(map(param_key, compat.equation_context(eqn)))


def operation_key(eqn: Any, params: dict[str, Any]) -> Key:
    """A primitive with its params under an equation's settings."""
    items = tuple(
        (name, param_key(value))
        for name, value in sorted(params.items())
        if name not in _DERIVATIVES
    )
    return intern("operation", eqn.primitive, items, context_key(eqn))


def literal_key(literal: Any) -> Any:
    """A scalar that is written in the program."""
    weak = getattr(literal.aval, "weak_type", False)
    return ("literal", aval_key(literal.aval), weak, *array_key(literal.val))


def jaxpr_key(jaxpr: Any, consts: Sequence[Any] = ()) -> Key:
    """A jaxpr by its structure, with what it closes over; names of variables do not matter."""
    number: dict[Any, int] = {}

    def define(variables: Iterable[Any]) -> tuple[Any, ...]:
        found = []
        for variable in variables:
            number[variable] = len(number)
            found.append(variable.aval)
        return tuple(map(param_key, found))

    def read(atoms: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(
            literal_key(atom) if isinstance(atom, compat.Literal) else number[atom]
            for atom in atoms
        )

    parts: list[Any] = [define(jaxpr.constvars), define(jaxpr.invars)]
    for eqn in jaxpr.eqns:
        reads = read(eqn.invars)
        parts.append((operation_key(eqn, eqn.params), reads, define(eqn.outvars)))
    constants = tuple(map(param_key, consts))
    return intern("jaxpr", tuple(parts), read(jaxpr.outvars), constants)

"""What a function computes, as bytes that are the same in every process.

Takes a closed jaxpr, or a value of settings or options; gives bytes that differ where anything
differs on which results or plans may depend. Only what is known to be told by its bytes is encoded:
numbers, types of JAX's and NumPy's, JAX's own primitives. Everything else (functions, meshes,
primitives that others define) is refused, for it may mean something else in another process.
Source lines and names of variables do not count; equations and constants can be found again by
their numbers.
"""

import dataclasses
import enum
import hashlib
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxoffload import _jax_compat as compat

_IGNORED = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees"})
"""Params that say how to differentiate: of no account to who evaluates, never the same twice."""
_POLICY = frozenset({("remat2", "policy"), ("checkpoint", "policy")})
"""So does this one, which others may have for something else."""
_OWNERS = frozenset({"builtins", "enum", "jax", "jaxlib", "ml_dtypes", "numpy", "jaxoffload"})
"""Whose types are told by their names: versions are part of every key."""


class UnknownError(Exception):
    """Something of which it is not known what tells it apart; says what."""


class Encoder:
    """Encodes jaxprs and values."""

    def __init__(self) -> None:
        self._bodies: dict[int, _Body] = {}
        self._avals: dict[int, tuple[Any, bytes]] = {}
        self._inside = [_Body(None)]

    def equations(self) -> Iterator[Any]:
        """Of all jaxprs that were encoded, in an order that is the same in every process: those of
        a body once for each time that it is used."""
        return self._inside[0].all("equations")

    def constants(self) -> Iterator[Any]:
        """What the jaxprs close over, likewise."""
        return self._inside[0].all("constants")

    def value(self, value: Any) -> bytes:
        """A value of a param, a setting or an option.

        Raises:
          UnknownError: it is none of the kinds of which that is known.
        """
        kind = type(value)
        if value is None or value is Ellipsis:
            return _packed(b"n", repr(value).encode())
        if kind is bool or kind is int or kind is float or kind is complex:
            return _packed(b"#", kind.__name__.encode(), _bits(value))
        if kind is str or kind is bytes:
            return _packed(b"s", kind.__name__.encode(), _as_bytes(value))
        if isinstance(value, enum.Enum):
            return _packed(b"e", _name(kind), value.name.encode())
        if isinstance(value, compat.ClosedJaxpr):
            return self.closed(value)
        if isinstance(value, compat.Jaxpr):
            return self._body(value)
        if isinstance(value, compat.Literal):
            return _packed(b"l", self._aval(value.aval), self._array(value.val))
        if isinstance(value, compat.ShapedArray):
            return self._aval(value)
        if isinstance(value, np.dtype) or compat.is_key_dtype(value):
            return _dtype(value)
        if isinstance(value, type):
            return _packed(b"t", _name(value))
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            return self._array(value)
        if isinstance(value, int | float | complex):  # JAX's own numbers
            return _packed(b"#", _name(kind), _dtype(getattr(value, "dtype", None)), _bits(value))
        if (impl := compat.own_key_impl(value)) is not None:
            return _packed(b"k", impl.encode())
        if isinstance(value, tuple | list):
            return _packed(b"(", _name(kind), *map(self.value, value))
        if isinstance(value, set | frozenset):
            return _packed(b"{", _name(kind), *sorted(map(self.value, value)))
        return self._other(value)

    def closed(self, closed: Any) -> bytes:
        """A closed jaxpr with what it closes over. Raises: as `value`."""
        self._inside[-1].constants.extend(closed.consts)
        return _packed(b"c", self._body(closed.jaxpr), *map(self._array, closed.consts))

    def _other(self, value: Any) -> bytes:
        if compat.mean_nothing(value):
            return _packed(b"0")
        if compat.is_tree_of_params(value):
            return _packed(b"f", repr(value).encode())
        if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            parts = (
                _packed(b":", f.name.encode(), self.value(getattr(value, f.name))) for f in fields
            )
            return _packed(b"d", _name(type(value)), *parts)
        if hasattr(value, "items"):
            pairs = (_packed(b":", self.value(k), self.value(v)) for k, v in value.items())
            return _packed(b"m", _name(type(value)), *sorted(pairs))
        raise UnknownError(f"a {type(value).__module__}.{type(value).__qualname__}")

    def _aval(self, aval: Any) -> bytes:
        known = self._avals.get(id(aval))
        if known is None:
            if type(aval) is not compat.ShapedArray:
                raise UnknownError(f"a value of type {aval}")
            parts = (aval.shape, aval.weak_type, *compat.placement(aval))
            known = aval, _packed(b"a", _dtype(aval.dtype), *map(self.value, parts))
            self._avals[id(aval)] = known  # with the aval, so that its id stays taken
        return known[1]

    def _array(self, value: Any) -> bytes:
        dtype = getattr(value, "dtype", None)
        if dtype is not None and compat.is_key(dtype):
            return _packed(b"y", _dtype(dtype), self._array(jax.random.key_data(value)))
        if not isinstance(value, jax.Array | np.ndarray | np.generic | int | float | complex):
            raise UnknownError(f"a constant that is a {type(value).__qualname__}")
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise UnknownError("an array of Python's objects")
        words = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        digest = hashlib.blake2b(words.data, digest_size=32).digest()
        return _packed(b"v", _dtype(array.dtype), repr(array.shape).encode(), digest)

    def _body(self, jaxpr: Any) -> bytes:
        """An open jaxpr; one that is used again by its digest alone."""
        known = self._bodies.get(id(jaxpr))
        if known is None:
            known = _Body(jaxpr)
            self._inside.append(known)
            made = hashlib.blake2b(digest_size=32)
            for part in self._parts(jaxpr):
                made.update(b"%d:" % len(part) + part)
            self._inside.pop()
            known.digest = made.digest()
            self._bodies[id(jaxpr)] = known
        self._inside[-1].equations.append(known)
        self._inside[-1].constants.append(known)
        return known.digest

    def _parts(self, jaxpr: Any) -> Iterable[bytes]:
        if jaxpr.effects:
            raise UnknownError("an effect")
        number: dict[Any, int] = {}

        def define(variables: Iterable[Any]) -> bytes:
            found = []
            for variable in variables:
                number[variable] = len(number)
                found.append(self._aval(variable.aval))
            return _packed(b"v", *found)

        def read(atoms: Iterable[Any]) -> bytes:
            return _packed(
                b"r",
                *(
                    self.value(atom) if isinstance(atom, compat.Literal) else b"%d" % number[atom]
                    for atom in atoms
                ),
            )

        yield define(jaxpr.constvars)
        yield define(jaxpr.invars)
        for eqn in jaxpr.eqns:
            self._inside[-1].equations.append(eqn)
            if not compat.is_own_primitive(eqn.primitive):
                raise UnknownError(f"the primitive {eqn.primitive}, which is not JAX's own")
            yield eqn.primitive.name.encode()
            for name in sorted(eqn.params):
                if name not in _IGNORED and (eqn.primitive.name, name) not in _POLICY:
                    yield name.encode()
                    yield self.value(eqn.params[name])
            yield self.value(compat.equation_context(eqn))
            yield read(eqn.invars)
            yield define(eqn.outvars)
        yield read(jaxpr.outvars)


class _Body:
    """A jaxpr that was encoded.

    Attributes:
      jaxpr: kept, so that its id stays taken.
      digest: of what it computes.
      equations, constants: its own, and the bodies among their params, in order.
    """

    def __init__(self, jaxpr: Any):
        self.jaxpr, self.digest = jaxpr, b""
        self.equations: list[Any] = []
        self.constants: list[Any] = []

    def all(self, name: str) -> Iterator[Any]:
        """Its own equations or constants, and those of the bodies in it."""
        for part in getattr(self, name):
            if isinstance(part, _Body):
                yield from part.all(name)
            else:
                yield part


def _packed(tag: bytes, *parts: bytes) -> bytes:
    """Parts that cannot be taken for others."""
    return b"".join((tag, b"%d(" % len(parts), *(b"%d:%b" % (len(p), p) for p in parts)))


def _bits(value: Any) -> bytes:
    if isinstance(value, int):
        return b"%d" % int(value)
    if isinstance(value, float):
        return struct.pack("<d", value)
    return struct.pack("<dd", value.real, value.imag)


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value


def _dtype(dtype: Any) -> bytes:
    if dtype is None:
        return b""
    if compat.is_key(dtype):
        impl = compat.own_key_impl(dtype._impl)
        if impl is None:
            raise UnknownError(f"keys of {dtype}")
        return _packed(b"K", impl.encode())
    if not isinstance(dtype, np.dtype):
        raise UnknownError(f"the dtype {dtype}")
    return _packed(b"D", dtype.name.encode(), dtype.str.encode())


def _name(kind: type) -> bytes:
    if kind.__module__.partition(".")[0] not in _OWNERS:
        raise UnknownError(f"the type {kind.__module__}.{kind.__qualname__}")
    return f"{kind.__module__}.{kind.__qualname__}".encode()

"""From a call's arguments to flat arrays and a hashable signature, as `jax.jit` would do it."""

import dataclasses
import functools
import inspect
import numbers
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload import identity
from jaxoffload.capture.words import Code, code_of, encoded, moved_dtype
from jaxoffload.graphs.taskgraph import TensorKind
from jaxoffload.identity import Key
from jaxoffload.runtime import backends
from jaxoffload.runtime.arrays import TierArray
from jaxoffload.runtime.sharded import ShardedArray
from jaxoffload.transform.met import outside_of, refused_width

_OPTIMIZER_WORDS = frozenset(
    {
        "opt",
        "optim",
        "optimizer",
        "adam",
        "adamw",
        "mu",
        "nu",
        "moment",
        "moments",
        "momentum",
        "ema",
    }
)
_OPTIMIZER_NAMES = frozenset({"count", "trace"})
"""As Optax calls parts of its states; parts of other names say nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """All that a plan depends on.

    Attributes:
      tree: structure of the dynamic arguments, (args, kwargs).
      static: (positions and names, values) of the static arguments.
      avals: (shape, dtype, weak type) of each leaf, as words (capture/words.py).
      codes: what each leaf is the words of.
      donated: for each leaf.
      kinds: for each leaf.
      tiers: for each leaf "host", "disk", or "" for an array of JAX's or NumPy's.
      shardings: for each leaf how it is spread, where that is part of its type (a mesh has explicit
        axes), and JAX's memory space where that is the host's; None for others.
      in_numpys: leaves in NumPy's memory, where the device has memory of its own.
      in_parts: leaves of which each of several devices has a part (`ShardedArray`).
      cuts: for each leaf how it is spread over the devices of a mesh; empty where none is, and of
        functions whose shard_maps say how they take them.
      identity: of all these.
    """

    tree: Any
    static: tuple[Any, ...]
    avals: tuple[tuple[tuple[int, ...], np.dtype, bool], ...]
    codes: tuple[Code, ...]
    donated: tuple[bool, ...]
    kinds: tuple[TensorKind, ...]
    tiers: tuple[str, ...]
    shardings: tuple[Any, ...]
    in_numpys: tuple[int, ...]
    in_parts: tuple[int, ...]
    cuts: tuple[Any, ...] = ()

    identity: Key = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        found = identity.intern(
            self.tree, static_keys(self.static), self.avals, self.codes, self.donated, self.kinds,
            self.tiers, self.shardings, self.in_numpys, self.in_parts, self.cuts,
        )  # fmt: skip
        object.__setattr__(self, "identity", found)

    def key(self, *parts: Any) -> Key:
        """What tells it from others, under further circumstances (hashable)."""
        return identity.intern(self.identity, *parts)


def static_keys(static: Iterable[tuple[int | str, Any]]) -> tuple[Any, ...]:
    """What tells static arguments from others; given are (position or name, value)."""
    return tuple((where, identity.static_key(value)) for where, value in static)


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


class BeyondPlans(TypeError):
    """An argument is such as plans cannot be made for, and jit takes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call: its signature and its leaves (arrays, tracers or shapes)."""

    signature: Signature
    leaves: list[Any]


class ArgumentSpec:
    """Which arguments of a function are static and which are donated.

    Args:
      function: the user's function.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as for `jax.jit`.

    Raises:
      TypeError, ValueError: with the argument's name, its value and the remedy.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        static_argnums: Any,
        static_argnames: Any,
        donate_argnums: Any,
        donate_argnames: Any,
    ):
        self.name = _name_of(function)
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        self._parameters = parameters
        self.names = [
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        self._open = not parameters or any(p.kind == p.VAR_POSITIONAL for p in parameters)
        known = {p.name for p in parameters}
        self._any_name = not parameters or any(p.kind == p.VAR_KEYWORD for p in parameters)
        self.static_positions, self.static_names = self._both(
            "static", static_argnums, static_argnames, known
        )
        self.donated_positions, self.donated_names = self._both(
            "donate", donate_argnums, donate_argnames, known
        )
        both = self.static_positions & self.donated_positions | (
            self.static_names & self.donated_names
        )
        self._met: dict[tuple[Any, ...], Signature] = {}
        if both:
            raise ValueError(
                f"offload({self.name}): {sorted(map(str, both))} named in both donate_argnums and "
                "static_argnums. A static argument has no memory to donate; name it in one."
            )

    def _both(
        self, what: str, argnums: Any, argnames: Any, known: set[str]
    ) -> tuple[frozenset[int], frozenset[str]]:
        positions = _as_set(argnums, int, f"{what}_argnums", self.name, "an int or ints")
        names = _as_set(argnames, str, f"{what}_argnames", self.name, "a name or names")
        count = len(self.names)
        fixed = set()
        for position in positions:
            if not self._open and not -count <= position < count:
                raise ValueError(
                    f"offload({self.name}): {what}_argnums={position} is out of range: the "
                    f"function takes {count} positional arguments. Pass 0 to {count - 1}."
                )
            fixed.add(position % count if position < 0 else position)
        for name in names:
            if name not in known and not self._any_name:
                raise ValueError(
                    f"offload({self.name}): {what}_argnames={name!r} is not an argument. Pass "
                    f"one of {', '.join(sorted(known))}."
                )
        fixed |= {self.names.index(n) for n in names if n in self.names}
        names |= {self.names[p] for p in fixed if p < count}
        return frozenset(fixed), frozenset(names)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Flattens one call.

        Raises:
          TypeError: a leaf that is not an array, with its path; a static value without a hash.
        """
        static, dynamic_args = [], []
        for i, value in enumerate(args):
            if i in self.static_positions:
                static.append((i, self._hashable(value, str(i))))
            else:
                dynamic_args.append(value)
        dynamic_kwargs = {}
        for name, value in kwargs.items():
            if name in self.static_names:
                static.append((name, self._hashable(value, name)))
            else:
                dynamic_kwargs[name] = value
        leaves, tree = jax.tree.flatten((dynamic_args, dynamic_kwargs))
        outside = outside_of(leaves)
        if outside is None:
            return self._bind_each(args, static, dynamic_args, dynamic_kwargs)
        met = tree, static_keys(static), outside
        signature = self._met.get(met)
        if signature is not None:
            return Call(signature, leaves)
        call = self._bind_each(args, static, dynamic_args, dynamic_kwargs)
        self._met[met] = call.signature
        return call

    def forget(self) -> None:
        """Forgets the signatures of calls so far."""
        self._met.clear()

    def _bind_each(
        self,
        args: tuple[Any, ...],
        static: Sequence[tuple[int | str, Any]],
        dynamic_args: list[Any],
        dynamic_kwargs: dict[str, Any],
    ) -> Call:
        """The same, with a look at each leaf and its path."""
        positions = [i for i in range(len(args)) if i not in self.static_positions]
        paths, tree = jax.tree_util.tree_flatten_with_path((dynamic_args, dynamic_kwargs))
        leaves, avals, codes, donated, kinds, tiers = [], [], [], [], [], []
        shardings = [compat.sharding_in_type(leaf) for _, leaf in paths]
        for path, leaf in paths:
            by_name = path[0].idx == 1
            where = path[1].key if by_name else positions[path[1].idx]
            leaf, code, aval = self._array(leaf, path, positions)
            leaves.append(leaf)
            avals.append(aval)
            codes.append(code)
            tiers.append(leaf.tier if isinstance(leaf, TierArray) else "")
            donated.append(
                where in self.donated_names if by_name else where in self.donated_positions
            )
            if donated[-1] and isinstance(leaf, TierArray) and not leaf.writable:
                raise ValueError(
                    f"offload({self.name}): {self._path_text(path, positions)} is {leaf!r}, which "
                    "is read only, and its argument is donated. Take it out of donate_argnums, or "
                    "pass a copy: jaxoffload.disk_put(array, path)."
                )
            kinds.append(_kind(path, aval, self._path_text(path, positions)))
        apart = backends.current_name() != "cpu"
        signature = Signature(
            tree, tuple(static), tuple(avals), tuple(codes), tuple(donated), tuple(kinds),
            tuple(tiers), tuple(shardings),
            tuple(i for i, x in enumerate(leaves) if apart and isinstance(x, np.ndarray)),
            tuple(i for i, x in enumerate(leaves) if isinstance(x, ShardedArray)),
        )  # fmt: skip
        return Call(signature, leaves)

    def caller(self, function: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
        """`call(*leaves)`: the user's function with the static arguments put back."""
        static = [(w, v) for w, v in signature.static if isinstance(w, int)]
        named = {w: v for w, v in signature.static if isinstance(w, str)}

        @functools.wraps(function)
        def call(*leaves: Any) -> Any:
            args, kwargs = jax.tree.unflatten(signature.tree, leaves)
            args = list(args)
            for position, value in static:
                args.insert(position, value)
            return function(*args, **kwargs, **named)

        call.__name__ = self.name
        if self._parameters:
            hidden = {self.names[w] for w, _ in static if w < len(self.names)} | named.keys()
            dynamic = [p for p in self._parameters if p.name not in hidden]
            call.__signature__ = inspect.Signature(dynamic)  # pyrefly: ignore[missing-attribute]
        return call

    def _hashable(self, value: Any, where: str) -> Any:
        try:
            hash(value)
        except TypeError:
            raise ValueError(
                f"offload({self.name}): static argument {where} is a {type(value).__name__}, which "
                "has no hash. Pass a hashable value, or take it out of static_argnums."
            ) from None
        return value

    def name_of(self, call: Call, leaf: int) -> str:
        """What the user calls a leaf of a call."""
        return self.names_of(call.signature)[leaf]

    def names_of(self, signature: Signature) -> tuple[str, ...]:
        """What the user calls each leaf: "params['w1']"."""
        numbered = jax.tree.unflatten(signature.tree, range(len(signature.avals)))
        static = {where for where, _ in signature.static if isinstance(where, int)}
        positions = [i for i in range(len(numbered[0]) + len(static)) if i not in static]
        paths = jax.tree_util.tree_leaves_with_path(numbered)
        return tuple(self._path_text(path, positions) for path, _ in paths)

    def _path_text(self, path: Any, positions: Sequence[int]) -> str:
        if path[0].idx == 1:
            return f"{path[1].key}{jax.tree_util.keystr(path[2:])}"
        position = positions[path[1].idx]
        name = self.names[position] if position < len(self.names) else f"argument {position}"
        return f"{name}{jax.tree_util.keystr(path[2:])}"

    def _array(self, leaf: Any, path: Any, positions: Sequence[int]) -> tuple[Any, Code, Any]:
        """A leaf as it is moved, what that is the words of, and (shape, dtype, weak type)."""
        if isinstance(leaf, TierArray | jax.Array) and (wrong := refused_width(leaf)):
            raise BeyondPlans(f"offload({self.name}): {self._path_text(path, positions)} {wrong}")
        if isinstance(leaf, TierArray):
            if leaf.is_deleted():
                raise RuntimeError(
                    f"offload({self.name}): {self._path_text(path, positions)} is {leaf!r}: it was "
                    "donated or deleted. Pass the result that took its place."
                )
            return leaf, code_of(leaf), (leaf.shape, moved_dtype(leaf.dtype), False)
        if isinstance(leaf, jax.ShapeDtypeStruct | compat.Tracer | jax.Array):
            if isinstance(leaf, jax.Array) and compat.is_deleted(leaf):
                raise RuntimeError(
                    f"offload({self.name}): {self._path_text(path, positions)} is an array of "
                    f"shape {leaf.shape} that was donated or deleted. Pass the result that took "
                    "its place."
                )
            if isinstance(leaf, compat.Tracer) and compat.is_symbolic(leaf):
                raise BeyondPlans(
                    f"offload({self.name}): {self._path_text(path, positions)} has the shape "
                    f"{leaf.shape}, and plans are for shapes that are known. Export the function "
                    "itself, or pass device_memory=None."
                )
            weak, code = bool(getattr(leaf, "weak_type", False)), code_of(leaf)
            shape, dtype = compat.physical(leaf)
            if isinstance(leaf, jax.ShapeDtypeStruct):
                dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
            else:
                leaf = encoded(leaf, code)
            return leaf, code, (shape, moved_dtype(dtype), weak)
        weak = isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic)
        if compat.is_ref(leaf):
            raise BeyondPlans(
                f"offload({self.name}): {self._path_text(path, positions)} is a Ref, and vertices "
                "read and write at times that nobody chose. Pass its value, ref[...], and return "
                "the new one; or pass device_memory=None."
            )
        if not weak and not isinstance(leaf, np.ndarray | np.generic):
            raise TypeError(
                f"offload({self.name}): {self._path_text(path, positions)} is a "
                f"{type(leaf).__name__}, not an array. Pass an array, or name the argument in "
                "static_argnums if the function needs the value itself."
            )
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(leaf)))
        if isinstance(leaf, np.ma.MaskedArray):
            raise ValueError(
                f"offload({self.name}): {self._path_text(path, positions)} is a masked array, "
                "whose mask would be lost. Pass its filled() values, or data and mask apart."
            )
        if dtype.hasobject:
            raise TypeError(
                f"offload({self.name}): {self._path_text(path, positions)} has dtype object. Pass "
                "an array of numbers."
            )
        array = np.ascontiguousarray(np.asarray(leaf, dtype=dtype)).reshape(np.shape(leaf))
        code = code_of(array)
        return encoded(array, code), code, (array.shape, moved_dtype(dtype), weak)


def shapes_of(signature: Signature) -> list[Any]:
    """The leaves' shapes, to trace with."""
    return [
        compat.shape_struct(shape, dtype, weak, sharding)
        for (shape, dtype, weak), sharding in zip(signature.avals, signature.shardings, strict=True)
    ]


def _as_set(value: Any, kind: type, option: str, function: str, what: str) -> set[Any]:
    items = value if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    items = () if value is None else tuple(items)
    for item in items:
        if not isinstance(item, numbers.Integral if kind is int else kind) or isinstance(
            item, bool
        ):
            raise TypeError(
                f"offload({function}): {option}={value!r} holds a {type(item).__name__}. "
                f"Pass {what}, as for jax.jit."
            )
    return set(map(kind, items))


def _kind(path: Any, aval: Any, text: str) -> TensorKind:
    """What an argument is to the user, guessed from its path: reports only."""
    names = re.findall(r"\w+", text.lower())
    words = {word for name in names for word in name.split("_")}
    if words & _OPTIMIZER_WORDS or not _OPTIMIZER_NAMES.isdisjoint(names):
        return TensorKind.OPTIMIZER
    if np.issubdtype(aval[1], np.integer) or len(path) == 2:
        return TensorKind.BATCH
    return TensorKind.WEIGHT


compat.hide_frames_of(__file__)

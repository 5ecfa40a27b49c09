"""Traces the user's function with JAX into a jaxpr over flat arrays."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend as jex
import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload.capture.rebuild import Rebuilder
from jaxoffload.capture.words import Code, code_of, decoded, encoded, moved_dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """A jaxpr over flat arrays.

    Attributes:
      jaxpr: closed, over words (words.py); what the function closes over of outer transformations
        follows its own arguments.
      out_tree: the results' pytree structure.
      out_avals: shape and dtype of each flat result, as words.
      out_codes: what each flat result is the words of; `has_codes`: whether any is of something.
      out_weak_types: for each flat result, whether it gives way in promotions.
      captured: the tracers of outer transformations that the function closes over. They die with
        those, so that a `Traced` which has any serves one call.
      written: the jaxpr before operations with rules of their own were replaced by what these say
        that they compute; None where there are none. Derivatives are of this one.
    """

    jaxpr: Any
    out_tree: Any
    out_avals: tuple[Any, ...]
    out_codes: tuple[Code, ...]
    out_weak_types: tuple[bool, ...]
    captured: tuple[Any, ...] = ()
    written: Any = None
    has_codes: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_codes", any(code is not None for code in self.out_codes))

    def captured_words(self) -> list[Any]:
        """What follows the arguments."""
        return [encoded(x, code_of(x)) for x in self.captured]


def trace(
    call: Callable[..., Any], avals: Sequence[Any], codes: Sequence[Code], tree: Any = None
) -> Traced:
    """Traces `call(*flat)`.

    Args:
      call: takes the flat dynamic arguments; JAX's messages name what it wraps.
      avals: shape and dtype of each, as words.
      codes: for each argument what it is the words of.
      tree: structure of (args, kwargs), so that messages name arguments.

    Raises:
      TypeError: a result that is no array. Whatever the user's function raises.
    """
    out_codes: list[Code] = []
    trees: list[Any] = []

    @functools.wraps(call)
    def on_words(*flat: Any) -> tuple[Any, ...]:
        found = call(*map(decoded, flat, codes))
        paths, tree = jax.tree_util.tree_flatten_with_path(found)
        _check_results(call, paths)
        trees.append(tree)
        out_codes[:] = [code_of(x) for _, x in paths]
        return tuple(encoded(x, code) for (_, x), code in zip(paths, out_codes, strict=True))

    if tree is not None:
        compat.name_arguments(on_words, call, *jax.tree.unflatten(tree, avals))
    written, captured = _over_captured(jax.make_jaxpr(on_words)(*avals), avals)
    written = _with_own_constants(written)
    lowered = compat.lowered_operations(written)
    closed = compat.without_internal_refs(lowered)
    outs = tuple(jax.ShapeDtypeStruct(*compat.physical(a)) for a in closed.out_avals)
    weak = tuple(bool(getattr(a, "weak_type", False)) for a in closed.out_avals)
    return Traced(
        closed,
        trees[-1],
        outs,
        tuple(out_codes),
        weak,
        captured,
        None if lowered is written else written,
    )


def _check_results(call: Any, paths: Sequence[Any]) -> None:
    for path, leaf in paths:
        if not compat.is_array_like(leaf):
            where = f"result{jax.tree_util.keystr(path)}"
            raise TypeError(
                f"offload({getattr(call, '__name__', type(call).__name__)}): {where} is a "
                f"{type(leaf).__name__}, not an array. Return arrays, and whatever else there is "
                "to tell by other ways."
            )


def _over_captured(closed: Any, avals: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """The same jaxpr with the tracers among its constants as further operands; and the tracers."""
    which = [i for i, c in enumerate(closed.consts) if isinstance(c, compat.Tracer)]
    if not which:
        return closed, ()
    captured = tuple(closed.consts[i] for i in which)
    shapes = []
    for x in captured:
        shape, dtype = compat.physical(x)
        weak = bool(getattr(x, "weak_type", False))
        shapes.append(jax.ShapeDtypeStruct(shape, moved_dtype(dtype), weak_type=weak))

    def over_all(*operands: Any) -> list[Any]:
        consts = list(closed.consts)
        for i, x, words in zip(which, captured, operands[len(avals) :], strict=True):
            consts[i] = decoded(words, code_of(x))
        body = jex.core.jaxpr_as_fun(compat.ClosedJaxpr(closed.jaxpr, consts))
        return body(*operands[: len(avals)])

    return jax.make_jaxpr(over_all)(*avals, *shapes), captured


def _with_own_constants(closed: Any) -> Any:
    """The same jaxpr over copies of what the caller could still change: NumPy arrays. As with
    `jax.jit`, the function keeps what it saw when it was traced."""
    copies: dict[int, Any] = {}

    def constant(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        if id(value) not in copies:
            # The original, too, so that its id stays taken.
            # A subclass of JAX's tells a dtype that is not canonical.
            copies[id(value)] = value, np.array(value, order="C", copy=True, subok=True)
        return copies[id(value)][1]

    return Rebuilder(constant=constant).closed(closed)


compat.hide_frames_of(__file__)

"""Host callbacks (`jax.pure_callback`, `jax.debug.print`, `jax.debug.callback`,
`jax.experimental.io_callback`) as custom calls of the CPU plugin. Those that are ordered depend on
one another by then (capture/ordered.py).

Takes the callback that a kernel calls; gives the custom call that it is lowered as. JAX's own
custom calls are known to JAX's own client only. Here a program carries a number, by which the
function is found when the call comes, for as long as an executable has that program.
"""

import contextlib
import contextvars
import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxoffload import _jax_compat as compat
from jaxoffload import _native
from jaxoffload.capture.words import code_of, decoded, encoded, moved_dtype

TARGET = "jaxoffload_callback"


class Callback:
    """A function of arrays that programs call.

    Args:
      primitive: what calls it, a key of `compat.CALLBACKS`.
      params: of the equation.
      operands, results: abstract values.
    """

    __slots__ = ("__weakref__", "_operands", "_params", "_primitive", "_results", "_x64", "number")

    def __init__(
        self,
        primitive: Any,
        params: dict[str, Any],
        operands: Sequence[Any],
        results: Sequence[Any],
    ):
        self._primitive, self._params = primitive, params
        self._operands, self._results = tuple(operands), tuple(results)
        self._x64 = bool(jax.config.jax_enable_x64)  # pyrefly: ignore[missing-attribute]
        self.number = next(_numbers)
        _known[self.number] = self

    @property
    def name(self) -> str:
        """What the user calls it by."""
        return self._primitive.name

    def call(self, operands: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        """Calls it on copies of some bytes, and fills others.

        Raises:
          ValueError: it returns arrays of other shapes than it said. What the function raises.
        """
        given = [
            # Copies, for the function may keep what it is given.
            decoded(_seen(words, aval).copy(), code_of(aval))
            for words, aval in zip(operands, self._operands, strict=True)
        ]
        with jax.enable_x64(self._x64):
            returned = compat.CALLBACKS[self._primitive](*given, **self._params)
            found = [_as_jax_takes_it(np.asarray(value)) for value in returned]
        if len(found) != len(results):
            raise ValueError(f"it returned {len(found)} arrays, not {len(results)}")
        for j, (value, words, aval) in enumerate(zip(found, results, self._results, strict=True)):
            if value.shape != tuple(aval.shape) or value.dtype != aval.dtype:
                raise ValueError(
                    f"result {j} is {value.dtype}{list(value.shape)}, where "
                    f"result_shape_dtypes says {aval.dtype}{list(aval.shape)}"
                )
            np.copyto(_seen(words, aval), encoded(value, code_of(aval)))


_numbers = itertools.count(1)
_known: weakref.WeakValueDictionary[int, Callback] = weakref.WeakValueDictionary()
_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside", default=False)
_collecting: contextvars.ContextVar[list[Callback] | None] = contextvars.ContextVar(
    "collecting", default=None
)


def _as_jax_takes_it(value: np.ndarray) -> np.ndarray:
    """A result in JAX's dtype: NumPy computes with 64 bits, and a Python number becomes as many."""
    if value.dtype.kind not in "iufc" or not value.dtype.isnative:
        return value
    return np.asarray(value, jax.dtypes.canonicalize_dtype(value.dtype))


def _seen(words: np.ndarray, aval: Any) -> np.ndarray:
    return words.view(moved_dtype(aval.dtype)).reshape(aval.shape)


def _run(number: int, operands: list[np.ndarray], results: list[np.ndarray]) -> str:
    """What the runtime calls; says what went wrong, or nothing."""
    token = _inside.set(True)
    name = "a callback"
    try:
        called = _known[number]
        name = called.name
        called.call(operands, results)
    except BaseException as error:
        return f"{name} raised {type(error).__name__}: {error}"
    finally:
        _inside.reset(token)
    return ""


def is_inside() -> bool:
    """Whether this is called by a callback of a vertex, which keeps the compute lane until it
    returns: nothing that needs the lane may be waited for."""
    return _inside.get()


def handler() -> tuple[str, Any]:
    """Name and FFI handler of the custom call."""
    _native.set_host_callback(_run)
    return TARGET, _native.host_callback_handler()


@contextlib.contextmanager
def collected() -> Iterator[list[Callback]]:
    """Collects the callbacks of what is lowered within it; who has the program keeps them."""
    found: list[Callback] = []
    token = _collecting.set(found)
    try:
        yield found
    finally:
        _collecting.reset(token)


def _called(primitive: Any, *operands: Any, **params: Any) -> list[Any]:
    """What a primitive that calls back is lowered as."""
    result_avals = params.get("result_avals", ())
    made = Callback(primitive, params, [jax.typeof(x) for x in operands], result_avals)
    found = _collecting.get()
    assert found is not None, "nobody would keep the callback"
    found.append(made)
    shapes = [jax.ShapeDtypeStruct(a.shape, moved_dtype(a.dtype)) for a in result_avals]
    words = [encoded(x, code_of(x)) for x in operands]
    has_effect = primitive.name != "pure_callback"
    call = jax.ffi.ffi_call(TARGET, shapes, has_side_effect=has_effect)
    outs = call(*words, number=np.int64(made.number))
    return [decoded(x, code_of(a)) for x, a in zip(outs, result_avals, strict=True)]


RULES = {
    primitive: (functools.partial(_called, primitive), lambda *avals_and_params: True)
    for primitive in compat.CALLBACKS
}
"""As in reductions.py."""

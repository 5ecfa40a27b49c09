"""Stages of an offloaded function ahead of its calls, by the names that `jax.jit` has for them."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxoffload import _jax_compat as compat
from jaxoffload.transform.signature import ArgumentSpec


class Staged:
    """What `Offloaded` shares with what `jax.jit` gives (`jax.stages.Wrapped`)."""

    _function: Callable[..., Any]
    _spec: ArgumentSpec

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As of `jax.jit`: a `jax.stages.Traced` of a program in which the call is one operation.

        Takes arrays or `jax.ShapeDtypeStruct`. What it is compiled to takes arrays on the device,
        and plans as a call inside `jax.jit` does.
        """
        return self._inside_jit.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As of `jax.jit`: a `jax.stages.Lowered`, planned by then. What it is compiled to is
        called with arrays of these shapes.

        Raises:
          PlanError: the budget is below the smallest that can work.
        """
        return self._inside_jit.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As of `jax.jit`: shapes and dtypes of the results. Nothing is planned."""
        return self._plain.eval_shape(*args, **kwargs)

    @functools.cached_property
    def _inside_jit(self) -> Any:
        return self._jitted(
            self,
            donate_argnums=sorted(self._spec.donated_positions),
            donate_argnames=sorted(self._spec.donated_names),
        )

    @functools.cached_property
    def _plain(self) -> Any:
        """The function jitted, with nothing donated."""
        return self._jitted()

    def _jitted(self, function: Any = None, **options: Any) -> Any:
        return jax.jit(
            self._function if function is None else function,
            static_argnums=sorted(self._spec.static_positions),
            static_argnames=sorted(self._spec.static_names),
            **options,
        )


compat.hide_frames_of(__file__)

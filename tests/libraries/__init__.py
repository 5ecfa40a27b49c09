"""Programs of other libraries, as their users write them, offloaded unchanged."""

import warnings

import jax
import pytest


def library(name):
    """A library of the extra `libraries`; the module is skipped where it is not there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return pytest.importorskip(
                name, reason=f"{name} is not installed: pip install '.[libraries]'"
            )
        except (ImportError, AttributeError) as error:
            reason = f"{name} cannot be imported with jax {jax.__version__}: {error}"
            pytest.skip(reason, allow_module_level=True)

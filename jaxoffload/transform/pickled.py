"""Offloaded functions in copies and in other processes.

Takes an `Offloaded`; gives what `pickle` and `copy` ask for. What was traced, planned and compiled
stays where it is.
"""

import sys
from typing import Any

from jaxoffload.transform.signature import ArgumentSpec


def name_of(wrapped: Any) -> str | None:
    """The name by which its module knows what wraps a function; None where it means another, and
    in a notebook, which no other process can import: there a pickler of functions is needed."""
    module = getattr(wrapped, "__module__", None) or ""
    found: Any = sys.modules.get(module)
    if module == "__main__" and not hasattr(found, "__file__"):
        return None
    name = getattr(wrapped, "__qualname__", "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return name if found is wrapped else None


def marked_arguments(spec: ArgumentSpec) -> tuple[tuple[Any, ...], ...]:
    """What `ArgumentSpec` takes beside the function."""
    static, donated = spec.static_positions, spec.donated_positions
    found = static, spec.static_names, donated, spec.donated_names
    return tuple(tuple(sorted(which)) for which in found)

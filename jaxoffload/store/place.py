"""Where entries are kept: the folder that the user, or JAX's settings, name."""

import functools
import logging
import os

import jax

from jaxoffload.options import parse_bytes
from jaxoffload.store.folder import Folder

logger = logging.getLogger(__name__)

VARIABLE, LIMIT_VARIABLE = "JAXOFFLOAD_CACHE", "JAXOFFLOAD_CACHE_SIZE"
"""A folder, or "off"; and what its entries may take, "2GiB" for one."""
_OFF = ("off", "0", "no", "false", "none")
_LIMIT = 2 << 30
_NAME = "jaxoffload"


def current() -> Folder | None:
    """The folder in use by the settings of this moment; None if nothing is to be kept."""
    path = folder_path()
    return None if path is None else _folder(path, _limit(os.environ.get(LIMIT_VARIABLE, "")))


def why_not() -> str:
    """Which setting says that nothing is kept."""
    named = os.environ.get(VARIABLE, "")
    return f"{VARIABLE}={named}" if named else "jax_enable_compilation_cache is False"


def folder_path() -> str | None:
    """Its path: what JAXOFFLOAD_CACHE says; beside JAX's own entries, where those are kept in a
    folder; else in the user's cache folder."""
    named = os.environ.get(VARIABLE, "").strip()
    config = jax.config
    is_enabled = config.jax_enable_compilation_cache  # pyrefly: ignore[missing-attribute]
    if named.lower() in _OFF or (not named and not is_enabled):
        return None
    if named:
        return os.path.abspath(os.path.expanduser(named))
    theirs = config.jax_compilation_cache_dir  # pyrefly: ignore[missing-attribute]
    if theirs and "://" not in theirs:  # what is in a bucket cannot be checked so
        return os.path.join(os.path.abspath(os.path.expanduser(theirs)), _NAME)
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # as its specification has it
        home = os.path.expanduser("~/.cache")
    return os.path.join(home, _NAME) if os.path.isabs(home) else None


@functools.cache
def _folder(path: str, limit: int) -> Folder:
    return Folder(path, limit)


@functools.cache
def _limit(named: str) -> int:
    if not named:
        return _LIMIT
    try:
        return parse_bytes(named, LIMIT_VARIABLE)
    except ValueError as error:
        logger.warning("%s Taken is 2GiB.", error)
        return _LIMIT

"""What people look at shows itself: as a page, in a notebook, in words.

Plans and runs are made by stages that know nothing of reports. Their classes take their looks from
here, and `report/` says what those are.
"""

import functools
import os
from collections.abc import Callable
from typing import Any


@functools.singledispatch
def page(shown: Any, *, is_file: bool) -> str:
    """HTML that shows something.

    Args:
      is_file: a whole page, in place of the part of one that a notebook takes.

    Raises:
      TypeError: there is no picture of such a thing.
    """
    raise TypeError(f"page: {shown!r} is a {type(shown).__name__}, of which there is no picture.")


@functools.singledispatch
def words(shown: Any) -> str:
    """The same on one screen of text: a verdict first."""
    return repr(shown)


@functools.singledispatch
def told(shown: Any, about: str) -> str:
    """What became of the tensors that a name, a source line or an argument's path stands for."""
    raise TypeError(f"told: {shown!r} is a {type(shown).__name__}, which knows of no tensors.")


@functools.singledispatch
def trace(shown: Any) -> str:
    """Chrome's Trace Event JSON of something that has lanes."""
    raise TypeError(f"trace: {shown!r} is a {type(shown).__name__}, which has no lanes.")


FORMATS: dict[str, Callable[[Any], str]] = {
    ".html": functools.partial(page, is_file=True),
    ".json": trace,
}
"""What makes the text of a file, by the ending of its name."""


class Shown:
    """Prints as words, shows itself in notebooks, and saves itself as a page."""

    __slots__ = ()

    def __str__(self) -> str:
        return words(self)

    def _repr_html_(self) -> str:
        return page(self, is_file=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file that needs nothing beside it: memory and time, to look into.

        Args:
          path: of the file to write; `FORMATS` has the endings. "plan.json": a trace, as
            `to_perfetto` writes it; "plan.html" and any other: a page. What was there is replaced
            once all is written.

        Raises:
          TypeError: the path is none, or of what has no lanes a trace is asked for. OSError: the
            file cannot be written.
        """
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"save: path={path!r} is a {type(path).__name__}. Pass a file's path.")
        ending = os.path.splitext(os.fspath(path))[1].lower()
        write_text(path, FORMATS.get(ending, FORMATS[".html"])(self))


class ShownMemory(Shown):
    """The same for what has tensors in places and vertices in lanes, and can tell of each."""

    __slots__ = ()

    def explain(self, about: str) -> str:
        """What becomes of tensors: why they are evicted, when they come back, what that costs.

        Args:
          about: part of a tensor's name ("f32[512,512]"), of the source line that makes it
            ("model.py:88"), or of an argument's path ("params['w1']"); case does not matter. What
            is just so called goes before what only holds it.

        Returns:
          Text about the tensors that match, those that move most first; close names if none does.

        Raises:
          TypeError, ValueError: `about` is no text, or empty.
        """
        if not isinstance(about, str):
            raise TypeError(
                f"explain: about={about!r} is a {type(about).__name__}. Pass part of a tensor's "
                "name, of its source line or of an argument's path."
            )
        if not about.strip():
            raise ValueError(
                f"explain: about={about!r} is empty. Pass part of a tensor's name, of its source "
                "line or of an argument's path."
            )
        return told(self, about.strip())

    def to_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Writes a trace that https://ui.perfetto.dev and chrome://tracing open: lanes with bytes
        and source lines, and counters of memory; of a run measured and simulated.

        Args:
          path: of the file to write, "run.json".

        Raises:
          TypeError: the path is none. OSError: the file cannot be written.
        """
        if not isinstance(path, str | os.PathLike):
            raise TypeError(
                f"to_perfetto: path={path!r} is a {type(path).__name__}. Pass a file's path."
            )
        write_text(path, trace(self))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file whole or not at all.

    Raises:
      OSError: names the path that was asked for.
    """
    path = os.fspath(path)
    draft = f"{path}.{os.getpid()}.part"
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except BaseException as error:
        if os.path.lexists(draft):
            os.unlink(draft)
        if isinstance(error, OSError) and error.errno is not None:
            raise type(error)(error.errno, os.strerror(error.errno), path) from None
        raise

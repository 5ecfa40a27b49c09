"""How the user's source lines are called, in words and pictures that may leave the machine."""

import functools
import os
import re
import sys

_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")


def is_installed(line: str) -> bool:
    """Whether a source line is of an installed library, not of the user's own."""
    return _INSTALLED.match(line) is not None


def short(line: str) -> str:
    """A source line by as little of its path as tells which file it is.

    Args:
      line: "/home/me/train.py:6:8 (f)", as JAX gives it.

    Returns:
      The same, relative to the present folder where it is below that. What can be imported begins
      with the package's name ("optax/_src/update.py:6:8 (f)"). A cell of a notebook is called what
      IPython calls it in tracebacks ("In[3]:6:8 (f)").
    """
    here = os.getcwd() + os.sep
    if installed := _INSTALLED.match(line):  # the environment may be below the present folder
        return line[installed.end() :]
    if line.startswith(here):
        return line[len(here) :]
    found = re.match(r"(.*?)(?::\d+)+ \(", line)
    if found is None:
        return line
    file = found[1]
    roots = [os.path.join(folder, "") for folder in sys.path if os.path.isabs(folder)]
    known = max((len(root) for root in roots if file.startswith(root)), default=0)
    return (_cell(file) or file[known or _parent_of_package(file) :]) + line[len(file) :]


def _cell(file: str) -> str | None:
    """What IPython calls the cell that it has compiled as a file of that name."""
    if "IPython" not in sys.modules:
        return None
    compiler = getattr(sys.modules["IPython"].get_ipython(), "compile", None)
    named = getattr(compiler, "format_code_name", None)  # since IPython 8
    label_and_name = named(file) if named else None
    return label_and_name[1] if label_and_name else None


@functools.lru_cache(maxsize=4096)
def _parent_of_package(file: str) -> int:
    """Characters of a file's path down to its outermost package; 0 if it is in none. An editable
    installation need not be on sys.path."""
    folder = os.path.dirname(file)
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder = os.path.dirname(folder)
    return 0 if folder == os.path.dirname(file) else len(os.path.join(folder, ""))

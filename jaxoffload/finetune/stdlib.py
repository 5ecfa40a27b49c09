"""Instruction pairs from the running Python's standard library: a function, and its docstring.

Every installation has them, and equal Pythons give equal pairs.
"""

import ast
import dataclasses
import inspect
import pathlib
import sysconfig
import warnings
import zlib
from collections.abc import Iterator

_SKIPPED = ("test", "tests", "idlelib", "site-packages", "lib2to3", "turtledemo", "__pycache__")
_QUESTION = "Write the docstring of this Python function.\n\n"
_MOST_LINES = 12
"""Of a function's body, that are shown."""
_ANSWER_LENGTHS = range(20, 400)
"""Characters of a docstring that is neither a stub nor a manual."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """Attributes: module: "json.decoder"; messages: as data.py takes them."""

    module: str
    messages: list[dict[str, str]]


def pairs(limit: int = 2000) -> list[Pair]:
    """The first pairs, at most `limit`, in an order of modules that mixes them.

    Raises:
      FileNotFoundError: the library's sources are not installed.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if not any(part in _SKIPPED or part.startswith("test_") for part in parts):
            modules[".".join(parts)] = path
    found: list[Pair] = []
    for module in sorted(modules, key=lambda name: (zlib.crc32(name.encode()), name)):
        found.extend(_pairs_of(module, modules[module]))
        if len(found) >= limit:
            break
    if not found:
        raise FileNotFoundError(
            f"the standard library's sources are not in {folder}. Install Python with its sources."
        )
    return found[:limit]


def split(found: list[Pair], every: int = 10) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on, and those of every tenth module to judge by."""
    names = list(dict.fromkeys(pair.module for pair in found))
    held = set(names[every - 1 :: every] or names[-1:])
    seen = [pair for pair in found if pair.module not in held]
    return seen, [pair for pair in found if pair.module in held]


def _pairs_of(module: str, path: pathlib.Path) -> Iterator[Pair]:
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings(action="ignore"):  # of their escapes
            tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):
        return  # templates and samples of other languages
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        answer = ast.get_docstring(node)
        if answer is None or len(answer) not in _ANSWER_LENGTHS or len(node.body) < 2:
            continue
        head = lines[node.lineno - 1 : node.body[0].lineno - 1]
        body = lines[node.body[0].end_lineno or 0 : node.end_lineno][:_MOST_LINES]
        shown = inspect.cleandoc("\n" + "\n".join(head + body))
        yield Pair(
            module,
            [
                {"role": "user", "content": f"{_QUESTION}```python\n{shown}\n```"},
                {"role": "assistant", "content": answer},
            ],
        )

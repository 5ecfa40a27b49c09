"""What the README and the docs show is so: code, commands, links, names, messages."""

import ast
import functools
import importlib
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

import jaxoffload as jo
from jaxoffload.command import table
from tests.test_public import NAMES as PUBLIC

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "notebooks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
TOPS = ["jaxoffload", "custom_calls", "tests", "benchmarks", "docs", "notebooks"]
HOLE = "\0"
"""Stands in a message for what is put in."""


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.drawn(6)
@pytest.mark.plain_runs  # as for those who read it
@pytest.mark.runs_whole
@pytest.mark.usefixtures("little_is_optimized")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_runs(page, capsys):
    space: dict = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), space)


def test_a_first_run_says_nothing_but_what_it_prints(tmp_path):
    (script,) = blocks(ROOT / "README.md", "python")
    (tmp_path / "step.py").write_text(script)
    # JAX's CUDA plugin, beside no driver, says so on its own account (docs/cuda.md).
    quietly = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "step.py"]
    done = subprocess.run(command, cwd=tmp_path, env=quietly, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "fits with offloading" in done.stdout and "step.py:8:" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" in target:
            continue
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)", linked.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}


def commands():
    """Every line of a shell block, and every span of text, that calls `jaxoffload`."""
    for page in PAGES:
        lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
        for line in lines:
            if re.match(r"jaxoffload [a-z]+( |$)", line):
                yield pytest.param(shlex.split(line, comments=True)[1:], id=f"{page.name}:{line}")


@pytest.mark.parametrize("words", list(commands()))
def test_commands_are_understood(words, monkeypatch):
    """By the command's own parser: all but its work is done."""
    name, *rest = words
    module = importlib.import_module(table.COMMANDS[name][0])
    called = []
    work = "_run" if name == "finetune" else "main"
    monkeypatch.setattr(module, work, lambda *arguments: called.append(arguments) or 0)
    if rest:  # else only its name is mentioned
        assert table.run(words) == 0
        assert called or "--help" in rest


def test_flags_in_the_text_are_some_commands():
    known = {"help"}
    for module, _ in table.COMMANDS.values():
        known |= set(importlib.import_module(module).FLAGS)
    for page in PAGES:
        for flag in re.findall(r"`--([\w-]+)", page.read_text()):
            assert flag.replace("-", "_") in known, f"{page.name}: --{flag}"


def test_a_plan_of_the_docs_answers(tmp_path, monkeypatch, capsys):
    (tmp_path / "docs_train.py").write_text("def step(p, x):\n    return (x @ p['w']).sum()\n")
    monkeypatch.chdir(tmp_path)
    (line,) = (line for block in blocks(ROOT / "docs" / "fit.md", "sh")
               for line in block.splitlines() if "f32[" in line)  # fmt: skip
    small = line.replace("train:step", "docs_train:step").replace("4096", "512")
    assert table.run(shlex.split(small)[1:]) == 0
    assert "fits" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_the_text_names_is_there(page):
    text = page.read_text()
    for name in re.findall(r"\bjo\.(\w+)", text):
        assert hasattr(jo, name), f"jo.{name}"
    paths = [f.as_posix() for top in TOPS for f in (ROOT / top).rglob("*") if f.is_file()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for name in re.findall(r"`([\w/]+\.(?:py|js|h|cc)|(?:\w+/)+)`", prose):
        found = any(f"/{name}" in path for path in paths)
        assert found or name == "step.py", name  # that one is the reader's


def texts_of(node):
    """A string as it is written, with a hole for what is put in; None of anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else HOLE for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = texts_of(node.left), texts_of(node.right)
        return None if sides == (None, None) else "".join(s or HOLE for s in sides)
    return None


def test_the_reference_has_every_public_name_once():
    page = (ROOT / "docs" / "api.md").read_text()
    shown = re.findall(r"^\.\. auto(?:function|class|exception):: (\w+)$", page, re.MULTILINE)
    assert len(shown) == len(set(shown))
    assert set(shown) | {"MACHINES", "policies"} == set(PUBLIC)
    named = re.search(r"`MACHINES` holds .*?\n\n", page, re.DOTALL)[0]
    assert {" ".join(name.split()) for name in re.findall(r'"([^"]+)"', named)} == set(jo.MACHINES)


@functools.cache
def messages():
    """Every string of the package's code but docstrings, and every one of the C++ runtime."""
    found = []
    for path in sorted((ROOT / "jaxoffload").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        found += [text for n in nodes if id(n) not in docstrings and (text := texts_of(n))]
    for path in sorted((ROOT / "custom_calls").rglob("*.[ch]*")):
        if "tests" not in path.parts:
            # What stands between two literals of one message is put in.
            joined = re.sub(r'"\s*"', "", path.read_text())
            joined = re.sub(r'(?<=[^\\])"\s*\+[^;"]*\+\s*"', HOLE, joined)
            found += re.findall(r'"((?:[^"\\]|\\.)*)"', joined)
    return found


def quoted():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        if not section.startswith("Messages of others"):
            yield from re.findall(r"^- `(.*)`\\$", section, re.MULTILINE)


@pytest.mark.parametrize("message", list(quoted()))
def test_messages_of_the_docs_are_those_of_the_code(message):
    parts = message.replace("`", "").split("…")
    assert max(map(len, parts)) >= 12, "too little to find it by"
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in parts), re.DOTALL)
    assert any(pattern.search(text) for text in messages()), message

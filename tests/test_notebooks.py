"""Every notebook runs from the top, small; stored outputs are whole and tell nothing of a machine.

Warnings would be seen: a kernel prints them all, and what it prints to stderr fails the test.
"""

import base64
import json
import re
import tempfile

import nbformat
import pytest

from notebooks import execute

MOST_BYTES = 1_500_000
MOST_CELLS = 25
_MACHINE = re.compile(
    r"(?<![\w./])/(?:bin|etc|home|mnt|opt|proc|private|root|srv|tmp|usr|var|work|Users|Volumes)/"
    r"|ipykernel_\d|site-packages|[A-Z]:\\\\"
)
"""Its paths."""


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook):
    """All that outputs hold in words, pictures within pictures included."""
    for cell in code(notebook):
        for output in cell.outputs:
            if output.output_type == "stream":
                yield output.text
                continue
            for text in output.get("data", {}).values():
                packed = re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", str(text))
                yield from (base64.b64decode(image).decode() for image in packed)
                # Numbers, packed, are no words.
                yield re.sub(r'(?<=[",])[\w+/=]{16,}(?=")', "", str(text))


def complaints(notebook):
    """What is wrong with the outputs of a notebook."""
    for cell in code(notebook):
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"{cell.id} raised {output.ename}: {output.evalue}"
            elif output.output_type == "stream" and output.name == "stderr":
                yield f"{cell.id} wrote to stderr: {output.text[:500]}"
    for text in texts(notebook):
        for found in _MACHINE.finditer(text):
            yield f"a path of the machine: {text[max(found.start() - 40, 0) : found.end() + 40]!r}"


def test_there_are_eight():
    assert [path.name[:2] for path in execute.ALL] == [f"0{n}" for n in range(1, 9)]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("path", execute.ALL, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("JAXOFFLOAD_SMALL", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "always")
    monkeypatch.setenv("JAX_NUMPY_RANK_PROMOTION", "raise")
    monkeypatch.setenv(
        "JAX_DISABLE_MOST_OPTIMIZATIONS", "1"
    )  # most of the time goes into compiling
    found = execute.execute(path)
    assert not list(complaints(found))
    assert all(cell.execution_count for cell in code(found))


@pytest.mark.parametrize("path", execute.ALL, ids=lambda path: path.stem)
def test_stored_outputs_are_whole_and_tell_nothing_of_a_machine(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not list(complaints(notebook))
    assert path.stat().st_size < MOST_BYTES and len(notebook.cells) <= MOST_CELLS
    # Executed once, from the top, after the last change of its code.
    assert notebook.metadata.code_sha256 == execute.digest(notebook), (
        f"run python -m notebooks.execute {path.name}"
    )
    assert [cell.execution_count for cell in code(notebook)] == list(
        range(1, len(code(notebook)) + 1)
    )
    assert any(cell.outputs for cell in code(notebook))
    assert execute.cleaned(nbformat.from_dict(notebook)) == notebook


@pytest.mark.parametrize("path", execute.ALL, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)#]+)\)", cell.source):
                assert "://" in target or (path.parent / target).exists(), target


def test_what_is_wrong_with_outputs_is_found():
    def complaint(**output):
        cell = nbformat.v4.new_code_cell("x", outputs=[nbformat.v4.new_output(**output)])
        return list(complaints(nbformat.v4.new_notebook(cells=[cell])))

    assert complaint(output_type="error", ename="ValueError", evalue="no", traceback=[])
    assert complaint(output_type="stream", name="stderr", text="a warning")
    assert complaint(output_type="stream", name="stdout", text="at /home/me/model.py:3")
    assert complaint(output_type="stream", name="stdout", text=tempfile.gettempdir() + "/x")
    image = base64.b64encode(b"<svg><title>/work/x.py</title></svg>").decode()
    html = {"text/html": f'<img src="data:image/svg+xml;base64,{image}">'}
    assert complaint(output_type="display_data", data=html)
    strings = {"text/html": json.dumps({"strings": ["/root/model.py:3"], "data": "A" * 40})}
    assert complaint(output_type="display_data", data=strings)
    packed = {"text/html": json.dumps({"data": "AAAAAAAAAAAAAAAAA/tmp/AAAAAAAAAAAAA+/tmp/AAAA"})}
    assert not complaint(output_type="display_data", data=packed)
    assert not complaint(output_type="stream", name="stdout", text="jaxoffload/model.py:3 a/tmp/b")

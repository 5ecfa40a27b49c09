"""Executes the notebooks from the top and keeps their outputs in them.

    python -m notebooks.execute              all of them, in full size
    python -m notebooks.execute 01 06        those whose names begin so

What an execution leaves in a file is what it printed and drew, and nothing of the machine: no
timestamps, versions or random ids, so that a diff shows what has changed. A digest of the code says
which code the outputs are of.
"""

import hashlib
import os
import pathlib
import sys
import tempfile
import time

import nbformat
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).parent
ALL = sorted(FOLDER.glob("[0-9]*.ipynb"))


def execute(path: pathlib.Path) -> nbformat.NotebookNode:
    """The notebook with new outputs; the file stays as it is.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    # In a folder of its own: what a notebook writes is not left here, and no settings of the user's
    # shape what it shows.
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            extra_arguments=["--log-level=ERROR"],  # its sockets are not encrypted, it would say
            resources={"metadata": {"path": folder}},
        )
        # Within pytest a kernel would not look at what libraries write to stderr themselves.
        settings = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        client.execute(env={**settings, "IPYTHONDIR": folder})
    notebook.metadata["code_sha256"] = digest(notebook)
    return cleaned(notebook)


def digest(notebook: nbformat.NotebookNode) -> str:
    """Of the code that the outputs come from."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The same without what differs from one execution to the next for no reason."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            "code_sha256": notebook.metadata.get("code_sha256", ""),
        }
    )
    for number, cell in enumerate(notebook.cells, 1):
        cell.id = f"cell-{number:02}"
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    return notebook


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """What is printed comes in as many pieces as there was time for."""
    found: list[nbformat.NotebookNode] = []
    for output in outputs:
        last = found[-1] if found else None
        if last is not None and output.output_type == "stream" == last.output_type:
            if output.name == last.name:
                last.text += output.text
                continue
        found.append(output)
    return found


def main(prefixes: list[str]) -> int:
    """Executes and writes those that begin with one of the prefixes, or all."""
    chosen = [path for path in ALL if not prefixes or path.name.startswith(tuple(prefixes))]
    if not chosen:
        print(f"no notebook begins with any of {prefixes}: {[path.name for path in ALL]}")
        return 2
    if "JAXOFFLOAD_SMALL" in os.environ:
        print(
            "JAXOFFLOAD_SMALL is set, and outputs that are kept are those in full size. Unset it."
        )
        return 2
    for path in chosen:
        start = time.perf_counter()
        nbformat.write(execute(path), path)
        size = path.stat().st_size / 1024
        print(f"{path.name}: {time.perf_counter() - start:.0f} s, {size:.0f} KiB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

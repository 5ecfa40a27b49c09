"""What source lines are called where they are shown."""

import os
import sys
import types

import pytest

from jaxoffload import sources


@pytest.fixture
def package(tmp_path):
    """The path of a file two packages deep."""
    folder = tmp_path / "site" / "optax" / "_src"
    folder.mkdir(parents=True)
    for path in (folder, folder.parent):
        (path / "__init__.py").touch()
    return folder / "update.py"


def test_a_file_of_a_package_begins_with_the_package_s_name(package):
    assert sources.short(f"{package}:6:8 (f)") == "optax/_src/update.py:6:8 (f)"
    assert sources.short(f"{package}:6 (f)") == "optax/_src/update.py:6 (f)"


def test_a_file_on_the_import_path_begins_below_it(package, monkeypatch):
    (package.parent / "__init__.py").unlink()  # a folder of a package need not have one
    monkeypatch.syspath_prepend(package.parent.parent.parent)
    assert sources.short(f"{package}:6:8 (f)") == "optax/_src/update.py:6:8 (f)"
    monkeypatch.syspath_prepend(package.parent.parent)
    assert sources.short(f"{package}:6:8 (f)") == "_src/update.py:6:8 (f)"


def test_a_file_below_the_present_folder_is_relative_to_it(package, monkeypatch):
    monkeypatch.chdir(package.parent.parent)
    assert sources.short(f"{package}:6:8 (f)") == "_src/update.py:6:8 (f)"


def test_a_library_of_an_environment_in_the_present_folder_is_no_file_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = f"{tmp_path}/.venv/lib/python3.11/site-packages/optax/_src/update.py:6:8 (f)"
    assert sources.is_installed(line) and not sources.is_installed(f"{tmp_path}/train.py:6:8 (f)")
    assert sources.short(line) == "optax/_src/update.py:6:8 (f)"


def test_other_files_keep_their_paths(tmp_path):
    for line in (f"{tmp_path}{os.sep}train.py:6:8 (f)", "unknown", ""):
        assert sources.short(line) == line


def test_a_cell_of_a_notebook_is_called_as_in_tracebacks(tmp_path, monkeypatch):
    cells = {"/tmp/ipykernel_7/123.py": ("Cell", "In[3]")}
    shell = types.SimpleNamespace(compile=types.SimpleNamespace(format_code_name=cells.get))
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert sources.short("/tmp/ipykernel_7/123.py:6:8 (f.<locals>.g)") == "In[3]:6:8 (f.<locals>.g)"
    other = f"{tmp_path}{os.sep}train.py:6:8 (f)"
    assert sources.short(other) == other
    shell.compile = None  # IPython 7 knows no names
    assert sources.short("/tmp/ipykernel_7/123.py:6:8 (f)") == "/tmp/ipykernel_7/123.py:6:8 (f)"
    ipython.get_ipython = lambda: None  # imported, but not what runs
    assert sources.short("/tmp/ipykernel_7/123.py:6:8 (f)") == "/tmp/ipykernel_7/123.py:6:8 (f)"

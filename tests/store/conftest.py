"""A store in a folder of the test's own, and what makes this process forget as a new one would."""

import pytest

import jaxoffload as jo
from jaxoffload.store import place


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder in which a test keeps executables and plans."""
    monkeypatch.setenv(place.VARIABLE, str(tmp_path / "kept"))
    jo.clear_caches()
    yield place.current()
    jo.clear_caches()


@pytest.fixture
def names(kept):
    """The names of the entries that begin with a word."""
    return lambda word: {entry.name for entry in kept.entries() if entry.name.startswith(word)}

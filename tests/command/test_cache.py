"""`jaxoffload cache` tells what is kept, and removes it."""

import json

import jax.numpy as jnp
import pytest

import jaxoffload as jo
from jaxoffload.command import table
from jaxoffload.store import place


@pytest.fixture
def cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(place.VARIABLE, str(tmp_path / "kept"))

    def call(*flags):
        code = table.run(["cache", *flags])
        return code, *capsys.readouterr()

    return call


def test_it_tells_what_is_kept_and_removes_it(cache, tmp_path):
    folder = str(tmp_path / "kept")
    empty = {"folder": folder, "limit_bytes": 2 << 30, "bytes": 0, "executables": 0, "plans": 0}
    assert json.loads(cache("--json")[1]) == empty
    jo.offload(lambda x: jnp.tanh(x @ x) @ x, device_memory="64KiB")(jnp.ones((64, 64)))
    code, out, err = cache()
    assert code == 0 and not err
    lines = out.splitlines()
    assert lines[0] == folder and "0 executables" not in lines[1] and lines[1].endswith("1 plans")
    assert lines[2].endswith("of at most 2 GiB")
    found = json.loads(cache("--json")[1])
    assert found["plans"] == 1 and found["executables"] > 0 and found["bytes"] > 1000
    code, out, _ = cache("--clear")
    assert code == 0 and out.startswith(folder) and out.endswith("freed\n")
    assert json.loads(cache("--json")[1]) == empty
    assert json.loads(cache("--clear", "--json")[1]) == {"folder": folder, "freed_bytes": 0}


def test_it_says_why_nothing_is_kept(cache, monkeypatch):
    monkeypatch.setenv(place.VARIABLE, "off")
    assert cache() == (0, "Nothing is kept: JAXOFFLOAD_CACHE=off.\n", "")
    assert json.loads(cache("--json", "--clear")[1]) == {"folder": None}
    code, _, err = cache("folder")
    assert code == 2 and "flags only" in err

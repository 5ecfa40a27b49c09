"""The command, as a new user would call it: right, wrong, and on machines that lack something."""

import json
import logging
import os
import pathlib
import sys
import tempfile
import time

import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload import doctor
from jaxoffload.command import base, table
from jaxoffload.runtime import backends

MODULE = """
import jax, jax.numpy as jnp

def step(params, batch):
    def loss(p):
        return jnp.mean((jnp.tanh(batch @ p["w1"]) @ p["w2"]) ** 2)
    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

def example():
    return {"w1": jnp.ones((64, 64)), "w2": jnp.ones((64, 64))}, jnp.ones((256, 64))

number = 3
"""
SHAPES = "{'w1': f32[64,64], 'w2': f32[64,64]}, f32[256,64]"


@pytest.fixture
def jaxoffload(tmp_path, monkeypatch, capsys):
    """Calls the command in a folder with a module; gives its code, output and errors."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def call(*argv):
        code = table.run(argv)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_help_names_every_command_and_every_command_explains_itself(jaxoffload):
    code, out, err = jaxoffload("--help")
    assert code == 0 and not err
    for name in table.COMMANDS:
        assert f"\n  {name} " in out
        code, text, err = jaxoffload(name, "--help")
        assert code == 0 and not err
        if name == "finetune":  # it reads its flags itself
            assert "jaxoffload finetune --model" in text
            continue
        assert text.startswith(f"usage: jaxoffload {name}") and f"\n  jaxoffload {name} " in text
        assert "Exit code: 0" in text and "--[no]json" in text


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "usage: jaxoffload COMMAND"),
        (["docter"], "'docter' is no command"),
        (["plan"], "nothing was named"),
        (["plan", "a:b", "c:d"], "Name one function"),
        (["plan", "mine"], "Pass module:name"),
        (["plan", "nowhere:f", "--args=f32[3]"], "'nowhere' cannot be imported"),
        (["plan", "mine:stop", "--args=f32[3]"], "has no 'stop'; it has step, example"),
        (["plan", "mine:number", "--args=f32[3]"], "is a int. Name a function"),
        (["plan", "mine:step"], "--args is missing"),
        (["plan", "mine:step", "--args=f32[3"], "not understood"),
        (["plan", "mine:step", "--args=q7[3]"], "'q7' is no dtype"),
        (["plan", "mine:step", "--args=f32[a]"], "'f32[a]' is no shape"),
        (["plan", "mine:step", "--args=f32[3]"], "--args do not suit the function: TypeError"),
        (["plan", "mine:step", "--args=f32[3]", "--nosuch"], "Unknown command line flag 'nosuch'"),
        (["plan", "mine:step", "--args=f32[3]", "--device_memory=lots"], "is not an amount"),
        (["plan", "mine:step", "--args=f32[3]", "--machine=H300"], "'H300' is not known"),
        (["plan", "mine:step", "--args=f32[3]", "--donate=all"], "--donate=all names no positions"),
        (["simulate", "mine:step", "--args=f32[3]", "--policies=quick"], "holds 'quick'"),
        (["simulate", "mine:step", "--args=f32[3]", "--jitter=-1"], "non-negative"),
        (["bench", "mine:step", "--args=f32[3]", "--runs=0"], "positive integer"),
        (["bench", "mine:step", "--args=f32[3]", "--donate=0"], "Leave it out"),
        (["view"], "Name one file"),
        (["doctor", "now"], "nothing is to be"),
        (["doctor", "--size=huge"], "size='huge' is not an amount"),
    ],
)
def test_what_is_not_understood_is_told_with_a_remedy(jaxoffload, argv, words):
    code, out, err = jaxoffload(*argv)
    assert code == table.MISUSED and not out
    assert words in err and "Traceback" not in err


def test_plan_says_whether_it_fits_how_fast_and_where_to_look(jaxoffload, tmp_path):
    flags = ("--device_memory=160KiB", "--machine=h200", "--save=p.html", "--trace=p.json")
    code, out, err = jaxoffload("plan", "mine:step", f"--args={SHAPES}", "--about=w1", *flags)
    assert code == 0 and out.startswith("fits: step on H200 in 160 KiB, simulated") and not err
    assert "params['w1']" in out and "written: p.html" in out
    code, out, _ = jaxoffload("view", "p.html", "--noopen")
    assert code == 0 and "p.html" in out
    code, out, _ = jaxoffload("view", "p.json", "--json")
    lanes = {row["lane"]: row for row in json.loads(out)["lanes"]}
    code, out, _ = jaxoffload("plan", "mine:step", "--args=mine:example", "--json", *flags[:2])
    found = json.loads(out)
    assert found["fits"] and found["peak_device_bytes"] <= found["device_memory"] == 160 * 1024
    assert lanes["device 0: host to device"]["bytes"] == found["bytes_reloaded"] > 0
    assert lanes["device 0: device to host"]["bytes"] == found["bytes_offloaded"]


def test_plan_says_what_does_not_fit_and_what_would(jaxoffload):
    argv = ("plan", "mine:step", "--args=mine:example", "--device-memory=20KiB")
    code, out, err = jaxoffload(*argv)
    assert code == table.FAILED and out.startswith("does not fit") and "mine.py:6" in out
    code, out, _ = jaxoffload(*argv, "--json")
    found = json.loads(out)
    assert code == table.FAILED and not found["fits"]
    enough = f"--device_memory={found['min_device_memory']}"
    assert jaxoffload(*argv[:-1], enough)[0] == 0
    code, _, err = jaxoffload(*argv[:-1], "--save=nowhere/plan.html")
    assert code == table.FAILED and "'nowhere/plan.html'" in err


def test_shapes_are_written_as_the_function_takes_them():
    from jaxoffload.command.subject import arguments_of

    text = "[f32[2,3], (bf16[4], i32[])], {'a': {1: u8[5]}}, 7, True"
    (first, (second, third)), mapping, number, truth = arguments_of(text, "f")
    shapes = [(x.shape, str(x.dtype)) for x in (first, second, third, mapping["a"][1])]
    assert shapes == [((2, 3), "float32"), ((4,), "bfloat16"), ((), "int32"), ((5,), "uint8")]
    assert (number, truth) == (7, True)


def test_simulate_has_a_line_a_machine_and_policy(jaxoffload):
    argv = ["simulate", "mine:step", f"--args={SHAPES}", "--machines=H200,4 x P100"]
    code, out, _ = jaxoffload(*argv, "--device_memory=160KiB", "--policies=fixed,levelwise")
    rows = [line[:37].split("  ")[0] for line in out.splitlines()[1:]]
    assert code == 0 and rows == ["H200", "H200", "4 x P100", "4 x P100"]
    code, out, _ = jaxoffload(*argv, "--device_memory=20KiB", "--json", "--policies=fixed")
    assert code == table.FAILED and all("error" in run for run in json.loads(out)["runs"])


def test_bench_runs_both_and_compares_them(jaxoffload):
    argv = ("bench", "mine:step", f"--args={SHAPES}", "--device_memory=200KiB", "--runs=1")
    code, out, _ = jaxoffload(*argv, "--save=run.html")
    assert code == 0 and "within the budget: " in out and "jax.jit: " in out
    assert "jaxoffload-view" in pathlib.Path("run.html").read_text()
    code, out, _ = jaxoffload(*argv, "--json", "--nocompare")
    found = json.loads(out)
    assert code == 0 and found["seconds"] > 0 and "jit_seconds" not in found
    assert found["peak_device_bytes"] <= 200 * 1024


def test_view_refuses_what_it_did_not_write(jaxoffload):
    for name, text in (("a.txt", "words"), ("b.json", "[]"), ("c.json", '{"traceEvents": [3]}')):
        pathlib.Path(name).write_text(text)
        code, out, err = jaxoffload("view", name)
        assert code == table.FAILED and not out and "neither a page" in err
    assert jaxoffload("view", "missing.html")[0] == table.FAILED


def test_doctor_measures_and_tells_programs(jaxoffload, monkeypatch):
    monkeypatch.setattr(base, "_PATIENCE", 1000.0)
    names = ["memory", "to_device", "from_device", "unpinned", "both", "launch", "flops_per_second",
             "memory_bytes_per_second", "host_memory_bytes_per_second", "disk_write",
             "disk_read"]  # fmt: skip
    code, out, err = jaxoffload("doctor", "--size=1MiB", "--save-profile=machine.json")
    assert code == 0 and not err
    for name in names:
        assert f"\n  {name} " in out
    saved = jo.Profile.load("machine.json")
    assert set(saved.rates) == {"to_device", "from_device", "disk_read", "disk_write"}
    assert set(saved.kernels) == {"flops", "traffic", "host_traffic", "launch"}
    assert dict(saved.known_rates())["launch"] == saved.kernels["launch"] < 1
    step = jo.offload(lambda x: x @ x, device_memory=None, cut="always", profile="machine.json")
    machine = step.plan(np.ones((8, 8), np.float32)).machine
    assert machine == backends.current().machine.with_rates(saved.known_rates())
    code, out, _ = jaxoffload("doctor", "--size=1MiB", "--json")
    found = json.loads(out)
    assert found["usable"] and list(found["rates"]) == names and not found["missing"]
    assert all(rate > 0 for rate in found["rates"].values())
    assert found["assumed"]["to_device"] > 0 and found["assumed"]["launch"] < 1e-3


def test_doctor_saves_what_it_measures_or_says_why_not(jaxoffload):
    code, _, err = jaxoffload("doctor", "--nomeasure", "--save-profile=a.json")
    assert code == 2 and "nothing to save" in err
    code, _, err = jaxoffload("doctor", "--size=1MiB", "--save-profile=there/is/none.json")
    assert code == 2 and "--save-profile='there/is/none.json'" in err


def test_doctor_is_of_use_where_much_is_missing(jaxoffload, monkeypatch, tmp_path):
    """No CPU plugin, a home that cannot be written to, no folder for temporary files."""

    def missing():
        raise ImportError("xla-cpu-pjrt is not installed. Run: pip install xla-cpu-pjrt==0.0.1")

    monkeypatch.setattr(backends, "cpu", missing)
    monkeypatch.setattr(backends, "current", missing)
    monkeypatch.setattr(doctor, "backends", lambda: [doctor._cpu_report()])
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode, **how: mode != os.W_OK and access(path, mode, **how)
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    code, out, err = jaxoffload("doctor", "--size=1MiB")
    assert code == table.FAILED and not err
    assert "cpu: not available. xla-cpu-pjrt is not installed. Run: pip install" in out
    assert "cannot be written to, which does no harm" in out
    assert "disk tier: not available" in out and "--disk=FOLDER" in out
    assert "disk_write" in out and "not measured" in out and "memory " in out


def test_it_says_what_takes_long_and_only_that(monkeypatch, capsys):
    monkeypatch.setattr(base, "_PATIENCE", 0.02)
    told = []
    monkeypatch.setattr("builtins.print", lambda *words, **how: told.append(words[0]))
    with base.progress("slow work"):
        deadline = time.monotonic() + 30
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
    assert told and told[0].startswith("slow work: ")
    told.clear()
    monkeypatch.setattr(base, "_PATIENCE", 1000.0)
    with base.progress("quick work"):
        pass
    assert not told


def test_it_is_quiet_unless_one_asks(jaxoffload, capsys):
    logger = logging.getLogger("jaxoffload")
    before = (logger.level, logger.propagate, list(logger.handlers))

    def logged(*argv):
        return jaxoffload("plan", "mine:step", f"--args={SHAPES}", "--device_memory=160KiB", *argv)

    assert not logged()[2]
    assert "jaxoffload.search.planner: " in logged("--verbose")[2]
    assert not logged()[2]  # flags of one call are not those of the next
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_numbers_that_json_has_not_are_null(capsys):
    base.print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": 2}})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": {"d": 2}}

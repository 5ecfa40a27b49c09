"""The command over two devices: losses and weights of one, each device within its budget."""

import re

import jax
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.finetune import devices, peft
from tests.finetune.tiny import flags_of, make_folder, run

pytestmark = pytest.mark.runs_whole
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("devices"))


@pytest.fixture
def train(folder, tmp_path, capsys):
    """`train(name, *flags)`: losses and gradients by step, what was trained, and the text."""

    def trained(name, *more):
        out = tmp_path / name
        words = flags_of(folder, f"--out={out}", "--batch=8", f"--steps={STEPS}", *more)
        status, text, errors = run(capsys, *words)
        assert status == 0, errors
        found = re.findall(r"^step +(\d+)/\d+ +loss (\S+) +gradient (\S+)", text, re.MULTILINE)
        path = out / peft.WEIGHTS
        if not path.exists():
            path = out / "model" / "model.safetensors"
        arrays = {name: np.asarray(x) for name, x in jo.open_safetensors(path).items()}
        return {int(s): (float(a), float(b)) for s, a, b in found}, arrays, text

    return trained


def assert_close(got, want):
    assert got[0].keys() == want[0].keys() and len(want[0]) == STEPS
    for step in want[0]:
        np.testing.assert_allclose(got[0][step], want[0][step], rtol=2e-3)
    assert got[1].keys() == want[1].keys()
    for name, value in want[1].items():
        np.testing.assert_allclose(got[1][name], value, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "more",
    [(), ("--accumulate=2",), ("--tier=disk",), ("--quantize=int8",), ("--dropout=0.2",)],
)
def test_adapters_are_those_of_one_device(train, more):
    want = train("one", *more)
    got = train("two", "--devices=2", "--device-memory=600KiB", *more)
    assert_close(got, want)
    peak, unit = re.search(r"device memory: (\S+) (\w+) at the peak", got[2]).groups()
    assert unit == "KiB" and float(peak) <= 600
    assert re.search(r"each step moved [1-9].* to the device", got[2]), "the budget demands copies"


@pytest.mark.drawn(1)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_all_weights_are_divided_and_those_of_one_device(train, tier, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "LEAST_DIVIDED", 64)
    more = ["--full", f"--tier={tier}", *([f"--disk={tmp_path}"] if tier == "disk" else [])]
    want = train("one", *more)
    got = train("two", "--devices=2", "--device-memory=400KiB", *more)
    assert_close(got, want)


def test_each_device_has_its_part_of_what_is_trained_and_not_of_small_arrays():
    def spec_of(*shape, path=("embed",)):
        tree = jax.ShapeDtypeStruct(shape, np.float32)
        for name in reversed(path):
            tree = {name: tree}
        found = []
        devices.Devices(2).divided(tree, lambda leaf, sharding: found.append(sharding.spec))
        return tuple(found[0])

    whole, most = (), devices.LEAST_DIVIDED
    assert spec_of(most // 10, 8) == whole
    assert spec_of(most, 3) == ("devices",)
    assert spec_of(most + 1, 4) == (None, "devices")
    assert spec_of(most + 1, 3) == whole
    # Layers come one after another: of each a part.
    assert spec_of(most, 4, 8, path=("model", "layers", "up")) == (None, None, "devices")


def test_a_training_goes_on_over_another_number_of_devices(train, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "LEAST_DIVIDED", 64)
    more = ["--full", "--save-every=2", "--device-memory=600KiB", "--keep=9"]
    want = train("two", "--devices=2", *more)
    (tmp_path / "one").mkdir()
    (tmp_path / "two" / "checkpoints").rename(tmp_path / "one" / "checkpoints")
    for name in (tmp_path / "one" / "checkpoints").glob(f"step-{STEPS:08}/*"):
        name.write_bytes(b"")  # damaged: the one before is taken
    losses, arrays, text = train("one", "--resume", *more)
    assert "going on after step 2" in text and losses.keys() == {3, 4}
    assert_close(({**want[0], **losses}, arrays), want)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--batch=9"], "accumulate=1 times devices=2 does not divide batch=9"),
        (["--accumulate=4", "--batch=4"], "Pass a multiple of 8 as batch"),
        (["--devices=64", "--batch=64"], "devices=64 are more than the [0-9]+ that this process"),
        (["--memory=8MiB"], "memory=8MiB is one budget.*devices=2"),
    ],
)
def test_what_cannot_be_is_refused(folder, tmp_path, capsys, words, message):
    words = flags_of(folder, f"--out={tmp_path / 'out'}", "--devices=2", *words)
    status, _, errors = run(capsys, *words)
    assert status == 1 and re.search(message, errors), errors
    assert not (tmp_path / "out").exists()


def test_no_device_is_refused():
    with pytest.raises(ValueError, match="devices=0 is below 1"):
        devices.Devices(0)

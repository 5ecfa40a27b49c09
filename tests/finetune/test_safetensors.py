"""Written files are read by jaxoffload's own reader and by a parser that is written here."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.finetune import atomic, safetensors

RANDOM = np.random.default_rng(0)
TENSORS = {
    "bytes": RANDOM.integers(0, 255, 7, np.uint8),
    "half": jnp.asarray(RANDOM.standard_normal((3, 5)), jnp.bfloat16),
    "single": RANDOM.standard_normal((2, 3, 4)).astype(np.float32),
    "scalar": np.float32(3.5),
    "none": np.zeros((0, 4), np.float64),
    "turned": np.arange(12, dtype=np.int32).reshape(3, 4).T,
}


def parsed(path):
    """Name to (dtype, shape, bytes), by the format's description alone."""
    words = path.read_bytes()
    size = int.from_bytes(words[:8], "little")
    header = json.loads(words[8 : 8 + size])
    meta = header.pop("__metadata__")
    data = words[8 + size :]
    return meta, size, {
        name: (each["dtype"], each["shape"], data[slice(*each["data_offsets"])], each)
        for name, each in header.items()
    }  # fmt: skip


def test_what_is_saved_is_read_back_by_both_readers(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.save(path, TENSORS, {"step": "3"})
    meta, size, found = parsed(path)
    opened = jo.open_safetensors(path)
    assert meta == {"step": "3"} and size % 8 == 0 and set(found) == set(opened) == set(TENSORS)
    for name, tensor in TENSORS.items():
        tensor = np.asarray(tensor)
        assert found[name][2] == np.ascontiguousarray(tensor).tobytes()
        assert found[name][1] == list(tensor.shape)
        assert found[name][3]["data_offsets"][0] % tensor.dtype.itemsize == 0
        np.testing.assert_array_equal(np.asarray(opened[name]), tensor)
    assert found["half"][0] == "BF16" and os.listdir(tmp_path) == ["x.safetensors"]


def test_arrays_below_the_device_and_rows_of_them_are_saved_in_pieces(tmp_path, monkeypatch):
    stack = RANDOM.standard_normal((5, 4, 8)).astype(np.float32)
    below = jo.disk_put(stack, tmp_path)
    monkeypatch.setattr(safetensors, "_PIECE", 2 * stack[0].nbytes)
    assert [len(piece) for piece in safetensors._pieces(below)] == [256, 256, 128]
    rows = {f"layer.{i}": safetensors.Row(below, i) for i in range(5)}
    safetensors.save(tmp_path / "x.safetensors", {"stack": jo.host_put(stack), **rows})
    opened = jo.open_safetensors(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(np.asarray(opened["stack"]), stack)
    np.testing.assert_array_equal(np.asarray(opened["layer.3"]), stack[3])


def test_what_the_format_does_not_have_is_refused(tmp_path):
    with pytest.raises(TypeError, match="'z' is complex64"):
        safetensors.save(tmp_path / "x", {"z": np.zeros(2, np.complex64)})
    with pytest.raises(ValueError, match="__metadata__"):
        safetensors.save(tmp_path / "x", {"__metadata__": np.zeros(2)})
    assert not os.listdir(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), atomic.replaced(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]
    with pytest.raises(jo.DiskError, match="no_folder/x: No such file"):
        safetensors.save(tmp_path / "no_folder" / "x", {})


def test_a_file_too_large_for_its_limit_is_a_disk_error_and_the_old_one_stays(tmp_path):
    code = f"""
import resource, signal, numpy as np, jaxoffload as jo
from jaxoffload.finetune import safetensors
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
safetensors.save({str(tmp_path / "x")!r}, {{"a": np.zeros(4)}})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    safetensors.save({str(tmp_path / "x")!r}, {{"a": np.zeros(100_000)}})
except jo.DiskError as error:
    print("refused:", error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "refused:" in done.stdout and "File too large" in done.stdout, done.stderr
    assert jo.open_safetensors(tmp_path / "x")["a"].shape == (4,)
    assert os.listdir(tmp_path) == ["x"]


def test_private_files_are_their_owners_and_others_follow_the_umask(tmp_path):
    for name, private, mode in (("mine", True, 0o600), ("ours", False, 0o644)):
        before = os.umask(0o022)
        try:
            atomic.write_json(tmp_path / name, {"a": 1}, private)
        finally:
            os.umask(before)
        assert (tmp_path / name).stat().st_mode & 0o777 == mode
        assert json.loads((tmp_path / name).read_text()) == {"a": 1}

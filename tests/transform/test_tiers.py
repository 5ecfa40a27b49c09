"""Three tiers through the public entry: the same bits as without limits, whatever lives where."""

import gc
import json
import os
import signal
import struct
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxoffload as jo
from jaxoffload.runtime.arrays import disk_store

WIDTH, LAYERS = 96, 6


def train_step(state, batch):
    """Layers under scan, a backward pass, and Adam whose state is stacked as the weights are."""
    params, moments = state

    def loss(p):
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, p)[0]
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, moments = optax.adam(1e-2).update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def state_and_batch(width=WIDTH, layers=LAYERS):
    random = np.random.default_rng(0)
    params = (random.normal(size=(layers, width, width)) / width**0.5).astype(np.float32)
    batch = random.normal(size=(256, width)).astype(np.float32)
    return (params, jax.tree.map(np.asarray, optax.adam(1e-2).init(params))), batch


def offloaded(**options):
    options = {"device_memory": "500KiB", "vertex_memory": 1, "check": True, **options}
    return jo.offload(train_step, donate_argnums=0, **options)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def want():
    state, batch = state_and_batch()
    step, outs = offloaded(), []
    for _ in range(3):
        state, value = step(state, batch)
        outs.append(bits((state, value)))
        state = jax.tree.map(np.asarray, state)
    return outs


LAUNCH = {
    "work-conserving": "work-conserving",
    "fixed": "fixed",
    "random": jo.policies.random(3, delays=0.002),
}


@pytest.mark.drawn()
@pytest.mark.parametrize("launch", LAUNCH.values(), ids=LAUNCH)
@pytest.mark.parametrize("host_memory", ["100KiB", "200KiB", None])
@pytest.mark.parametrize("put", ["memory", "host", "disk"])
def test_every_tier_gives_the_same_bits(want, put, host_memory, launch, tmp_path):
    state, batch = state_and_batch()
    if put != "memory":
        state = jo.disk_put(state, tmp_path) if put == "disk" else jo.host_put(state)
    step = offloaded(host_memory=host_memory, disk=tmp_path, launch=launch)
    for expected in want:
        new, value = step(state, batch)
        assert bits((new, value)) == expected
        run, plan = step.last_run, step.plan(new, batch)
        if put != "memory":
            kind = jo.DiskArray if put == "disk" else jo.HostArray
            assert all(isinstance(x, kind) for x in jax.tree.leaves(new))
            assert all(x.is_deleted() for x in jax.tree.leaves(state))
        assert (run.bytes_loaded, run.bytes_stored) == (plan.bytes_loaded, plan.bytes_stored)
        assert (put != "disk" and host_memory is None) or plan.bytes_loaded > 0
        if host_memory is not None:
            assert plan.host_bytes <= jo.options.parse_bytes(host_memory, "")
        assert run.peak_device_bytes <= 500 * 1024
        plan.verify()
        state = new
    if put == "disk":
        total = sum(x.nbytes for x in jax.tree.leaves(state))
        # State is read once and written once a step.
        assert run.bytes_stored >= total and run.bytes_loaded >= total
        assert run.drive_lifetime_seconds(1e15) == pytest.approx(
            1e15 / run.bytes_stored * run.seconds
        )
    assert os.listdir(tmp_path) == []


def test_several_folders_share_the_bytes(want, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    state, batch = state_and_batch()
    step = offloaded(host_memory="100KiB", disk=folders)
    state, value = step(jo.disk_put(state, folders), batch)
    assert bits((state, value)) == want[0]


def test_arguments_on_disk_without_any_limit(tmp_path):
    x = np.arange(6000, dtype=np.float32).reshape(3, 2000)
    step = jo.offload(lambda x: (x * 2, x.sum()), device_memory=None)
    doubled, total = step(jo.disk_put(x, tmp_path))
    np.testing.assert_array_equal(doubled, x * 2)
    np.testing.assert_allclose(total, x.sum(), rtol=1e-6)


def test_arguments_below_the_device_that_are_only_returned(tmp_path):
    x = np.arange(5000, dtype=np.float32)
    step = jo.offload(lambda x, y: (x, y), device_memory=None, donate_argnums=0)
    for put in (jo.host_put, lambda t: jo.disk_put(t, tmp_path)):
        kept, copied = step(put(x), put(x + 1))
        np.testing.assert_array_equal(kept, x)
        np.testing.assert_array_equal(copied, x + 1)
        assert isinstance(kept, jo.HostArray | jo.DiskArray) and isinstance(copied, jax.Array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5000)], ids=str)
def test_arrays_below_the_device_behave_like_arrays(shape, dtype, tmp_path):
    x = (np.random.default_rng(0).normal(size=shape) * 3).astype(dtype)
    for made in (jo.host_put(x), jo.disk_put(x, tmp_path)):
        assert (made.shape, made.dtype, made.ndim, made.size) == (shape, x.dtype, x.ndim, x.size)
        assert made.nbytes == x.nbytes and np.asarray(made).tobytes() == x.tobytes()
        assert str(x.dtype) in repr(made) and made.writable
        if shape:
            assert len(made) == shape[0]
            assert made[-1].tobytes() == x[-1].tobytes() if shape[0] else True
            assert made[1:2].tobytes() == x[1:2].tobytes()
            with pytest.raises(ValueError, match="step must be 1"):
                made[::2]
        with pytest.raises(TypeError, match=r"asarray"):
            made[None]
        assert np.asarray(made, dtype="complex128").tobytes() == x.astype("complex128").tobytes()
        made.delete()
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(made)
        with pytest.raises(RuntimeError, match="deleted"):
            jo.offload(lambda v: v, device_memory=None)(made)
    zeros = jo.disk_put(jax.ShapeDtypeStruct(shape, dtype), tmp_path)
    assert not np.asarray(zeros).astype(bool).any()


def safetensors(path, tensors):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    names = {"float32": "F32", "bfloat16": "BF16", "int64": "I64"}
    for name, x in tensors.items():
        end = len(data) + x.nbytes
        header[name] = {
            "dtype": names[x.dtype.name], "shape": x.shape, "data_offsets": [len(data), end],
        }  # fmt: skip
        data += x.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_checkpoint_is_read_straight_from_its_file(tmp_path):
    random = np.random.default_rng(0)
    tensors = {
        "w": random.normal(size=(300, 200)).astype(np.float32),
        "odd": random.normal(size=(7,)).astype(ml_dtypes.bfloat16),
        "b": random.normal(size=(200,)).astype(np.float32),
    }
    path = tmp_path / "model.safetensors"
    safetensors(path, tensors)
    opened = jo.open_safetensors(path)
    assert opened.keys() == tensors.keys()
    for name, x in tensors.items():
        assert np.asarray(opened[name]).tobytes() == x.tobytes()
        assert not opened[name].writable
    x = random.normal(size=(4, 300)).astype(np.float32)

    def f(p, x):
        return x @ p["w"] + (p["b"] * p["odd"].astype(jnp.float32).sum())[None]

    step = jo.offload(f, device_memory="600KiB", host_memory="260KiB", disk=tmp_path)
    wide = {name: each.astype(np.float64) for name, each in tensors.items()}
    want = x.astype(np.float64) @ wide["w"] + wide["b"] * wide["odd"].sum()
    np.testing.assert_allclose(step(opened, x), want, rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, match=r"read only.*donate_argnums.*disk_put"):
        jo.offload(f, device_memory=None, donate_argnums=0)(opened, x)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="downloaded whole"):
        jo.open_safetensors(path)
    with pytest.raises(jo.RunError, match=r"model\.safetensors was changed"):
        step(opened, x)


def entry(shape, begin, end, dtype="U8"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BAD_HEADERS = {
    "list": ([], "is a list"),
    "null": (None, "is a NoneType"),
    "no entry": ({"a": 3}, "a has no dtype, shape and data_offsets"),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 8]}}, "a has no dtype"),
    "dtype": ({"a": entry([8], 0, 8, "F7")}, "unknown dtype F7"),
    "dtype list": ({"a": entry([8], 0, 8, ["U8"])}, "unknown dtype"),
    "negative": ({"a": entry([-2, -4], 0, 8)}, r"shape \[-2, -4\]"),
    "negative and zero": ({"a": entry([-5, 0], 0, 0), "b": entry([8], 0, 8)}, "shape"),
    "float": ({"a": entry([2.0, 4.0], 0, 8)}, "shape"),
    "half": ({"a": entry([0.5, 16], 0, 8)}, "shape"),
    "bool": ({"a": entry([True, 8], 0, 8)}, "shape"),
    "text shape": ({"a": entry("8", 0, 8)}, "shape"),
    "rank": ({"a": entry([1] * 70 + [8], 0, 8)}, "shape"),
    "huge": ({"a": entry([2**70, 0], 0, 0), "b": entry([8], 0, 8)}, "shape"),
    "offsets": ({"a": entry([8], 0, 8.0)}, "data_offsets"),
    "offsets bool": ({"a": entry([8], False, 8)}, "data_offsets"),
    "three offsets": ({"a": {**entry([8], 0, 8), "data_offsets": [0, 8, 8]}}, "data_offsets"),
    "offsets huge": ({"a": entry([8], 2**70, 2**70 + 8)}, "data_offsets"),
    "backwards": ({"a": entry([8], 8, 0)}, "bytes 8 to 0"),
    "size": ({"a": entry([7], 0, 8)}, "bytes 0 to 8"),
    "beyond": ({"a": entry([9], 0, 9)}, "have 9 bytes, the file has 8"),
    "overlap": ({"a": entry([8], 0, 8), "b": entry([4], 4, 8)}, "b overlaps another tensor"),
    "twins": ({"a": entry([8], 0, 8), "b": entry([8], 0, 8)}, "b overlaps another tensor"),
    "hole": ({"a": entry([2], 0, 2), "b": entry([4], 4, 8)}, "b leaves a hole"),
    "hole in front": ({"a": entry([7], 1, 8)}, "a leaves a hole"),
    "rest": ({"a": entry([4], 0, 4)}, "have 4 bytes, the file has 8"),
}


def with_header(text, data=bytes(8)):
    return struct.pack("<Q", len(text)) + text + data


BAD_FILES = {
    "empty": (b"", "its header would have"),
    "short": (b"1234567", "its header would have"),
    "long header": (b"\xff" * 100, "its header would have 18446744073709551615 bytes"),
    "truncated": (with_header(b"{}", b"")[:-1], "its header would have 2 bytes"),
    "no text": (with_header(b"\xff\xfe{}"), "codec"),
    "no JSON": (with_header(b"{"), "Expecting"),
    "deep": (with_header(b"[" * 100_000 + b"]" * 100_000), "recursion"),
    "twice": (with_header(b'{"a": 1, "b": 2, "a": 3}'), "names 'a' twice"),
    **{n: (with_header(json.dumps(h).encode()), text) for n, (h, text) in BAD_HEADERS.items()},
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_what_is_no_checkpoint_is_refused(name, tmp_path):
    path, (content, text) = tmp_path / "x.safetensors", BAD_FILES[name]
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"x\.safetensors.*not a safetensors file: .*{text}"):
        jo.open_safetensors(path)


def test_a_header_that_is_too_long_is_not_read(tmp_path):
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 10**8 + 1))
        file.truncate(10**9)
    with pytest.raises(ValueError, match="header would have 100000001 bytes.*at most 100000000"):
        jo.open_safetensors(path)


def test_what_is_no_regular_file_is_no_checkpoint(tmp_path):
    with pytest.raises(jo.DiskError, match="nowhere cannot be opened: No such file"):
        jo.open_safetensors(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        with pytest.raises(jo.DiskError, match=f"open_safetensors: {path} is no regular file"):
            jo.open_safetensors(path)
    with pytest.raises(TypeError, match="open_safetensors: path=3 is a int"):
        jo.open_safetensors(3)
    with pytest.raises(ValueError, match=r"path='a\\x00b' holds a NUL"):
        jo.open_safetensors("a\0b")


def test_a_checkpoint_is_opened_by_any_kind_of_path_and_may_have_empty_tensors(tmp_path):
    path = tmp_path / "x.safetensors"
    header = {"__metadata__": {"format": "pt"}, "e": entry([0, 3], 4, 4), "b": entry([4], 4, 8)}
    header["a"] = entry([], 0, 4, "I32")
    text = json.dumps(header).encode() + b"   "
    path.write_bytes(with_header(text, bytes(range(8))))
    for form in (path, str(path), os.fsencode(path)):
        found = jo.open_safetensors(form)
        assert list(found) == ["e", "b", "a"] and found["e"].shape == (0, 3)
        assert np.asarray(found["e"]).size == 0
        assert np.asarray(found["b"]).tolist() == [4, 5, 6, 7]
        assert np.asarray(found["a"]) == 0x03020100


MANY = """
    import json, resource, struct, sys
    import numpy as np
    import jaxoffload as jo
    count, path = 5000, sys.argv[1]
    header = {f"t{i}": {"dtype": "I32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
              for i in range(count)}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + np.arange(count, dtype=np.int32).tobytes())
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    tensors = jo.open_safetensors(path)
    assert [int(np.asarray(tensors[f"t{i}"])[0]) for i in (0, 4321, 4999)] == [0, 4321, 4999]
    assert len(tensors) == count
"""


def test_a_checkpoint_of_many_tensors_takes_one_descriptor(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(MANY), str(tmp_path / "many.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_checkpoint_that_is_replaced_goes_on_being_the_old_one(tmp_path):
    """Header and tensors are of one open file."""
    path = tmp_path / "x.safetensors"
    safetensors(path, {"a": np.arange(100)})
    opened = jo.open_safetensors(path)
    safetensors(tmp_path / "new", {"b": np.arange(50), "a": np.arange(50)})
    os.replace(tmp_path / "new", path)
    assert np.asarray(opened["a"]).tolist() == list(range(100))
    path.unlink()
    assert np.asarray(opened["a"]).tolist() == list(range(100))


LIMITED = """
    import hashlib, resource, sys
    import jax, jax.numpy as jnp, numpy as np, optax
    import jaxoffload as jo

    LAYERS, WIDTH = 72, 1024  # 288 MiB of weights, three times that with Adam's moments
    limits = dict(device_memory="32MiB", host_memory="24MiB", disk=sys.argv[1])
    limits = limits if sys.argv[2] == "limited" else dict(device_memory="4GiB", disk=sys.argv[1])
    cut = dict(vertex_memory=1, donate_argnums=0)

    def init(state, key):
        def layer(_, key):
            return None, jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5
        weights = jax.lax.scan(layer, None, jax.random.split(key, LAYERS))[1]
        return (weights, state[1])

    def step(state, batch):
        def loss(p):
            x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, p)[0]
            return jnp.mean(x**2)
        value, grads = jax.value_and_grad(loss)(state[0])
        updates, moments = optax.adam(1e-3).update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), value

    def data_bytes():
        with open("/proc/self/status") as file:
            return next(int(x.split()[1]) << 10 for x in file if x.startswith("VmData"))

    small = jo.disk_put(np.ones(100000, np.float32), sys.argv[1])
    jo.offload(lambda x: x @ x, device_memory=None)(small)
    weights = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), np.float32)
    shapes = (weights, jax.eval_shape(optax.adam(1e-3).init, weights))
    key, batch = jax.random.key(0), np.ones((64, WIDTH), np.float32)
    init, step = jo.offload(init, **limits, **cut), jo.offload(step, **limits, **cut)
    state = jo.disk_put(shapes, sys.argv[1])
    for each, argument in ((init, key), (step, batch)):
        each.plan(state, argument).native  # compiled: XLA needs memory of its own for that
    if sys.argv[2] == "limited":
        # And 56 that the arenas have already. A run takes some 70; where less is left, XLA's matrix
        # product may get no memory to pack its operands, and returns wrong numbers without a word.
        most = data_bytes() + (150 << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    total = sum(x.nbytes for x in jax.tree.leaves(state))
    state, value = step(init(state, key), batch)
    if sys.argv[2] == "limited":
        assert step.last_run.peak_device_bytes <= 32 << 20
        assert step.plan(state, batch).host_bytes <= 24 << 20
        assert total > 4 * (206 << 20)
    digest = hashlib.sha256(np.asarray(value).tobytes())
    for array in jax.tree.leaves(state):
        for row in array if array.shape else [np.asarray(array)]:
            digest.update(row.tobytes())
    print(digest.hexdigest())
"""


@pytest.mark.drawn(every=2)
def test_data_of_four_times_the_memory_give_the_same_bits(tmp_path):
    """Under RLIMIT_DATA: 206 MiB for device, host tier, and all else that a run allocates."""
    found = []
    for how in ("limited", "free"):
        command = [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path), how]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(done.stdout)
    assert found[0] == found[1]


# Faults -------------------------------------------------------------------------------------------


def test_bad_folders_and_too_little_space_are_refused_before_anything_runs(tmp_path):
    state, batch = state_and_batch()
    with pytest.raises(jo.DiskError, match=r"missing.*No such file"):
        offloaded(host_memory="100KiB", disk=tmp_path / "missing")(state, batch)
    with pytest.raises(jo.DiskError, match=r"no file can be made in /proc"):
        jo.disk_put(state, "/proc")
    with pytest.raises(jo.DiskError, match=r"has no room for \d+ bytes"):
        jo.disk_put(jax.ShapeDtypeStruct((1 << 48,), np.float32), tmp_path)
    with pytest.raises(jo.PlanError, match=r"host_memory=1024.*smallest feasible 98304"):
        offloaded(host_memory=1024, disk=tmp_path)(state, batch)
    with pytest.raises(jo.PlanError, match=r"offload\(train_step\): host_memory=102400.*disk="):
        offloaded(host_memory="100KiB")(state, batch)
    with pytest.raises(TypeError, match="disk=3"):
        jo.offload(train_step, disk=3)
    with pytest.raises(ValueError, match="host_memory='much'"):
        jo.offload(train_step, host_memory="much")


def test_folders_are_looked_at_when_they_are_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for wrong, error, text in (
        (tmp_path / "missing", jo.DiskError, r"missing': No such file or directory\. Make it"),
        (tmp_path / "file", jo.DiskError, "file': Not a directory"),
        ([tmp_path, tmp_path / "missing"], jo.DiskError, "No such file"),
        ("", ValueError, r"disk='' is empty.*'\.' is the current folder"),
        (f"{tmp_path}/a\0b", ValueError, "holds a NUL"),
        ("a\ud800b", ValueError, "is not UTF-8"),
        ("a\udcffb", ValueError, "is not UTF-8"),
        (b"a\xffb", ValueError, "is not UTF-8"),
        ([], ValueError, "names no folder"),
        ([3], TypeError, "holds a int"),
    ):
        with pytest.raises(error, match=text):
            jo.offload(train_step, disk=wrong)
        with pytest.raises(error, match=text.replace("disk=", "path=")):
            jo.disk_put(np.ones(3), wrong)
    kept = jo.disk_put(np.arange(3), os.fsencode(tmp_path))
    assert np.asarray(kept).tolist() == [0, 1, 2] and kept.path == str(tmp_path)


def test_folders_that_are_read_only_are_refused_when_they_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may write everywhere
    with pytest.raises(jo.DiskError, match="Permission denied"):
        jo.offload(train_step, disk=tmp_path)


def store_files(folder):
    """Descriptors of this process's files without a name in a folder."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(str(folder)):
            found.append(int(fd))
    return found


def test_files_are_private_and_have_no_name(tmp_path):
    kept = jo.disk_put(np.ones(10000, np.float32), tmp_path)
    assert os.listdir(tmp_path) == []
    (fd,) = store_files(tmp_path)
    about = os.fstat(fd)
    assert about.st_mode & 0o777 == 0o600 and about.st_nlink == 0
    assert about.st_blocks * 512 >= kept.nbytes
    del kept
    gc.collect()
    assert os.fstat(fd).st_blocks == 0


def test_a_flipped_bit_on_disk_stops_the_run_and_the_next_one_works(tmp_path):
    state, batch = state_and_batch()
    step = offloaded(host_memory="100KiB", disk=tmp_path)
    on_disk = jo.disk_put(state, tmp_path)
    fd = max(store_files(tmp_path), key=lambda fd: os.fstat(fd).st_size)
    with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(jo.RunError, match=r"load of f32.*came back changed.*Check that drive"):
        step(on_disk, batch)
    damaged = 0
    for array, want in zip(jax.tree.leaves(on_disk), jax.tree.leaves(state), strict=True):
        if array.is_deleted():
            continue  # the run had begun to overwrite it
        try:
            np.testing.assert_array_equal(array, want)
        except jo.DiskError:
            damaged += 1
    assert damaged == 1
    again, _ = step(jo.disk_put(state, tmp_path), batch)
    np.testing.assert_allclose(again[0], offloaded()(state, batch)[0][0], rtol=1e-6)


@pytest.mark.usefixtures("collector_is_off")
def test_keyboard_interrupt_in_a_long_run_leaves_nothing(tmp_path):
    state, batch = state_and_batch()
    step = offloaded(host_memory="100KiB", disk=tmp_path, launch=jo.policies.random(0, delays=0.02))
    step.plan(jo.disk_put(state, tmp_path), batch).native  # noqa: B018 - compiled before the clock
    before = disk_store((str(tmp_path),)).stats()["reserved_bytes"]
    on_disk = jo.disk_put(state, tmp_path)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        step(on_disk, batch)
    del on_disk
    gc.collect()
    assert disk_store((str(tmp_path),)).stats()["reserved_bytes"] == before
    quick = offloaded(host_memory="100KiB", disk=tmp_path)
    quick(jo.disk_put(state, tmp_path), batch)


CHILD = """
    import os, sys
    import numpy as np
    import jaxoffload as jo
    folder = sys.argv[1]
    kept = jo.disk_put(np.full(3_000_000, os.getpid(), np.float32), folder)
    step = jo.offload(lambda x: x + 1, device_memory=None, donate_argnums=0)
    print("ready", flush=True)
    for i in range(1, 6 if sys.argv[2] == "ends" else 10**9):
        kept = step(kept)
    assert (np.asarray(kept) == os.getpid() + 5).all()
    print("done", flush=True)
"""


def child(folder, how):
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(folder), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_process_leaves_nothing(tmp_path):
    process = child(tmp_path, "runs on")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert os.listdir(tmp_path) == []


def test_two_processes_may_use_one_folder(tmp_path):
    processes = [child(tmp_path, "ends") for _ in range(2)]
    assert [p.communicate()[0] for p in processes] == ["ready\ndone\n"] * 2
    assert [p.returncode for p in processes] == [0, 0]


def test_a_folder_that_vanishes_does_no_harm(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    x = np.arange(50000, dtype=np.float32)
    kept = jo.disk_put(x, folder)
    folder.rmdir()
    got = jo.offload(lambda v: v * 2, device_memory=None, donate_argnums=0)(kept)
    np.testing.assert_array_equal(got, x * 2)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_arrays_below_the_device_are_closed_over_inside_jit(tmp_path, tier):
    """XLA sees none of them: they are no operands of its program."""
    # An eighth: with weights of norm one rounding does not grow from layer to layer.
    weights = (np.random.default_rng(0).normal(size=(4, 64, 64)) / 8).astype(np.float32)
    kept = jo.host_put(weights) if tier == "host" else jo.disk_put(weights, tmp_path)

    def f(x, w, scale):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x * scale, w)[0]

    x = np.ones((32, 64), np.float32)
    step = jo.offload(f, device_memory="80KiB", vertex_memory=1, check=True)
    want = np.asarray(step(x, weights, 0.5))
    jitted = jax.jit(lambda x: step(x + 0, kept, 0.5))
    for _ in range(2):
        assert np.asarray(jitted(x)).tobytes() == want.tobytes()
    (size,) = {len(a.aval.shape) for a in jax.make_jaxpr(jitted)(x).jaxpr.invars}
    assert size == 2
    batched = jax.vmap(lambda x: step(x, kept, 0.5))(np.stack([x, 2 * x]))
    np.testing.assert_allclose(batched[0], want, rtol=1e-5, atol=1e-6)
    got = jax.jvp(lambda x: step(x, kept, 0.5), (x,), (x,))[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    kept.delete()  # the compiled program holds its memory
    assert np.asarray(jitted(x)).tobytes() == want.tobytes()


def test_what_a_trace_cannot_do_with_arrays_below_the_device_is_refused(tmp_path):
    kept = jo.disk_put(np.ones(10, np.float32), tmp_path)
    both = jo.offload(lambda a, b: a + b, device_memory=None, donate_argnums=0)
    with pytest.raises(ValueError, match=r"donated inside jax\.jit"):
        jax.jit(lambda b: both(kept, b))(np.ones(10, np.float32))
    with pytest.raises(ValueError, match="donated and passed twice"):
        both(kept, kept)
    host = jo.offload(lambda a: a + 1, device_memory=None, results="host")
    with pytest.raises(ValueError, match=r"results='host' inside jax\.jit"):
        jax.jit(host)(np.ones(10, np.float32))


def test_results_go_to_host_memory_where_one_asks():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    out = jo.offload(lambda x: {"a": x + 1, "b": x.sum()}, device_memory=None, results="host")(x)
    assert all(isinstance(leaf, jo.HostArray) for leaf in jax.tree.leaves(out))
    np.testing.assert_array_equal(out["a"], x + 1)
    with pytest.raises(ValueError, match='results=\'disc\' is no tier. Pass "device" or "host"'):
        jo.offload(lambda x: x, results="disc")


def test_explain_tells_of_host_memory_and_disk(tmp_path):
    state, batch = state_and_batch()
    text = str(offloaded(host_memory="100KiB", disk=tmp_path).explain(state, batch))
    assert "Host memory for that: 96 KiB" in text and "are reserved" in text


def lookup(table, ids, weights):
    rows = table[ids]
    return jnp.tanh(rows @ weights) @ weights


def table_ids_weights(count=40000):
    random = np.random.default_rng(0)
    table = random.normal(size=(count, 64)).astype(np.float32)
    return table, random.integers(0, count, 300), np.eye(64, dtype=np.float32)


@pytest.mark.parametrize("jitted", [False, True])
def test_rows_of_a_table_are_read_where_the_table_is(jitted):
    """The budget is a hundredth of the table, of which no byte is copied."""
    table, ids, weights = table_ids_weights()
    kept = jo.host_put(table)
    step = jo.offload(lookup, device_memory=table.nbytes // 50, vertex_memory=1, check=True)
    want = np.asarray(jo.offload(lookup, device_memory=None, vertex_memory=1)(table, ids, weights))
    if jitted:
        got = jax.jit(lambda ids, weights: step(kept, ids, weights))(ids, weights)
    else:
        got = step(kept, ids, weights)
        assert step.last_run.bytes_reloaded < table.nbytes // 50
    assert np.asarray(got).tobytes() == want.tobytes()
    plan = step.plan(kept, ids, weights)
    assert plan.gathered_arguments == {0}
    plan.verify()
    assert plan.min_device_memory < table.nbytes // 50


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
def test_a_table_that_is_read_whole_or_small_or_on_disk_is_reloaded(tmp_path):
    table, ids, weights = table_ids_weights()
    options = {"device_memory": 3 * table.nbytes, "vertex_memory": 1}

    def gathered(f, *args):
        return jo.offload(f, **options).plan(*args).gathered_arguments

    assert gathered(lookup, jo.disk_put(table, tmp_path), ids, weights) == set()
    assert gathered(lambda t, i: t.sum() + i.sum(), table, ids) == set()
    assert gathered(lambda t, i: t[i], table[:4000], ids) == set()
    assert gathered(lambda t, i: t[i], table, np.arange(20000)) == set()
    assert gathered(lambda t, i: t[i], table, ids) == {0}


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
def test_a_table_that_is_overwritten_by_a_result_is_read_before():
    table, ids, _ = table_ids_weights()
    f = jax.tree_util.Partial(lambda t, i: (t.at[i].set(0.0), t[i] * 2))
    least = jo.offload(f, device_memory=None, vertex_memory=1).plan(table, ids).min_device_memory
    for seed in range(3):
        launch = jo.policies.random(seed, delays=1e-4)
        step = jo.offload(
            f, device_memory=least, donate_argnums=0, vertex_memory=1, launch=launch, check=True
        )
        new, rows = step(jo.host_put(table), ids)
        np.testing.assert_array_equal(rows, table[ids] * 2)
        want = table.copy()
        want[ids] = 0
        np.testing.assert_array_equal(new, want)


@pytest.mark.parametrize("host_memory, runs", [(16384, True), (20000, True), (16383, False)])
def test_host_memory_that_is_enough_is_not_refused(host_memory, runs):
    """Some of the planner's rules need more: those are passed over."""
    a, b = (np.random.default_rng(k).normal(size=(64, 64)).astype(np.float32) for k in range(2))

    def f(a, b):
        return jnp.tanh(a @ b) @ a + jnp.sin(b) @ b

    step = jo.offload(f, device_memory=49152, host_memory=host_memory)
    if not runs:
        with pytest.raises(
            jo.PlanError, match=r"host_memory=16383 .* Pass 16384 or more, or disk="
        ):
            step(a, b)
        return
    np.testing.assert_allclose(step(a, b), jax.jit(f)(a, b), rtol=1e-4, atol=1e-4)
    assert 0 < step.plan(a, b).host_bytes <= host_memory


def shifted(x):
    return x * 2 + 1


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "complex128"])
def test_arrays_of_64_bits_are_read_with_64_bits_or_not_at_all(dtype, tmp_path):
    """Without jax_enable_x64 a plan is for 32 bits: of a table of 64 it read every other half."""
    values = (np.arange(4096).reshape(64, 64) + 0.5).astype(dtype)
    step = jo.offload(shifted, device_memory="8KiB", cut="always")
    narrow = jax.jit(shifted)(values).dtype.name
    message = rf"x is {dtype}\[64, 64\], and jax_enable_x64 is off. Pass it as {narrow}, or"
    for put in (jo.host_put(values), jo.disk_put(values, tmp_path)):
        for _ in range(2):
            with pytest.raises(TypeError, match=message):
                step(put)
        with jax.enable_x64(True):
            for _ in range(3):
                np.testing.assert_array_equal(np.asarray(step(put)), values * 2 + 1)
        with pytest.raises(TypeError, match=message):
            step(put)
        np.testing.assert_array_equal(np.asarray(put), values)


def test_arrays_of_jaxs_with_64_bits_are_not_read_as_32():
    with jax.enable_x64(True):
        wide = jnp.arange(4096.0)
    step = jo.offload(shifted, device_memory="8KiB", cut="always")
    for _ in range(2):
        with pytest.raises(TypeError, match=r"x is float64\[4096\], and jax_enable_x64 is off"):
            step(wide)
    with jax.enable_x64(True):
        for _ in range(3):
            np.testing.assert_array_equal(np.asarray(step(wide)), np.arange(4096.0) * 2 + 1)
    with pytest.raises(TypeError, match="jax_enable_x64 is off"):
        step(wide)

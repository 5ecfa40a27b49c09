"""The user's own kernels (`jax.ffi`) and jaxlib's, in vertices that another client runs."""

import ctypes
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import jaxoffload as jo
from tests.foreign import judge

SOURCE = """
#include "xla/ffi/api/ffi.h"
#include <memory>
namespace ffi = xla::ffi;
using In = ffi::Buffer<ffi::F32>;
using Out = ffi::Result<In>;

static ffi::Error Scale(float by, In x, Out y) {
  if (by == 0) return ffi::Error::InvalidArgument("scaled by nothing");
  for (size_t i = 0; i < x.element_count(); ++i) y->typed_data()[i] = by * x.typed_data()[i];
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(ScaleHandler, Scale,
                              ffi::Ffi::Bind().Attr<float>("by").Arg<In>().Ret<In>());

static ffi::Error Ready() { return ffi::Error::Success(); }
XLA_FFI_DEFINE_HANDLER_SYMBOL(ReadyHandler, Ready, ffi::Ffi::BindPrepare());
"""

STEPS = [{"vertex_memory": 1}, {"cut": "always"}]


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The compiled kernels."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler is found as c++, which the test's own kernel needs")
    folder = tmp_path_factory.mktemp("ffi")
    (folder / "kernel.cc").write_text(SOURCE)
    made = folder / "kernel.so"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}"]
    subprocess.run([compiler, *flags, "kernel.cc", "-o", made], cwd=folder, check=True)
    return made


@pytest.fixture(scope="session", autouse=True)
def handlers(library):
    """Registers "tests_scale", and the same with a stage before it as "tests_prepared": once in a
    process, which may come back to this file."""
    loaded = ctypes.CDLL(os.fspath(library))
    scale, ready = (jax.ffi.pycapsule(getattr(loaded, f"{n}Handler")) for n in ("Scale", "Ready"))
    jax.ffi.register_ffi_target("tests_scale", scale, platform="cpu")
    stages = {"prepare": ready, "execute": scale}
    jax.ffi.register_ffi_target("tests_prepared", stages, platform="cpu")


def scaled(x, by, name="tests_scale"):
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, by=np.float32(by))


def function(x, w):
    for by in (0.5, 2.0, 0.25):
        x = jnp.tanh(scaled(x @ w, by)) + x
    return x, x.sum()


@pytest.fixture(scope="module")
def operands():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(96, 96)) / 8, jnp.float32) for _ in range(2)]


@pytest.mark.parametrize("options", STEPS)
def test_the_users_kernels_run_in_vertices(options, operands):
    least = jo.offload(function, device_memory=None, **options).plan(*operands).min_device_memory
    step = jo.offload(function, device_memory=least, check=True, **options)
    want = jax.jit(function)(*operands)
    for got in (step(*operands), jax.jit(step)(*operands)):
        for w, g in zip(want, got, strict=True):
            assert not judge.disagreement(np.asarray(w), np.asarray(g))
    assert len(step.plan(*operands).taskgraph.vertices) > 1


def test_what_one_of_them_reports_ends_the_run(operands):
    step = jo.offload(lambda x: scaled(x, 0) + 1, device_memory=None, cut="always")
    with pytest.raises(jo.RunError, match="scaled by nothing"):
        step(operands[0])
    assert (jo.offload(lambda x: scaled(x, 2), device_memory=None, cut="always")(operands[0])).size


@pytest.mark.parametrize("options", STEPS)
def test_what_another_client_cannot_call_runs_whole_or_is_refused(options, operands):
    def prepared(x):
        return jnp.tanh(scaled(jnp.sin(x), 2, "tests_prepared"))

    want = jax.jit(prepared)(operands[0])
    fits = jo.offload(prepared, device_memory=None, **options)
    np.testing.assert_array_equal(fits(operands[0]), want)
    whole = jo.offload(prepared, device_memory=None).plan(operands[0])
    assert whole.min_device_memory == whole.peak_device_bytes
    does_not = jo.offload(prepared, device_memory="40KiB", **options)
    with pytest.raises(jo.CaptureError, match=r"ffi_call at \S*test_ffi.py:\d+.*'tests_prepared'"):
        does_not(operands[0])


@pytest.mark.parametrize("options", STEPS)
def test_sparse_rows_by_jaxlibs_own_kernel(options):
    """On a CPU `BCSR @ dense` is a custom call."""
    rng = np.random.default_rng(0)
    matrix = sparse.BCSR.fromdense(np.maximum(rng.normal(size=(64, 64)), 0).astype(np.float32))
    x = rng.normal(size=(64, 32)).astype(np.float32)

    def product(matrix, x):
        return jnp.tanh(matrix @ (2 * x)) + 1

    assert "cpu_csr_sparse_dense_ffi" in jax.jit(product).lower(matrix, x).as_text()
    step = jo.offload(product, device_memory=None, **options)
    got, want = step(matrix, x), jax.jit(product)(matrix, x)
    assert not judge.disagreement(np.asarray(want), np.asarray(got))


ANEW = """
import ctypes, sys, jax, numpy as np, jaxoffload as jo
handler = jax.ffi.pycapsule(ctypes.CDLL(sys.argv[1]).ScaleHandler)
jax.ffi.register_ffi_target("tests_scale", handler, platform="cpu")
call = jax.ffi.ffi_call("tests_scale", jax.ShapeDtypeStruct((64,), np.float32))
step = jo.offload(lambda x: call(x + 1, by=np.float32(2)), device_memory=None, cut="always")
x = np.arange(64, dtype=np.float32)
assert (step(x) == 2 * x + 2).all()
print(step.plan(x).compile_report.loaded)
"""


def test_a_kept_executable_finds_its_kernel(library, tmp_path):
    """What another process compiled is loaded before anything has told of the kernel."""
    environment = {**os.environ, "JAXOFFLOAD_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", ANEW, os.fspath(library)]
    loaded = [
        int(subprocess.check_output(command, env=environment, text=True).split()[-1])
        for _ in range(2)
    ]
    assert loaded[0] == 0 < loaded[1]

"""The first checks of a GPU, before anything is built on it.

    python -m benchmarks.gpu.probe

Each check runs in a process of its own under a watchdog, for some are about deadlocks. The nested
checks use jaxoffload itself and say so when it is not installed.
"""

import ctypes
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
from typing import Any

LIMIT_SECONDS = 60
COUNT, ROUNDS = 1 << 16, 1000


def build(folder: str) -> str:
    """The probe's library.

    Raises:
      RuntimeError: there is no compiler, or the headers of PJRT are not installed.
    """
    import xla_plugins.xla_cpu_pjrt as headers

    source = pathlib.Path(__file__).with_name("probe.cc")
    made = os.path.join(folder, "libprobe.so")
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-shared", "-fPIC"]
    command += [f"-I{list(headers.__path__)[0]}/include", str(source), "-o", made, "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return made


def increment(count: int) -> tuple[bytes, bytes]:
    """x + 1 into a donated place: StableHLO text and compile options."""
    from jaxlib import xla_client

    code = textwrap.dedent(f"""\
        module {{
          func.func public @main(%x: tensor<{count}xf32>,
              %place: tensor<{count}xf32> {{tf.aliasing_output = 0 : i32}})
              -> tensor<{count}xf32> {{
            %one = stablehlo.constant dense<1.0> : tensor<{count}xf32>
            %sum = stablehlo.add %x, %one : tensor<{count}xf32>
            return %sum : tensor<{count}xf32>
          }}
        }}
        """)
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    return code.encode(), options.SerializeAsString()


def execute(library: str, plugin: str, client: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """What `probe_execute` finds out, by name."""
    code, options = increment(COUNT)
    answers = (ctypes.c_double * 6)(*[-1.0] * 6)
    probe = ctypes.CDLL(library).probe_execute
    failed = probe(
        plugin.encode(), ctypes.c_void_p(client), code, ctypes.c_size_t(len(code)), options,
        ctypes.c_size_t(len(options)), ctypes.c_int64(COUNT), rounds, answers,
    )  # fmt: skip
    if failed:
        raise RuntimeError("the plugin failed: see above")
    return {
        "in_place_of_8": answers[0],
        "execute_us": answers[1] * 1e6,
        "execute_us_99th": answers[2] * 1e6,
        "until_end_is_known_us": answers[3] * 1e6,
        "queued_of_16": answers[4],
        "execute_us_without_event": answers[5] * 1e6,
    }


def copies(library: str, driver: str, device: int, nbytes: int, rounds: int) -> dict[str, Any]:
    """What `probe_copies` finds out, by name.

    Args:
      device: address of as many bytes on the device.
    """
    import numpy as np

    raw = np.ones(nbytes + 4096, np.uint8)
    start = raw.ctypes.data + -raw.ctypes.data % 4096
    answers = (ctypes.c_double * 4)(*[-1.0] * 4)
    probe = ctypes.CDLL(library).probe_copies
    failed = probe(
        driver.encode(), ctypes.c_void_p(start), ctypes.c_void_p(device),
        ctypes.c_size_t(nbytes), rounds, answers,
    )  # fmt: skip
    if failed:
        raise RuntimeError(f"the driver failed at step {failed}")
    return {
        "to_device_gb_s": answers[0] / 1e9,
        "from_device_gb_s": answers[1] / 1e9,
        "both_gb_s": answers[2] / 1e9,
        "copy_and_event_us": answers[3] * 1e6,
    }


def _on_gpu_execute() -> dict[str, Any]:
    from jaxoffload import _jax_compat as compat
    from jaxoffload.runtime.backends import cuda_device

    with tempfile.TemporaryDirectory() as folder:
        device = cuda_device()
        return execute(build(folder), compat.cuda_plugin_path(), compat.client_pointer(device))


def _on_gpu_copies() -> dict[str, Any]:
    import jax.numpy as jnp

    nbytes = 1 << 30
    place = jnp.zeros(nbytes, jnp.uint8).block_until_ready()
    with tempfile.TemporaryDirectory() as folder:
        return copies(build(folder), "", place.unsafe_buffer_pointer(), nbytes, 10)


def _chain(length: int) -> Any:
    import jax.numpy as jnp

    def function(x: Any) -> Any:
        for _ in range(length):
            x = jnp.sin(x)
        return x

    return function


def _nested() -> dict[str, Any]:
    """A thousand vertices under jit, each an execution nested in the outer program's."""
    import jax
    import numpy as np

    import jaxoffload as jo

    x = jax.numpy.ones((256, 256))
    step = jo.offload(_chain(1000), device_memory=None, vertex_memory=1)
    got = jax.jit(step)(x).block_until_ready()
    want = np.ones((256, 256), np.float32)
    for _ in range(1000):  # XLA would make one kernel of all, and take half a minute to compile it
        want = np.sin(want)
    equal = bool(np.allclose(got, want, atol=1e-5))
    return {"vertices": len(step.plan(x).taskgraph.vertices), "equal": equal}


def _compile_beside(wrap: Any = lambda step: step) -> dict[str, Any]:
    """Runs while another thread compiles programs that XLA tunes."""
    import threading

    import jax

    import jaxoffload as jo

    x = jax.numpy.ones((256, 256))
    step = wrap(jo.offload(_chain(200), device_memory=None, vertex_memory=1))
    step(x).block_until_ready()
    done = threading.Event()
    compiled = 0

    def compile_on() -> None:
        nonlocal compiled
        while not done.is_set():
            size = 128 + 8 * compiled
            a = jax.numpy.ones((size, size), jax.numpy.bfloat16)
            jax.jit(lambda a: a @ a)(a).block_until_ready()
            compiled += 1

    thread = threading.Thread(target=compile_on, daemon=True)
    thread.start()
    for _ in range(30):
        step(x).block_until_ready()
    done.set()
    thread.join()
    return {"runs": 30, "compiled_beside": compiled}


def _compile_beside_jit() -> dict[str, Any]:
    """The same under jit, where the outer program holds what XLA's tuner waits for (hazard D2)."""
    import jax

    return _compile_beside(jax.jit)


def _pinned_operand() -> dict[str, Any]:
    """An operand in JAX's pinned_host memory, directly and under jit."""
    import jax
    import numpy as np

    import jaxoffload as jo

    device = jax.devices()[0]
    where = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    x = jax.device_put(np.ones((256, 256), np.float32), where)
    step = jo.offload(_chain(3), device_memory=None, vertex_memory=1)
    want = np.sin(np.sin(np.sin(np.ones((256, 256), np.float32))))
    return {"direct": bool(np.allclose(step(x), want, atol=1e-5))}


CHECKS = {
    "execute": _on_gpu_execute,
    "copies": _on_gpu_copies,
    "nested": _nested,
    "pinned_operand": _pinned_operand,
    "compile_beside": _compile_beside,
    "compile_beside_jit": _compile_beside_jit,
}


def run_all(limit_seconds: int = LIMIT_SECONDS) -> dict[str, Any]:
    """Every check in a process of its own; a failure or a hang is its answer."""
    found: dict[str, Any] = {}
    for name in CHECKS:
        command = [sys.executable, "-m", "benchmarks.gpu.probe", name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            found[name] = {"failed": f"no end in {limit_seconds} s"}
        else:
            lines = done.stdout.strip().splitlines()
            if done.returncode or not lines:
                found[name] = {"failed": done.stderr.strip()[-2000:]}
            else:
                found[name] = json.loads(lines[-1])
        print(name, json.dumps(found[name]), flush=True)
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(CHECKS[sys.argv[1]]()))
    else:
        print(json.dumps(run_all(), indent=1))

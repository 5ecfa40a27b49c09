"""What the process holds is what the plan says: arena, host tier, results, and little else."""

import subprocess
import sys

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
import jaxoffload as jo
from jaxoffload.runtime import backends

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def function(x):
    parts = [x]
    for _ in range(16):  # each needs the one before, so that no order holds fewer
        parts.append(jnp.sin(parts[-1] * 1.5))
    total = jnp.zeros_like(x)
    for part in reversed(parts[1:]):
        total = jnp.tanh(total * part)
    return total

mib = 2**20
budget = 40 * mib
step = jo.offload(function, device_memory=budget, vertex_memory=1)
x = np.ones((1024, 2048), np.float32)
plan = step.plan(x)
plan.native
warm = jo.offload(lambda y: y + 1, device_memory=None, cut="always")(np.ones(8, np.float32))
before = resident()
result = step(x)
grown = resident() - before
arena = backends.cpu().client.arena_resident_bytes(0)
assert step.last_run.peak_device_bytes <= budget, step.last_run
assert arena <= budget, arena
assert arena >= plan.memgraph.peak_arena_bytes()[0] * 0.9, arena
expected = arena + plan.host_bytes + result.nbytes
assert abs(grown - expected) < 16 * mib, (grown / mib, expected / mib)
assert plan.host_bytes > 40 * mib  # The budget was far too small for everything.
"""


def test_resident_memory_is_what_the_plan_says():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

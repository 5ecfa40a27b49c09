"""On a real GPU. Skipped, with the reason, where there is none.

Under compute-sanitizer: `compute-sanitizer python -m pytest tests/cuda/test_gpu.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload import _native
from jaxoffload.compile.cache import ExecutableCache
from jaxoffload.compile.compilers import JaxCompiler, WithHost
from jaxoffload.runtime import backends
from tests.cuda.test_functions import state_and_batch, train_step
from tests.cuda.test_near import check_special_values, check_use_in_place
from tests.devices.programs import STEPS
from tests.transform import test_memory_spaces as spaces
from tests.transform import test_small_dtypes as small
from tests.transform.test_equal import assert_close, assert_equal, budgets
from tests.transform.test_host_compute import (
    LAYERS,
    MATRIX,
    OPTIMIZERS,
    copied,
    differs,
    in_float64,
    on_host,
    training,
)
from tests.workloads import ALL

REPORT = jo.backends()[1]


@pytest.fixture(autouse=True)
def products_in_float32():
    """By default their operands are rounded to TF32, by as much more in one of XLA's kernels than
    in another as tolerances here do not allow."""
    with jax.default_matmul_precision("highest"):
        yield


pytestmark = [
    pytest.mark.optimized,
    pytest.mark.skipif(not REPORT.available, reason=f"no GPU: {REPORT.detail}"),
    pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning"),
]


@pytest.mark.parametrize("name", ALL)
def test_every_budget_and_policy_gives_the_same_bits(name):
    f, args, _ = ALL[name]()
    want = jax.jit(f)(*args)
    first = None
    for budget in budgets(jo.offload(f, device_memory=None, vertex_memory=1), args):
        for policy in ("work-conserving", "fixed", jo.policies.random(1, delays=2e-4)):
            step = jo.offload(f, device_memory=budget, vertex_memory=1, launch=policy, check=True)
            got = step(*args)
            assert_close(want, got)
            assert step.last_run.copied_outputs == 0
            first = got if first is None else first
            assert_equal(first, got)
        assert_equal(first, jax.jit(step)(*args))


@pytest.mark.parametrize("budget", ["300KiB", "64MiB"])
@pytest.mark.parametrize("tier", ["numpy", "host", "disk", "device"])
def test_state_is_trained_where_it_lives(tmp_path, tier, budget):
    state, batch = state_and_batch()
    put = {
        "numpy": lambda tree: tree,
        "host": jo.host_put,
        "disk": lambda tree: jo.disk_put(tree, tmp_path),
        "device": lambda tree: jax.tree.map(jnp.asarray, tree),
    }[tier]
    plain = jo.offload(train_step, device_memory=None, vertex_memory=1)
    step = jo.offload(train_step, device_memory=budget, vertex_memory=1, donate_argnums=0)
    want, got = state, put(state)
    for _ in range(3):
        want, value = plain(want, batch)
        got, other = step(got, batch)
        assert_equal(value, other)
    assert_equal(want, jax.tree.map(np.asarray, got))


@pytest.mark.parametrize("tier", ["host", "device"])
def test_updates_on_the_hosts_cores(tier):
    """Another compiler's kernels: equal within rounding; the same bits in every order of launch."""
    step, (params, state, x) = training(OPTIMIZERS["adamw"])
    exact = in_float64(step, (params, state, x))
    own = differs(jax.jit(step)(params, state, x), exact)
    first = None
    for launch in ("work-conserving", "fixed", jo.policies.random(1, delays=2e-4)):
        put = jo.host_put if tier == "host" else copied
        stepped = jo.offload(
            step,
            device_memory=6 * MATRIX,
            vertex_memory=2 * MATRIX,
            host_compute="always",
            donate_argnums=(0, 1),
            launch=launch,
            check=True,
        )
        got = jax.tree.map(np.asarray, stepped(put(params), put(state), x))
        assert on_host(stepped.last_run) >= LAYERS and stepped.last_run.copied_outputs == 0
        assert (differs(got, exact) <= 2 * own.max() + 1e-6).all()
        first = got if first is None else first
        assert_equal(first, got)


def test_executables_that_name_no_device_run_on_this_one(monkeypatch):
    """As for functions over several GPUs."""
    f, args, _ = ALL["scan_train_step"]()
    want = jo.offload(f, device_memory=None, vertex_memory=1)(*args)
    backend = backends.CudaBackend(backends.cpu())
    compiler = JaxCompiler(backend.client, backend.devices * 2)
    backend.executables = ExecutableCache(WithHost(compiler, backends.cpu().compiler))
    monkeypatch.setattr(backends, "current", lambda: backend)
    step = jo.offload(f, device_memory=None, vertex_memory=1)
    assert_equal(want, step(*args))
    assert step.plan(*args).backend is backend and step.last_run.copied_outputs == 0


@pytest.mark.skipif(
    REPORT.available and len(jax.local_devices()) < 2, reason="one GPU, and this is of several"
)
@pytest.mark.parametrize("name", STEPS)
def test_steps_over_several_gpus(name):
    step, args = STEPS[name](2)
    want = jax.jit(step)(*args)
    free = jo.offload(step, device_memory=None, vertex_memory=1).plan(*args)
    for launch in ("work-conserving", jo.policies.random(1, delays=2e-4)):
        within = jo.offload(
            step, device_memory=free.min_device_memory, vertex_memory=1, launch=launch, check=True
        )
        assert_close(want, within(*args))
        assert within.last_run.copied_outputs == 0


def test_weights_in_host_memory_are_no_operands_under_jit():
    state, batch = state_and_batch()
    kept = jo.host_put(state["weights"])
    step = jo.offload(
        lambda w, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0],
        device_memory="300KiB", vertex_memory=1,
    )  # fmt: skip
    assert_equal(step(kept, batch), jax.jit(lambda x: step(kept, x))(batch))


@pytest.mark.parametrize("is_donated", [False, True])
def test_what_is_on_the_gpu_is_read_and_written_there(is_donated):
    check_use_in_place(is_donated)


@pytest.mark.parametrize("donated", [(), (0,)])
def test_special_values_are_looked_for_in_results_alone(donated):
    check_special_values(donated)


def test_results_are_committed_as_under_jit():
    f = lambda x, y: (x + y, y * 2)  # noqa: E731
    step = jo.offload(f, device_memory=None, vertex_memory=1)
    x = jnp.ones((4, 4))
    for first in (x, jax.device_put(x, jax.devices()[0])):
        got, want = step(first, x), jax.jit(f)(first, x)
        assert [r.committed for r in got] == [r.committed for r in want]


@pytest.mark.parametrize("budget", [None, 256])
def test_what_is_donated_and_passed_twice_is_read_twice(budget):
    step = jo.offload(
        lambda x, y: (x + 1, y * 2), device_memory=budget, vertex_memory=1, donate_argnums=(0, 1)
    )
    both = jnp.arange(4.0)
    x, y = step(both, both)
    np.testing.assert_array_equal(x, np.arange(4.0) + 1)
    np.testing.assert_array_equal(y, np.arange(4.0) * 2)


def test_many_results_have_memory_of_their_own():
    args = [jnp.full(8, i, jnp.float32) for i in range(100)]
    for donated in ((), (0,)):
        step = jo.offload(
            lambda xs: [x + 1 for x in xs],
            device_memory=None,
            vertex_memory=1,
            donate_argnums=donated,
        )
        got = step([x + 0 for x in args])
        assert len({x.unsafe_buffer_pointer() for x in got}) == 100
        assert_equal([np.asarray(x) + 1 for x in args], got)


@pytest.mark.parametrize("dtype", small.SMALL)
def test_small_elements_below_the_device(dtype):
    a, f = small.values(small.SMALL[dtype]), small.PROGRAMS["arithmetic"]
    want = jax.jit(f)(a)
    jax.tree.map(small.same, jo.offload(f, device_memory=None)(jo.host_put(a)), want)
    got = jo.offload(f, device_memory=None, results="host")(a)
    jax.tree.map(small.same, got, want)


@pytest.mark.parametrize("kind", spaces.PUTS)
def test_memory_spaces(kind):
    spaces.assert_as_jit(spaces.PUTS[kind], spaces.X)


def test_a_thousand_runs_leave_nothing_behind():
    state, batch = state_and_batch()
    kept = jo.host_put(state)
    step = jo.offload(lambda s, b: train_step(s, b)[1], device_memory="300KiB")
    free = backends.get("cuda").free_memory

    def figures():
        stats = _native.host_stats()
        return free(), stats["pinned_bytes"], stats["in_use_bytes"]

    for _ in range(10):
        step(kept, batch).block_until_ready()
    before = figures()
    for _ in range(1000):
        step(kept, batch).block_until_ready()
    assert figures() == before

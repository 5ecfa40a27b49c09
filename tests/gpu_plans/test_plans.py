"""Plans for a GPU that is not here, compiled for it by XLA's own compiler: extra gpu-plans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from benchmarks import matrices
from benchmarks.gpu_plans import peaks
from jaxoffload import _jax_compat as compat
from jaxoffload.compile import gpu_compiler, gpu_process, gpu_targets
from jaxoffload.plan.alloc.limits import reserved_workspace
from jaxoffload.runtime import elsewhere
from jaxoffload.search.elsewhere import planner_on
from tests.gpu_plans import pretends
from tests.helpers import capture


def is_installed():
    try:
        return compat.cuda_plugin_path()
    except ImportError:
        return None


needs_plugin = pytest.mark.skipif(
    not is_installed(), reason="the extra is not installed: pip install 'jaxoffload[gpu-plans]'"
)


@pytest.fixture(autouse=True)
def compiled_plans(monkeypatch):
    monkeypatch.delenv("JAXOFFLOAD_GPU_PLANS")


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXOFFLOAD_CACHE", str(tmp_path / "kept"))
    jo.clear_caches()
    elsewhere._known.clear()  # what is compiled already would not be kept here
    return tmp_path / "kept"


X = np.ones((8, 8), np.float32)
WIDTH, ROWS = 512, 1024
SHAPES = (
    [jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32)] * 4,
    jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32),
)


def step(weights, x):
    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.mean(jnp.sort(y, axis=0) ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value


def offloaded(budget="12MiB", function=step, **options):
    return jo.offload(function, device_memory=budget, donate_argnums=0, **options)


@needs_plugin
def test_a_plan_counts_the_workspace_that_compiled_kernels_take(kept):
    found = offloaded().predict(*SHAPES, machine="H200")
    graph, kernels = found.memgraph.taskgraph, found.kernels
    assert kernels and {v.kernel for v in graph.vertices} == set(range(len(kernels)))
    for vertex in graph.vertices:
        assert vertex.workspace_bytes == kernels[vertex.kernel].temp_bytes
    most = max(k.temp_bytes for k in kernels)
    assert most > 0, "a sort takes some"
    assert found.workspace_bytes == reserved_workspace(graph, 1)[0] >= most
    assert found.peak_device_bytes <= found.budget == 12 * 2**20
    assert f"{found.workspace_words}" == "compiled for H200 (sm_90a)" and "compiled for" in str(
        found
    )
    assert all(k.in_place == k.outputs for k in kernels)


@needs_plugin
@pytest.mark.parametrize("budget", ["10.5MiB", "40MiB"])  # in the second all is in place
def test_the_peak_of_a_plan_is_what_the_modules_buffer_assignments_sum_to(kept, budget):
    """Places and workspace of every vertex, and their sums along the simulated schedule, against
    XLA's own account of arguments, outputs and temporaries of its module, which knows nothing of
    the plan. What the host's cores update is in no module of the GPU's."""
    found = offloaded(budget, host_compute="never").predict(*SHAPES, machine="H200")
    graph = found.memgraph.taskgraph
    for vertex in graph.vertices:
        kernel = found.kernels[vertex.kernel]
        own = sum(graph.tensors[t].bytes for t in (*vertex.inputs, *vertex.outputs))
        overwritten = sum(graph.tensors[vertex.inputs[i]].bytes for i, _ in vertex.overwrites)
        assert kernel.held_bytes == pytest.approx(own - overwritten + kernel.temp_bytes, abs=64)
    peak = peaks(found)
    assert peak.planned == pytest.approx(peak.modules, rel=1e-4)
    assert peak.modules <= peak.reserved + 64 <= found.budget + 64
    assert peak.reserved == pytest.approx(peak.modules, rel=0.01)
    assert peak.planned > found.workspace_bytes > 0


@needs_plugin
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cumlogsumexp"])
def test_running_sums_are_compiled(kept, name):
    """From jax 0.12 on they are loops of a dialect that StableHLO cannot hold."""
    running = jo.offload(getattr(jax.lax, name), device_memory=1 << 40)
    (kernel,) = running.predict(np.ones((8, 9), np.float32), machine="H200").kernels
    assert kernel.outputs == kernel.in_place == 1


@needs_plugin
def test_nothing_is_compiled_for_a_second_planning(kept, monkeypatch):
    first = offloaded().predict(*SHAPES, machine="H200")
    jo.clear_caches()
    elsewhere._known.clear()

    def refuse(*args):
        raise AssertionError("a program is compiled again")

    monkeypatch.setattr(gpu_process.GpuProcesses, "ask", refuse)
    second = offloaded().predict(*SHAPES, machine="H200")
    assert [k.temp_bytes for k in second.kernels] == [k.temp_bytes for k in first.kernels]
    assert second.seconds == first.seconds
    # Another budget has another plan, of kernels that are partly the same.
    with pytest.raises(AssertionError, match="compiled again"):
        offloaded("6MiB").predict(*SHAPES, machine="H200")


@needs_plugin
def test_each_gpu_has_kernels_of_its_own(kept):
    found = {
        name: offloaded().predict(*SHAPES, machine=name)
        for name in ("8 x A100 80 GB", "RTX 4090, 12 SSDs", "B200")
    }
    words = [p.workspace_words for p in found.values()]
    assert words == [
        "compiled for A100 (sm_80)", "compiled for RTX 4090 (sm_89)", "compiled for B200 (sm_100a)"
    ]  # fmt: skip
    for prediction in found.values():
        assert all(k.in_place == k.outputs for k in prediction.kernels)


@needs_plugin
def test_explain_and_plan_say_that_they_are_compiled(kept):
    explained = offloaded().explain(*SHAPES, machine="H200")
    assert "step on H200: fits" in str(explained)
    assert "Workspace of executables, compiled for H200 (sm_90a)" in str(explained)
    assert not explained.has_estimates
    plan = offloaded().plan(*SHAPES, machine="H200")
    assert plan.workspace_words == "compiled for H200 (sm_90a)"
    assert plan.memgraph.workspace.max() == explained.plan.memgraph.workspace.max() > 0
    with pytest.raises(jo.BackendError, match="for H200, which is not here"):
        assert plan.native


@needs_plugin
def test_a_budget_that_workspace_makes_too_small_is_refused(kept, monkeypatch):
    """The least that is told works, and counts the workspace."""
    with pytest.raises(jo.PlanError, match=r"compiled for H200") as refused:
        offloaded("1MiB").predict(*SHAPES, machine="H200")
    least = refused.value.min_device_memory
    found = offloaded(least).predict(*SHAPES, machine="H200")
    assert found.peak_device_bytes <= least
    assert found.workspace_bytes > 0


@needs_plugin
def test_the_least_budget_is_of_compiled_kernels(kept):
    step = offloaded("1GiB")
    request = step._program(step._spec.bind(SHAPES, {})).request()
    least = planner_on(request, "H200", "a test").planner._least
    assert least.executables
    for vertex in least.graph.vertices:
        assert vertex.workspace_bytes == least.executables[vertex.kernel].temp_bytes


@needs_plugin
def test_the_process_that_plans_keeps_its_jax(kept):
    offloaded().predict(*SHAPES, machine="H200")
    assert {d.platform for d in jax.devices()} == {"cpu"}
    np.testing.assert_array_equal(jax.jit(lambda x: x + 1)(jnp.ones(3)), 2.0)


@needs_plugin
def test_a_gpu_whose_architecture_the_compiler_has_not_is_told_and_not_counted():
    if compat.cuda_version(compat.cuda_plugin_path()) == 12:
        pytest.skip("CUDA 12 knows all of them")
    found = offloaded().predict(*SHAPES, machine="4 x P100")
    assert not found.kernels and found.workspace_bytes == 0
    assert "CUDA 13 does not know sm_60 (P100); put jax-cuda12-plugin" in str(found)


@needs_plugin
def test_linear_algebra_and_convolutions_name_their_libraries(kept):
    def f(x, y):
        return (
            jnp.linalg.cholesky(x @ x.T + jnp.eye(64)),
            jnp.fft.fft(x),
            jax.lax.conv(y, y, (1, 1), "SAME"),
        )

    shapes = (
        jax.ShapeDtypeStruct((64, 64), np.float32),
        jax.ShapeDtypeStruct((8, 8, 9, 9), np.float32),
    )
    found = jo.offload(f, device_memory="1GiB").predict(*shapes, machine="H200")
    calls = {name for kernel in found.kernels for name in kernel.calls}
    assert {"cuSOLVER", "cuFFT", "cuDNN"} <= calls


@needs_plugin
def test_matrices_in_panels_are_compiled_for_a_gpu(kept):
    """Less than two matrices, where the gradient of a likelihood takes four at once."""
    rows, budget = 2048, 28 << 20
    function, arguments = matrices.problem("likelihood, gradient", rows)
    found = jo.offload(function, device_memory=budget).predict(*arguments, machine="H200")
    names = {vertex.name for vertex in found.memgraph.taskgraph.vertices}
    assert {"cholesky[panel]", "triangular_solve[panel]", "dot_general[panel]"} <= names
    calls = {name for kernel in found.kernels for name in kernel.calls}
    assert {"cuSOLVER", "cuBLAS"} <= calls and 0 < found.workspace_bytes < budget


def test_without_the_plugin_plans_say_what_to_install(monkeypatch):
    def missing():
        raise ImportError("there is none")

    monkeypatch.setattr(compat, "cuda_plugin_path", missing)
    monkeypatch.setattr(elsewhere, "_known", {})
    found = offloaded().predict(*SHAPES, machine="H200")
    assert not found.kernels and found.workspace_bytes == 0
    assert "without executables' workspace: pip install 'jaxoffload[gpu-plans]'" in str(found)
    explained = offloaded().explain(*SHAPES, machine="H200")
    assert "estimated" in str(explained) and explained.plan.machine.name == "H200"


def test_on_request_nothing_is_compiled(monkeypatch):
    monkeypatch.setenv("JAXOFFLOAD_GPU_PLANS", "off")
    monkeypatch.setattr(compat, "cuda_plugin_path", lambda: pytest.fail("it was asked for"))
    found = offloaded().predict(*SHAPES, machine="H200")
    assert found.workspace_bytes == 0 and "without executables' workspace" in str(found)


def test_machines_that_are_no_gpu_are_planned_as_ever(monkeypatch):
    monkeypatch.setattr(compat, "cuda_plugin_path", lambda: pytest.fail("it was asked for"))
    found = offloaded().predict(*SHAPES, machine="2 cores of an EPYC")
    assert found.workspace_words == "without executables' workspace"


class Asked:
    """Stands in for the processes that compile."""

    def __init__(self, answer):
        self._answer = answer

    def ask(self, code):
        assert code[:4] == b"ML\xefR"
        if isinstance(self._answer, Exception):
            raise self._answer
        return dict(self._answer)


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    path = tmp_path / "xla_cuda13" / "plugin.so"
    path.parent.mkdir()
    path.write_bytes(b"a plugin")

    def make(answer):
        made = gpu_compiler.GpuCompiler(gpu_targets.find("H200"), str(path))
        made._processes = Asked(answer)
        return made

    return make


def a_kernel():
    captured, _ = capture(lambda x, y: (x + 1, jnp.tanh(x @ y)), X, X, max_bytes=float("inf"))
    assert len(captured.kernels) == 1
    return captured.kernels[0]


@pytest.mark.parametrize(
    "error, words",
    [
        (gpu_process.Refused("no such thing"), "no such thing"),
        (gpu_process.Died("the compiler's process ended by SIGSEGV"), "SIGSEGV"),
    ],
)
def test_a_kernel_that_fails_is_told_with_its_line(compiler, error, words):
    made = compiler(error)
    kernel = a_kernel()
    digest, code = made.lower(kernel)
    with pytest.raises(
        jo.BackendError, match=rf"test_plans.py:\d+.* for H200 \(sm_90a\): .*{words}"
    ):
        made.compile(digest, code)


def test_outputs_that_are_not_in_their_place_are_counted(compiler):
    """The kernel has two inputs, two outputs and so two places, parameters 2 and 3."""
    kernel = a_kernel()
    aliases = [[0, 2], [1, 0]]  # the second is written over an input instead
    made = compiler(pretends.KNOWN | {"aliases": aliases})
    digest, code = made.lower(kernel)
    found = made.compile(digest, code)
    assert (found.outputs, found.in_place) == (2, 1)
    assert made.load(digest) is None, "nothing is kept where the store is off"


def test_what_is_kept_depends_on_gpu_and_flags(compiler, monkeypatch):
    kernel, answer = a_kernel(), pretends.KNOWN
    first = compiler(answer).lower(kernel)[0]
    assert compiler(answer).lower(kernel)[0] == first
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    other = compiler(answer).lower(kernel)[0]
    monkeypatch.undo()
    monkeypatch.setattr(gpu_targets, "find", lambda name: gpu_targets.known()["H100"])
    assert len({first, other, compiler(answer).lower(kernel)[0]}) == 3

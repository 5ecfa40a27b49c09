"""A process that starts anew compiles and plans nothing that an earlier one has made; whatever a
plan depends on, another of it is another plan; what is damaged is made anew."""

import dataclasses
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.runtime import backends
from jaxoffload.search import cutting
from jaxoffload.store import columns, place, platform

WIDTH = 64
WEIGHTS = [np.random.default_rng(n).normal(size=(WIDTH, WIDTH)).astype("f") / 8 for n in range(4)]
X = np.ones((32, WIDTH), np.float32)
BUDGET = 60_000


def step(weights, x):
    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    value, grads = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value


def offloaded(function=step, **options):
    return jo.offload(function, **{"device_memory": BUDGET} | options)


def bits(results):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(results)]


def same_graphs(first, second):
    arrays = (f.name for f in dataclasses.fields(first.memgraph) if f.type is np.ndarray)
    for name in arrays:
        mine, theirs = getattr(first.memgraph, name), getattr(second.memgraph, name)
        assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs), name
    assert first.taskgraph == second.taskgraph


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A folder with what one call of the step keeps, and the bits of its results."""
    folder = tmp_path_factory.mktemp("first") / "kept"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(place.VARIABLE, str(folder))
        jo.clear_caches()
        yield folder, bits(offloaded()(WEIGHTS, X))


@pytest.fixture
def filled(first, kept):
    """The test's own folder with the same; gives the bits."""
    shutil.copytree(first[0], kept.path)
    jo.clear_caches()
    return first[1]


@pytest.fixture
def captures(monkeypatch):
    """Counts the functions that are captured to be planned."""
    made, real = [], cutting.CutProgram

    def counted(*args):
        made.append(args)
        return real(*args)

    monkeypatch.setattr(cutting, "CutProgram", counted)
    return made


def test_what_was_compiled_and_planned_is_found_again(kept, captures, names):
    first = offloaded()
    want, plan = bits(first(WEIGHTS, X)), first.plan(WEIGHTS, X)
    assert plan.compile_report.compiled > 3 and plan.compile_report.loaded == 0
    assert len(names("plan")) == 1 and len(names("executable")) >= plan.compile_report.kernels
    assert captures.pop() and not captures

    jo.clear_caches()  # which forgets memory, and nothing of the store
    again = offloaded()
    assert bits(again(WEIGHTS, X)) == want
    found = again.plan(WEIGHTS, X)
    assert not captures, "a plan that is found needs no capture"
    assert found.compile_report.compiled == 0
    assert found.compile_report.loaded == found.compile_report.kernels > 3
    same_graphs(plan, found)
    assert "s" in str(again.explain(WEIGHTS, X)) and again.last_run.seconds > 0

    jo.clear_caches()
    inside, before = offloaded(), names("plan")
    captures.clear()
    assert bits(jax.jit(lambda *args: inside(*args))(WEIGHTS, X)) == want
    assert not captures and names("plan") == before, "under jit it is the same plan"


def test_what_was_found_can_be_planned_anew(kept, captures):
    """All that a plan is asked for beside runs has the function captured then."""
    plan = offloaded().plan(WEIGHTS, X)
    cuts, least = plan._source.simulated(), plan.min_device_memory
    assert cuts
    jo.clear_caches()
    found = offloaded().plan(WEIGHTS, X)
    captures.clear()
    assert found._source.simulated() == cuts and found.timeline.seconds == plan.timeline.seconds
    assert not captures
    assert found.min_device_memory == least and captures
    jo.clear_caches()
    found = offloaded().plan(WEIGHTS, X)
    same_graphs(plan.variant(plan.build(plan.taskgraph), None),
                found.variant(found.build(found.taskgraph), None))  # fmt: skip
    inf = float("inf")
    first = plan.with_other_cut(inf, inf, lambda graph, executables: graph)
    second = found.with_other_cut(inf, inf, lambda graph, executables: graph)
    assert (first is None) == (second is None)
    if first is not None:
        same_graphs(first, second)


def test_what_was_explained_and_predicted_is_found_again(kept, captures, names):
    def told(budget=BUDGET):
        step = offloaded(device_memory=budget)
        found = step.explain(WEIGHTS, X)
        return str(found).split("(free")[0], found.usage.live.tolist(), found.plan

    want, refused = told(), told(1000)
    assert refused[2] is None and want[2] is not None
    seconds = offloaded().predict(WEIGHTS, X, machine="H200").seconds
    assert len(names("plan")) == 2 and len(names("beside")) == 2 and not names("executable")
    offloaded().predict(WEIGHTS, X, machine=backends.current().machine)
    assert len(names("plan")) == 3, "without workspace it is another plan"
    jo.clear_caches()
    captures.clear()
    again = told()
    assert again[:2] == want[:2] and told(1000) == refused
    same_graphs(again[2], want[2])
    assert offloaded().predict(WEIGHTS, X, machine="H200").seconds == seconds
    assert not captures, "what is found needs no capture"
    assert offloaded().predict(WEIGHTS, X, machine="4 x P100").seconds != seconds
    assert len(captures) == 1, "another machine has another plan"


def test_what_is_explained_is_of_this_call_and_of_these_lines(kept, captures):
    """A duplicate, what arguments are called, and where the code stands."""
    weights = [jnp.asarray(WEIGHTS[0])] * 4
    assert "Duplicate" not in str(offloaded().explain(WEIGHTS, X))
    assert "Duplicate" in str(offloaded().explain(weights, X))
    assert "gates[0]" in str(offloaded(lambda gates, x: step(gates, x)).explain(WEIGHTS, X))
    scope = {"jnp": jnp, "jax": jax}
    for above in ("", "\n\n"):
        code = above + "def f(w, x):\n    return jnp.tanh(jnp.tanh(x @ w) @ w)\n"
        exec(compile(code, "moved.py", "exec"), scope)
        line = f"moved.py:{2 + len(above)}"
        assert line in str(offloaded(scope["f"]).explain(WEIGHTS[0], X)), "not where it was"


def test_what_is_compiled_is_no_longer_estimated(kept):
    assert offloaded().explain(WEIGHTS, X).has_estimates
    step = offloaded()
    step(WEIGHTS, X)
    before = {entry.name for entry in kept.entries()}
    offloaded(device_memory=BUDGET + 4096).explain(WEIGHTS, X)
    assert {entry.name for entry in kept.entries()} == before, "nor kept: it is of this process"


CHANGES = {
    "the budget": lambda: offloaded(device_memory=BUDGET + 256),
    "what is donated": lambda: offloaded(donate_argnums=0),
    "recomputation": lambda: offloaded(recompute="never"),
    "host memory": lambda: offloaded(host_memory="1MiB"),
    "a measured rate": lambda: offloaded(profile=jo.Profile(rates={"to_device": 1e9})),
    "where results go": lambda: offloaded(results="host"),
    "a literal": lambda: offloaded(lambda w, x: step(w, x * 0.5)),
    "a constant": lambda: offloaded(lambda w, x: step(w, x + np.full((1, WIDTH), 0.5, "f"))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_a_plan_depends_on_makes_it_another(filled, captures, names, name):
    assert offloaded().plan(WEIGHTS, X).compile_report.compiled == 0 and not captures
    CHANGES[name]().plan(WEIGHTS, X)
    assert captures and len(names("plan")) == 2
    jo.clear_caches()
    captures.clear()
    CHANGES[name]().plan(WEIGHTS, X)
    assert not captures and len(names("plan")) == 2


def test_settings_of_jax_and_arguments_make_another_plan(filled, captures, names):
    with jax.default_matmul_precision("highest"):
        offloaded().plan(WEIGHTS, X)
    with jax.numpy_dtype_promotion("strict"):  # of which nothing is seen in the jaxpr
        offloaded().plan(WEIGHTS, X)
    offloaded().plan(WEIGHTS, X[:16])
    offloaded().plan(WEIGHTS, X.astype(jnp.bfloat16))
    assert len(captures) == 4 and len(names("plan")) == 5


@pytest.fixture
def described(tmp_path):
    """What a client is described as, and the package's sources, before a change and after it."""
    plugin, client = tmp_path / "plugin.so", backends.cpu().client
    plugin.write_text("code")

    def now():
        platform.processor.cache_clear()
        platform.source_digest.cache_clear()
        return platform.description(client, str(plugin)), platform.source_digest()

    def differ(change):
        before = now()
        assert before == now()
        with pytest.MonkeyPatch.context() as patch:
            change(patch, plugin)
            after = now()
        return [a != b for a, b in zip(before, after, strict=True)]

    yield differ
    now()


def another_processor(patch, _):
    text, real = pathlib.Path("/proc/cpuinfo").read_text(), open
    word = next(word for word in (" sse2 ", " asimd ") if word in text)
    changed = text.replace(word, " ", 1)
    patch.setattr(
        "builtins.open",
        lambda path, *a: io.StringIO(changed) if path == "/proc/cpuinfo" else real(path, *a),
    )


def an_edit(patch, _):
    real = os.stat

    def edited(path):
        found = real(path)
        if not str(path).endswith("limits.py"):
            return found
        return types.SimpleNamespace(st_size=found.st_size, st_mtime_ns=found.st_mtime_ns + 1)

    patch.setattr(platform.os, "stat", edited)


def another_build(patch, plugin):
    patch.setattr(platform, "_native", types.SimpleNamespace(__file__=str(plugin)))


MACHINES = {
    "flags of XLA": lambda patch, _: patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
    "threads": lambda patch, _: patch.setattr(os, "sched_getaffinity", lambda pid: range(99)),
    "a library's setting": lambda patch, _: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
    "jax": lambda patch, _: patch.setattr(jax, "__version__", "0.0"),
    "jaxlib": lambda patch, _: patch.setattr(platform.jaxlib, "__version__", "0.0"),
    "the package": lambda patch, _: patch.setattr(jo, "__version__", "0.0"),
    "the form": lambda patch, _: patch.setattr(platform, "_FORMAT", 0),
    "the processor": another_processor,
    "the plugin's size": lambda _, plugin: plugin.write_text("other code"),
    "the plugin's age": lambda _, plugin: os.utime(plugin, (1, 1)),
}


@pytest.mark.parametrize("name", MACHINES)
def test_other_machines_and_versions_have_other_code(described, name):
    assert described(MACHINES[name]) == [True, False]


@pytest.mark.parametrize("change", [an_edit, another_build])
def test_an_edit_of_the_package_makes_all_plans_others(described, change):
    assert described(change) == [False, True]


def test_code_depends_on_compile_options_and_platform(kept, names):
    from jaxoffload.compile.compilers import PluginCompiler
    from jaxoffload.compile.options import FLAGS
    from tests.helpers import capture

    captured, _ = capture(lambda x: x + 1, X)
    client = backends.cpu().client
    flags = (FLAGS, FLAGS | {"xla_backend_optimization_level": 0})
    found = {
        PluginCompiler(client, f, lambda p=p: p).lower(captured.kernels[0])[0]
        for f in flags
        for p in ("one", "other")
    }
    assert len(found) == 4


def entry(kept, names, word):
    """The file of an entry."""
    return pathlib.Path(kept.path, sorted(names(word))[0])


@pytest.mark.parametrize("word", ["plan", "executable"])
@pytest.mark.parametrize("damage", ["cut", "bit", "gone", "foreign"])
def test_what_is_damaged_is_made_anew(filled, kept, names, word, damage):
    want, path = filled, entry(kept, names, word)
    text = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "foreign":  # whole, but of something else
        kept.write(path.name, b"of another program")
    else:
        path.write_bytes(text[:-9] if damage == "cut" else text[:-9] + b"\0\1\2" + text[-6:])
    again = offloaded()
    assert bits(again(WEIGHTS, X)) == want
    report = again.plan(WEIGHTS, X).compile_report
    assert report.compiled == (1 if word == "executable" else 0)
    jo.clear_caches()
    third = offloaded()
    assert bits(third(WEIGHTS, X)) == want and third.plan(WEIGHTS, X).compile_report.compiled == 0
    assert path.read_bytes() == text or word == "executable"


def test_a_plan_that_is_not_safe_does_not_run(filled, kept, names, caplog):
    """A store that lies, its checksums and all, is caught by the verifier."""
    (name,) = names("plan")
    about, graph = columns.unpacked(kept.read(name), str)
    moved = graph.space == 0
    assert moved.any()
    offset = np.where(moved, 0, graph.offset)
    unsafe = dataclasses.replace(graph, offset=offset)
    kept.write(name, columns.packed(about, unsafe, lambda source: source))
    assert bits(offloaded()(WEIGHTS, X)) == filled
    assert "made anew: VerifyError" in caplog.text


def test_constants_come_back_in_their_places(kept, captures):
    first, second = (
        np.random.default_rng(n).normal(size=(WIDTH, WIDTH)).astype("f") for n in (1, 2)
    )
    held = jnp.asarray(second)

    def closing(w, x):
        return step(w, jnp.tanh(x @ first) @ held + x @ first)

    want = bits(offloaded(closing)(WEIGHTS, X))
    jo.clear_caches()
    captures.clear()
    again = offloaded(closing)
    assert bits(again(WEIGHTS, X)) == want and not captures
    assert len(again.plan(WEIGHTS, X).constants) == 2


def test_lines_are_those_of_the_source_as_it_is_now(kept, captures):
    def made(lines):
        scope = {"jnp": jnp}
        text = "\n" * lines + "def f(w, x):\n  return jnp.tanh(x @ w) @ w + jnp.sin(x @ w)\n"
        exec(compile(text, "mine.py", "exec"), scope)
        return offloaded(scope["f"], device_memory=45_000)

    def sources(step):
        return {v.source for v in step.plan(WEIGHTS[0], X).taskgraph.vertices}

    assert all("mine.py:2:" in line for line in sources(made(0)))
    jo.clear_caches()
    captures.clear()
    assert all("mine.py:9:" in line for line in sources(made(7))) and not captures


def test_callbacks_are_never_kept(kept, names):
    calls = []

    def called(x):
        calls.append(1)
        return np.asarray(x) * 2

    def f(w, x):
        y = jnp.tanh(x @ w)
        return jax.pure_callback(called, jax.ShapeDtypeStruct(y.shape, y.dtype), y) @ w

    first = offloaded(f, device_memory=45_000)
    want = bits(first(WEIGHTS[0], X))
    report, others = first.plan(WEIGHTS[0], X).compile_report, len(names("executable"))
    assert not names("plan") and others and len(calls) == 1
    jo.clear_caches()
    again = offloaded(f, device_memory=45_000)
    assert bits(again(WEIGHTS[0], X)) == want and len(calls) == 2
    found = again.plan(WEIGHTS[0], X).compile_report
    assert found.loaded == others and found.compiled == report.compiled - others > 0


@pytest.mark.runs_whole
@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
def test_that_a_function_fits_whole_is_known(kept, captures, names):
    budget = 300_000
    first = offloaded(device_memory=budget)
    want = bits(first(WEIGHTS, X))
    assert repr(first.last_run).startswith("Run(whole") and captures and len(names("plan")) == 1
    jo.clear_caches()
    captures.clear()
    again = offloaded(device_memory=budget)
    assert bits(again(WEIGHTS, X)) == want
    assert repr(again.last_run).startswith("Run(whole") and not captures


def test_where_it_is_kept(monkeypatch, tmp_path):
    """What the user says, JAX's own settings, and the user's cache folder, in this order."""
    names = (place.VARIABLE, "XDG_CACHE_HOME", place.LIMIT_VARIABLE)
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert place.folder_path() == str(tmp_path / ".cache" / "jaxoffload")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert place.folder_path() == str(tmp_path / "xdg" / "jaxoffload")
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
        assert place.folder_path() == str(tmp_path / "jax" / "jaxoffload")
        jax.config.update("jax_compilation_cache_dir", "gs://bucket/jax")
        assert place.folder_path() == str(tmp_path / "xdg" / "jaxoffload")
        jax.config.update("jax_enable_compilation_cache", False)
        assert place.folder_path() is None and place.current() is None
        monkeypatch.setenv(place.VARIABLE, str(tmp_path / "own"))
        assert place.folder_path() == str(tmp_path / "own")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update("jax_enable_compilation_cache", True)
    assert place.current().limit == 2 << 30
    monkeypatch.setenv(place.LIMIT_VARIABLE, "3MiB")
    assert place.current().limit == 3 << 20
    monkeypatch.setenv(place.LIMIT_VARIABLE, "much")
    assert place.current().limit == 2 << 30
    for word in ("off", "OFF", "0", "none"):
        monkeypatch.setenv(place.VARIABLE, word)
        assert place.current() is None


def test_executables_that_were_loaded_are_never_serialized(filled):
    for executable in offloaded().plan(WEIGHTS, X).executables:
        with pytest.raises(RuntimeError, match="only one that was compiled here"):
            executable.serialize()
    with pytest.raises(RuntimeError, match="loading a kernel"):
        backends.cpu().client.load(b"no executable")


SCRIPT = """
import hashlib, json, os, sys
import jax, jax.numpy as jnp, numpy as np
import jaxoffload as jo

def function(w, x):
    a = w @ w.T + 8 * jnp.eye(len(w))
    c = jnp.linalg.cholesky(a)
    values, vectors = jnp.linalg.eigh(a)
    q, r = jnp.linalg.qr(w)
    return jnp.tanh(x @ c) @ q, values, abs(vectors), r, jax.nn.softmax(x @ w)

def bits(results):
    return hashlib.sha256(b"".join(np.asarray(y).tobytes() for y in results)).hexdigest()

w = np.random.default_rng(0).normal(size=(64, 64)).astype("f")
x = np.ones((32, 64), np.float32)
step = jo.offload(function, device_memory=120_000, cut="always")
direct = bits(step(w, x))
report = step.plan(w, x).compile_report
inside = bits(jax.jit(jo.offload(function, device_memory=120_000, cut="always"))(w, x))
print(json.dumps([direct, inside, report.kernels, report.compiled, report.loaded]))
sys.stdout.flush()
os._exit(0)  # how a process ends is asked elsewhere
"""


def test_a_second_process_compiles_nothing_and_has_the_same_bits(kept, tmp_path):
    """LAPACK's calls among it, and programs that JAX's own cache keeps around an offloaded one."""
    settings = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    found = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=settings, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        found.append(json.loads(done.stdout))
    (direct, inside, kernels, compiled, loaded), again = found
    assert direct == inside and compiled >= kernels > 4 and loaded == 0
    assert again == [direct, inside, kernels, 0, kernels]

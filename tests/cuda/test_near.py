"""Arguments, results and constants in the GPU's own memory: kernels use them where they are."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.graphs.memgraph import Kind, Space
from jaxoffload.runtime.callers_on_device import DeviceMemory
from tests.transform.test_host_compute import on_the_host


def copied(graph, kind):
    """Bytes that each argument has copied up, or each result down."""
    ends = graph.inputs[graph.input_offsets[:-1]], graph.outputs[graph.output_offsets[:-1]]
    where = (Space.ARGUMENT, Space.RESULT)
    found = collections.Counter()
    for v in np.flatnonzero(graph.kind == kind):
        for space, end in zip(where, ends, strict=True):
            if graph.space[end[v]] == space:
                found[int(graph.index[end[v]])] += int(graph.version_bytes()[end[v]])
    return found


def check_use_in_place(is_donated):
    """Kernels read and write what is on the GPU there; what is in NumPy's memory comes up."""

    def step(x, weights):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x, [w * 0.5 for w in weights]

    x, *weights = (
        np.random.default_rng(i).normal(size=(256, 256)).astype(np.float32) / 16 for i in range(5)
    )
    want = jax.tree.map(np.asarray, jax.jit(step)(x, weights))
    donated = {"donate_argnums": 1} if is_donated else {}
    budget = jo.offload(step, device_memory=None, **donated).plan(x, weights).min_device_memory
    offloaded = jo.offload(step, device_memory=budget, cut="always", check=True, **donated)
    for put in (jnp.asarray, np.array):
        given = [put(w) for w in weights]
        got = offloaded(jnp.asarray(x), given)
        jax.tree.map(lambda w, g: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), want, got)
        run, in_numpys = offloaded.last_run, put is np.array
        assert run.peak_device_bytes <= budget and run.copied_outputs == 0
        # But what a kernel writes over its operand, in the arena.
        assert set(copied(run.memgraph, Kind.OFFLOAD)) <= {0}
        assert set(copied(run.memgraph, Kind.RELOAD)) == ({1, 2, 3, 4} if in_numpys else set())
        assert in_numpys or not is_donated or all(w.is_deleted() for w in given)
    assert offloaded.plan(jnp.asarray(x), weights).memgraph is offloaded.last_run.memgraph


def check_special_values(donated):
    """`jax_debug_nans` reads results once they are there, and nothing that was in their memory, nor
    what was given."""
    step = lambda x, y: (jnp.nan_to_num(x) + y, jnp.log(y))  # noqa: E731
    offloaded = jo.offload(step, device_memory=None, vertex_memory=1, donate_argnums=donated)
    with_nan = np.full((64, 64), np.nan, np.float32)
    for number in range(3):
        y = np.full((64, 64), number + 1.0, np.float32)
        x, negative = jnp.asarray(with_nan), -y
        with jax.debug_nans(True):
            got = offloaded(x, y)
        np.testing.assert_array_equal(got[0], y)
        np.testing.assert_allclose(got[1], np.log(y), rtol=1e-6)
        x = jnp.asarray(with_nan)
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="flat result 1"):
            offloaded(x, negative)


@pytest.mark.parametrize("donated", [(), (0,)])
def test_special_values_are_looked_for_in_results_alone(gpu, donated):
    check_special_values(donated)


def test_nothing_is_looked_for_in_memory_for_results():
    """Nor read: JAX keeps what it has read of an array."""
    device = jax.devices()[0]
    memory = DeviceMemory((device,))
    given = jnp.full((64, 64), jnp.nan)
    shapes = [jax.ShapeDtypeStruct((8, 8), np.float32)] * 2
    with jax.debug_nans(True), jax.debug_infs(True):
        made = [*memory.take_over([given]), *memory.empty(shapes, [device] * 2)]
    assert given.is_deleted() and np.isnan(np.array(made[0])).all()
    assert [array._npy_value for array in made[1:]] == [None, None]


@pytest.mark.parametrize("is_donated", [False, True])
def test_what_is_on_the_gpu_is_read_and_written_there(gpu, is_donated, monkeypatch):
    """What is in NumPy's memory is never on the GPU as a whole."""
    whole, put_there = [], gpu.memory.put
    monkeypatch.setattr(gpu.memory, "put", lambda *a: (whole.append(a[0]), put_there(*a))[1])
    check_use_in_place(is_donated)
    assert not any(isinstance(array, np.ndarray) for array in whole)


@pytest.mark.parametrize("donated", [(), (1,)])
def test_results_in_host_memory_come_down(gpu, donated):
    """No kernel writes there, nor over what was given."""

    def step(x, weights):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x, [w * 0.5 for w in weights]

    x, weights = jnp.ones((32, 64)), [jnp.full((64, 64), float(i)) for i in range(4)]
    want = jax.tree.map(np.asarray, jax.jit(step)(x, weights))
    offloaded = jo.offload(
        step, device_memory=6 * x.nbytes, cut="always", results="host", donate_argnums=donated
    )
    got = offloaded(x, weights)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(isinstance(leaf, jo.HostArray) for leaf in jax.tree.leaves(got))
    assert all(w.is_deleted() for w in weights) == bool(donated)
    graph = offloaded.last_run.memgraph
    graph.taskgraph.check()  # no result in host memory is written over an argument on the GPU
    assert not (graph.space[graph.outputs[written_by(graph, Kind.KERNEL)]] == Space.RESULT).any()
    assert copied(graph, Kind.OFFLOAD) == dict(enumerate(leaf.nbytes for leaf in (x, *weights)))
    assert not graph.stays_on_device().any()  # they cross the link, and are priced so


@pytest.mark.parametrize("at", [jnp.asarray, np.asarray])
def test_what_a_function_closes_over_is_read_where_it_is(gpu, at):
    """On the GPU, or in host memory; by the host's cores too, which do not reach the GPU's."""
    table = at(np.random.default_rng(0).normal(size=(128, 128)).astype(np.float32))

    def function(x):
        x = on_the_host(lambda x: jnp.sin(x) + table, x)
        return jnp.tanh(x @ table) @ table

    x = np.ones((128, 128), np.float32)
    want = jax.jit(function)(x)
    offloaded = jo.offload(function, device_memory=4 * x.nbytes, cut="always", check=True)
    np.testing.assert_allclose(offloaded(jnp.asarray(x)), want, rtol=1e-5, atol=1e-4)
    graph = offloaded.last_run.memgraph
    is_near = at is jnp.asarray
    assert (1 in graph.taskgraph.device_arguments) == is_near
    on_host = graph.inputs[read_on(graph, Kind.HOST_KERNEL)]
    assert not (graph.out_of_reach()[on_host]).any()
    assert copied(graph, Kind.RELOAD)[1] > 0 or is_near


def read_on(graph, kind):
    """Entries of `inputs` of vertices of a kind."""
    reader = np.repeat(np.arange(graph.num_vertices), np.diff(graph.input_offsets))
    return np.flatnonzero(graph.kind[reader] == kind)


def written_by(graph, kind):
    """Entries of `outputs` of vertices of a kind."""
    writer = np.repeat(np.arange(graph.num_vertices), np.diff(graph.output_offsets))
    return np.flatnonzero(graph.kind[writer] == kind)


def test_rows_that_are_kept_there_do_not_cross_the_link(gpu):
    """Of a table in host memory: its rows come by what is there, and by what comes up."""
    table = np.random.default_rng(0).normal(size=(3000, 64)).astype(np.float32)
    kept = jo.graph.DeviceRows(jo.host_put(table), 2000 * 256, weights=np.arange(3000))
    step = jo.offload(
        lambda rows: jnp.tanh(jo.graph.joined(rows)).sum(0), device_memory=None, vertex_memory=1
    )
    for seed in range(2):
        ids = np.random.default_rng(seed).integers(0, 3000, 500)
        split = kept.split(ids, 500, lambda _: 250)
        got = step(split)
        np.testing.assert_allclose(got, np.tanh(table[ids]).sum(0), rtol=1e-4, atol=1e-4)
        up = copied(step.last_run.memgraph, Kind.RELOAD)
        of = dict(zip(split._fields, range(4), strict=True))
        assert of["hot"] not in up and up[of["cold"]] <= 250 * 256, "by NumPy's array alone"

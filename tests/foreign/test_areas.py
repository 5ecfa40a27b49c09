"""Whole programs of every area that people write in, and the shapes that calls take around them.

The programs are those whose first call `benchmarks/first_call.py` times. Here each is cut although
it would fit, and gives what `jax.jit` gives: to 2048 units of rounding at the scale of each
result's largest value, as everywhere that whole programs are compared; integers and random bits
are equal.
"""

import asyncio
import collections
import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from benchmarks.programs import PROGRAMS
from tests.libraries.agree import differences, normal

AREAS = "control flow, linalg, gather, random, sparse, transformations, dtypes".split(", ")


@pytest.mark.drawn(10)
@pytest.mark.parametrize("name", [n for n, (area, _) in PROGRAMS.items() if area in AREAS])
def test_a_program_equals_jit(name):
    function, args = PROGRAMS[name][1]()
    with jax.numpy_rank_promotion("allow"):
        want = jax.jit(function)(*args)
        found = differences(want, jo.offload(function, device_memory=None)(*args))
    assert not found, "\n".join(found)


def test_every_area_has_programs():
    counts = collections.Counter(area for area, _ in PROGRAMS.values())
    assert set(AREAS) <= set(counts) and min(counts.values()) >= 2 and len(PROGRAMS) >= 60


# Pytrees -----------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "left right")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    array: jax.Array
    name: str = dataclasses.field(metadata={"static": True}, default="a")


X = normal(6, 6)
TREES = {
    "nothing": ({}, [], (), None),
    "named tuple": Pair(X, {"b": X + 1, "a": X}),
    "dataclass with a static field": Registered(X, "static"),
    "None among arrays": [X, None, (X, [None])],
    "ordered": collections.OrderedDict(b=X, a=X + 1),
    "the same array twice": (X, X),
    "five hundred leaves": {f"p{i}": normal(2, seed=i) for i in range(500)},
    "empty arrays and scalars": (np.zeros((0, 3), np.float32), np.float32(2), 3, True),
}


@pytest.mark.parametrize("kind", TREES)
def test_pytrees_come_back_as_from_jit(kind):
    def function(tree):
        return jax.tree.map(lambda x: x * 2, tree), tree

    want = jax.jit(function)(TREES[kind])
    free = jo.offload(function, device_memory=None)
    for got in (free(TREES[kind]), jax.jit(free)(TREES[kind])):
        assert not differences(want, got)


# Ahead of time -----------------------------------------------------------------------------------


def test_lowered_and_compiled_ahead_of_time():
    def function(x, n):
        return jnp.tanh(x @ x) * n

    jitted = jax.jit(jo.offload(function, device_memory=None, static_argnums=1), static_argnums=1)
    compiled = jitted.lower(jax.ShapeDtypeStruct(X.shape, X.dtype), 3).compile()
    assert not differences(jax.jit(function, static_argnums=1)(X, 3), compiled(X))
    jo.clear_caches()  # what is compiled keeps its plan
    assert not differences(jax.jit(function, static_argnums=1)(2 * X, 3), compiled(2 * X))


def test_eval_shape_and_make_jaxpr_run_nothing():
    offloaded = jo.offload(lambda x: (x @ x, x.sum()), device_memory=None)
    shapes = jax.eval_shape(offloaded, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert [(s.shape, s.dtype) for s in shapes] == [((6, 6), np.float32), ((), np.float32)]
    assert [e.primitive.name for e in jax.make_jaxpr(offloaded)(X).eqns] == ["jaxoffload"]


# Threads -----------------------------------------------------------------------------------------


def test_threads_that_compile_and_call_at_once():
    """Eight threads: direct, in jit, caches cleared meanwhile; each result is jit's."""
    functions = [lambda x, k=k: jnp.tanh(x @ x + k) @ x for k in range(3)]
    want = [jax.jit(f)(X) for f in functions]
    offloaded = [jo.offload(f, device_memory=None) for f in functions]
    found, begin = [], threading.Barrier(8, timeout=60)

    def work(number):
        begin.wait()
        for turn in range(6):
            which = (number + turn) % 3
            call = offloaded[which]
            if number == 0 and turn == 3:
                jo.clear_caches()
            got = jax.jit(call)(X) if number % 2 else call(X)
            found.extend(differences(want[which], got))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=200)
    assert not any(t.is_alive() for t in threads) and not found


def test_calls_from_coroutines():
    offloaded = jo.offload(lambda x: jnp.sin(x) @ x, device_memory=None)
    want = jax.jit(lambda x: jnp.sin(x) @ x)(X)

    async def all_at_once():
        return await asyncio.gather(*(asyncio.to_thread(offloaded, X) for _ in range(6)))

    for got in asyncio.run(all_at_once()):
        assert not differences(want, got)

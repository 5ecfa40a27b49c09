"""Every cut holds and computes at least what is said before it is made."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.graphs.memgraph import PLACE_ALIGNMENT
from jaxoffload.plan.alloc.limits import live_ranges, min_budget
from jaxoffload.plan.cost.machines import H200, SMALL_SERVER
from jaxoffload.search.cut import FINEST, WHOLE, Cut
from jaxoffload.search.planner import Planner
from tests.workloads import ALL

SIZES = (math.inf, 3e4, 5e3)
CUTS = [WHOLE, FINEST]
CUTS += [Cut(size, None, split) for size in SIZES for split in (None, 6e3)]
CUTS += [Cut(size, None, None, share, 2e4) for size in SIZES for share in (0.5, 1.0)]
CUTS += [dataclasses.replace(cut, updates_on_host=True) for cut in (WHOLE, FINEST)]


def _most_held(graph):
    """Bytes of what is neither argument nor result, in places without padding."""
    found = live_ranges(graph)
    return max(
        (
            sum(
                tensor.bytes
                for t, tensor in enumerate(graph.tensors)
                if not found.is_callers[t] and found.first[t] <= v <= found.last[t]
            )
            for v in range(len(graph.vertices))
        ),
        default=0,
    )


def _planner(function, args, donate=(), machine=SMALL_SERVER):
    step = jo.offload(function, device_memory=None, donate_argnums=donate)
    request = step._program(step._spec.bind(args, {})).request()
    return Planner(request, machine=machine, compiles=False)


@pytest.mark.parametrize("machine", [SMALL_SERVER, H200], ids=lambda m: m.name)
@pytest.mark.parametrize("name", ALL)
def test_no_cut_holds_or_computes_less(name, machine):
    planner = _planner(*ALL[name](), machine=machine)
    for cut in CUTS:
        graph, floor = planner.graph(cut), planner._program.floor(cut)
        assert floor.bytes <= _most_held(graph)
        assert floor.vertex_bytes <= min_budget(graph)[0]
        assert floor.flops <= sum(v.flops for v in graph.vertices) * (1 + 1e-9)


def test_what_is_held_over_many_operations_is_known():
    """All but the first and the last few of the values that a backward pass reads."""
    planner = _planner(*ALL["mlp"]())
    floor, held = planner._program.floor(FINEST), _most_held(planner.graph(FINEST))
    assert 0.6 * held < floor.bytes <= held
    assert floor.bytes > planner._program.floor(Cut(math.inf)).bytes
    again = planner._program.floor(Cut(0, 1, None, 1.0, 1e4))
    assert again.bytes < floor.bytes and again.flops > floor.flops


def test_what_one_vertex_reads_of_many_others_is_known():
    """The pieces of a stack that is joined, each in a place of its own, and the stack."""

    def f(x):
        ys = jax.lax.scan(lambda c, x: (jnp.tanh(c + x), c), jnp.sin(x[0]), x)[1]
        return jnp.sort(ys, 0)[::-1] @ ys.T

    planner = _planner(f, (np.ones((16, 8), np.float32),))
    least = min_budget(planner.graph(FINEST))[0]
    assert planner._program.floor(FINEST).vertex_bytes == least >= 16 * PLACE_ALIGNMENT
    assert 0 < planner._program.floor(Cut(math.inf, piece_bytes=0)).vertex_bytes < least


def test_what_overwrites_an_operand_takes_no_place():
    def f(x):
        y = jnp.tanh(x)
        return jnp.sin(y).sum()

    planner = _planner(f, (np.ones((64, 64), np.float32),))
    assert planner._program.floor(FINEST).vertex_bytes == 4 * 64 * 64


def test_results_are_in_the_callers_memory():
    def f(x):
        early = jnp.tanh(x)
        x = early
        for _ in range(40):
            x = jnp.sin(x) + 1
        return early, x * early

    planner = _planner(f, (np.ones((8, 8), np.float32),))
    assert planner._program.floor(FINEST).bytes == 4 * 8 * 8

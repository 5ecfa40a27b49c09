"""What is brought back at a run's end for the next: first and last in its place, in any order."""

import dataclasses
import random

import numpy as np
import pytest

from jaxoffload.graphs.laws import Law
from jaxoffload.graphs.memgraph import Kind, Space
from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind
from jaxoffload.graphs.verify import verify
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.alloc.limits import least_room
from jaxoffload.plan.cost.machines import Link
from jaxoffload.plan.cost.simulate import simulate
from jaxoffload.search import returning as search
from jaxoffload.search.returning import first_in_place, returning, with_returns
from tests.plan.test_residents import (
    SLOW,
    broken_laws,
    check_one_run_after_another,
    random_plan,
    sweep,
    with_entry,
)


def random_returning(rng):
    """A random graph, and a MemGraph in which some stay and some are brought back."""
    graph, _, memgraph = random_plan(rng, share=0.1, on_disk=rng.choice((0.0, 0.5)))
    firsts = list(first_in_place(memgraph, range(len(graph.tensors))))
    chosen = [first for first in firsts if rng.random() < 0.8]
    return graph, returning(memgraph, chosen), chosen


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_runs_find_what_was_brought_back(first):
    returned = updated = 0
    for seed in range(first, first + 50):
        rng = random.Random(seed)
        graph, memgraph, chosen = random_returning(rng)
        verify(memgraph)
        returned += len(chosen)
        updated += sum(memgraph.space[each.source] == Space.RESULT for each in chosen)
        idle = memgraph.idle()
        assert idle[memgraph.writer[[first.version for first in chosen]]].all()
        assert not idle[memgraph.writer[memgraph.returned[memgraph.returned >= 0]]].any()
        check_one_run_after_another(rng, memgraph, seed)
    assert returned > 5
    assert updated > 1


def test_the_verifier_sees_an_edge_too_few():
    """Of those that a vertex which brings something back waits for."""
    seen = unseen = 0
    for seed in range(150):
        _, memgraph, chosen = random_returning(random.Random(seed))
        first = memgraph.num_vertices - len(chosen)
        for edge in np.flatnonzero(memgraph.edge_head >= first).tolist():
            kept = np.arange(len(memgraph.edge_head)) != edge
            columns = ("edge_tail", "edge_head", "edge_kind")
            changed = {name: getattr(memgraph, name)[kept] for name in columns}
            laws = broken_laws(dataclasses.replace(memgraph, **changed))
            assert laws <= {Law.RACE, Law.DATA}, seed
            seen += bool(laws)
            unseen += not laws
    assert seen > 30
    assert unseen < seen / 2  # of others it follows that those are done


def test_the_verifier_sees_what_is_not_brought_back():
    graph = sweep()
    found = returned_sweep(graph)
    assert broken_laws(found) == set()
    place = int(np.flatnonzero(found.returned >= 0)[0])
    first, last = int(found.residents[place]), int(found.returned[place])
    writer = int(found.writer[last])
    source = int(found.input_offsets[writer])
    wrong = [
        {"returned": with_entry(found.returned, place, version)}
        for version in range(found.num_versions + 1)
        if version != last
    ]
    wrong += [
        {"residents": with_entry(found.residents, place, version)}
        for version in range(found.num_versions)
        if version != first
    ]
    wrong += [
        {"inputs": with_entry(found.inputs, source, version)}
        for version in range(found.num_versions)
        if version != found.inputs[source]
    ]
    wrong += [
        {"returned": found.returned[:-1]},
        {"offset": with_entry(found.offset, last, int(found.offset[last]) + 256)},
        {"space": with_entry(found.space, last, Space.HOST)},
        {"kind": with_entry(found.kind, writer, Kind.OFFLOAD)},
        {"owed": with_entry(found.owed, place, last)},
    ]
    for changes in wrong:
        assert Law.STAYS in broken_laws(dataclasses.replace(found, **changes)), changes
    other = next(v for v in range(found.num_versions) if found.tensor[v] != found.tensor[first])
    changed = with_entry(found.tensor, last, found.tensor[other])
    assert Law.BYTES in broken_laws(dataclasses.replace(found, tensor=changed))


def test_the_verifier_sees_what_is_brought_back_from_elsewhere():
    """Of the same size: another part of the result, another result, another tier."""
    spaces = set()
    for seed in range(150):
        _, memgraph, chosen = random_returning(random.Random(seed))
        sizes = memgraph.version_bytes()
        for place, first in zip(range(-len(chosen), 0), chosen, strict=True):
            last = int(memgraph.returned[place])
            slot = int(memgraph.input_offsets[memgraph.writer[last]])
            able = (sizes == sizes[last]) & (memgraph.space != Space.DEVICE)
            able[
                [
                    first.source,
                    memgraph.inputs[memgraph.input_offsets[memgraph.writer[first.version]]],
                ]
            ] = False
            for other in np.flatnonzero(able).tolist():
                changed = dataclasses.replace(
                    memgraph,
                    inputs=with_entry(memgraph.inputs, slot, other),
                    tensor=with_entry(memgraph.tensor, last, memgraph.tensor[other]),
                )
                assert Law.STAYS in broken_laws(changed), (seed, other)
                is_same = memgraph.offset[other] == memgraph.offset[first.source]
                spaces.add((Space(memgraph.space[other]), bool(is_same)))
    assert len(spaces) >= 5


def test_only_what_lasts_is_brought_back():
    for seed in range(50):
        graph, memgraph, _ = random_returning(random.Random(seed))
        assert not list(first_in_place(memgraph, ()))
        for one in range(3):
            for first in first_in_place(memgraph, (one,)):
                assert graph.tensors[memgraph.tensor[first.version]].argument.index == one


def test_the_verifier_sees_who_comes_before_the_first_or_after_the_last():
    """Whatever else is moved to its place must come between."""
    seen = {True: 0, False: 0}
    for seed in range(100):
        _, memgraph, _ = random_returning(random.Random(seed))
        sizes = memgraph.version_bytes()
        for place in np.flatnonzero(memgraph.returned >= 0).tolist():
            first, last = int(memgraph.residents[place]), int(memgraph.returned[place])
            index, span = memgraph.index[first], (memgraph.writer[first], memgraph.writer[last])
            here = (memgraph.space == Space.DEVICE) & (memgraph.index == index) & (sizes > 0)
            here[[first, last]] = False
            for other in np.flatnonzero(here)[:6].tolist():
                offset = with_entry(memgraph.offset, other, memgraph.offset[first])
                changed = dataclasses.replace(memgraph, offset=offset)
                between = span[0] < memgraph.writer[other] < span[1]
                is_alone = other in memgraph.residents or other in memgraph.returned
                if is_alone:
                    assert Law.STAYS in broken_laws(changed)
                elif not between:
                    assert Law.STAYS in broken_laws(changed), (seed, other)
                seen[bool(between)] += 1
    assert min(seen.values()) > 10


def returned_sweep(graph: TaskGraph):
    """With room for a few layers beside the largest working set, none of which stays."""
    memgraph = build_memgraph(graph, least_room(graph) + 2 * 4096)
    firsts = list(first_in_place(memgraph, range(len(graph.tensors))))
    assert firsts
    return returning(memgraph, firsts)


def test_a_sweep_begins_at_once():
    """The first layers need not be waited for, and the same bytes move."""
    graph = sweep()
    memgraph = build_memgraph(graph, least_room(graph) + 2 * 4096)
    before = simulate(memgraph, machine=SLOW).seconds
    lasting = range(len(graph.tensors))
    # A last vertex that takes long leaves the link time.
    *others, last = graph.vertices
    slow = dataclasses.replace(graph, vertices=(*others, dataclasses.replace(last, seconds=1e-2)))
    long_tail = dataclasses.replace(memgraph, taskgraph=slow)
    found, seconds = with_returns(
        long_tail, lasting, SLOW, simulate(long_tail, machine=SLOW).seconds
    )
    verify(found)
    count = int((found.returned >= 0).sum())
    assert count > 0
    assert found.moved_bytes(Kind.RELOAD) == memgraph.moved_bytes(Kind.RELOAD)
    saved = before + 1e-2 - seconds
    assert saved >= 0.9 * 4096 / 1e6  # one weight's time on the link, at the least
    assert seconds == simulate(found, machine=SLOW).seconds


@pytest.mark.parametrize("lasts", [False, True])
def test_nothing_is_brought_back_where_that_is_hardly_faster(lasts):
    """Or of what may be another in the next call."""
    graph, machine = sweep(), SLOW
    if lasts:
        machine = dataclasses.replace(SLOW, to_device=Link(1e9, 0.0))
        long = [dataclasses.replace(v, seconds=1e-2) for v in graph.vertices]
        graph = dataclasses.replace(graph, vertices=tuple(long))
    memgraph = build_memgraph(graph, least_room(graph) + 2 * 4096)
    seconds = simulate(memgraph, machine=machine).seconds
    lasting = range(len(graph.tensors)) if lasts else ()
    assert with_returns(memgraph, lasting, machine, seconds)[0] is memgraph


@pytest.mark.parametrize("seconds", [1e-6, 1e-2])
def test_nothing_is_simulated_twice(seconds, monkeypatch):
    """Whether all that is brought back is there in time, or not."""
    graph = sweep()
    vertices = tuple(dataclasses.replace(v, seconds=seconds) for v in graph.vertices)
    graph = dataclasses.replace(graph, vertices=vertices)
    memgraph = build_memgraph(graph, least_room(graph) + 2 * 4096)
    without, tried = simulate(memgraph, machine=SLOW).seconds, []

    def counted(found, machine):
        tried.append(found.outputs[memgraph.num_vertices :].tobytes() + found.inputs.tobytes())
        return simulate(found, machine=machine)

    monkeypatch.setattr(search, "simulate", counted)
    with_returns(memgraph, range(len(graph.tensors)), SLOW, without)
    assert len(tried) == len(set(tried)) > 1


def test_the_verifier_sees_who_comes_after_the_last():
    """One more is brought to the same place, of which nobody says that it stays."""
    graph = sweep()
    memgraph = build_memgraph(graph, least_room(graph) + 2 * 4096)
    first, other = list(first_in_place(memgraph, range(len(graph.tensors))))[:2]
    found = returning(returning(memgraph, [first]), [other])
    offset = with_entry(found.offset, int(found.returned[-1]), int(found.offset[first.version]))
    columns = {name: getattr(found, name)[:-1] for name in ("residents", "owed", "returned")}
    assert broken_laws(dataclasses.replace(found, **columns)) == set()
    laws = broken_laws(dataclasses.replace(found, offset=offset, **columns))
    assert Law.STAYS in laws


def test_what_others_hide_is_brought_back_alone():
    """The first argument is needed to the end, and comes up beside the first vertex anyway."""
    kernel = VertexKind.KERNEL
    tensors = (
        Tensor(4096, argument=Span(0, 0)),
        Tensor(16384, argument=Span(1, 0)),
        *(Tensor(256) for _ in range(3)),
        Tensor(256, results=(Span(0, 0),)),
    )
    vertices = (
        Vertex(kernel, (), (2,), seconds=10e-3),
        Vertex(kernel, (0, 2), (3,), seconds=1e-6),
        Vertex(kernel, (1, 3), (4,), seconds=1e-6),
        Vertex(kernel, (0, 4), (5,), seconds=20e-3),
    )
    graph = TaskGraph(tensors, vertices)
    memgraph = build_memgraph(graph, 1 << 16)
    before = simulate(memgraph, machine=SLOW).seconds
    found, seconds = with_returns(memgraph, range(2), SLOW, before)
    assert found.tensor[found.residents].tolist() == [1]
    assert seconds == pytest.approx(30e-3, rel=0.02)
    assert before == pytest.approx(40e-3, rel=0.02)

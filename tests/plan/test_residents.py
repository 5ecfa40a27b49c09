"""What stays on a device from one run to the next: right in any order, and alone in its place."""

import collections
import dataclasses
import random

import numpy as np
import pytest

from jaxoffload.graphs.laws import Law, VerifyError
from jaxoffload.graphs.memgraph import Kind, Space
from jaxoffload.graphs.taskgraph import Span, TaskGraph, Tensor, Vertex, VertexKind
from jaxoffload.graphs.verify import verify
from jaxoffload.plan.alloc.build import build_memgraph
from jaxoffload.plan.alloc.limits import align, least_room, min_budgets, num_devices
from jaxoffload.plan.cost.machines import SMALL_SERVER, Link
from jaxoffload.plan.cost.simulate import simulate
from jaxoffload.search.resident import can_stay, with_residents
from tests.plan.execute import Memories, arguments_of, straightforward
from tests.plan.strategies import random_taskgraph


def fitting(rng, graph, chosen):
    """Budgets that hold some tensors beside the largest working sets."""
    found = [least for least, _ in min_budgets(graph)]
    for t in chosen:
        found[graph.tensors[t].device] += align(graph.tensors[t].bytes)
    return [least + rng.choice((0, 0, 256, 2000)) for least in found]


def random_plan(rng, share=0.7, on_disk=0.0, **options):
    """A random graph, and a MemGraph of it in which some tensors stay.

    Args:
      share: of those that can.
      on_disk: share of arguments there.
    """
    graph = random_taskgraph(rng, max_vertices=rng.choice((4, 14, 30)), devices=2, on_host=0.15)
    if on_disk:
        read = {t.argument.index for t in graph.tensors if t.argument is not None}
        read -= {argument for argument, _ in graph.donated}
        there = frozenset(a for a in sorted(read) if rng.random() < on_disk)
        graph = dataclasses.replace(graph, disk_arguments=there)
    able = can_stay(graph, range(len(graph.tensors)))
    chosen = [t for t in able if rng.random() < share]
    options |= {"victims": rng.choice(("cheapest", "furthest")), "lookahead": rng.choice((None, 3))}
    budget = fitting(rng, graph, chosen)
    return graph, able, build_memgraph(graph, budget, residents=chosen, **options)


def next_arguments(graph, arguments, results):
    """Those of a call that is given the results of one before."""
    found = [array.copy() for array in arguments]
    for argument, result in graph.donated:
        for (index, offset), data in results.items():
            if index == result:
                found[argument][offset : offset + len(data)] = data
    return found


def check_one_run_after_another(rng, memgraph, seed):
    """A cold run, and two that find what the ones before have left, each given their results."""
    graph = memgraph.taskgraph
    arguments = arguments_of(graph)
    memories, cold = Memories(memgraph, arguments), memgraph.idle()
    cold[memgraph.kind != Kind.OFFLOAD] = False
    for idle in (cold, memgraph.idle(), memgraph.idle()):
        want = straightforward(graph, arguments)
        memories.run(random.Random(rng.random()), idle=idle)
        memories.pay()
        got = memories.results()
        for key, data in want.items():
            assert np.array_equal(got[key], data), (seed, key)
        arguments = next_arguments(graph, arguments, want)
        memories.spoil(rng)


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_runs_find_what_the_ones_before_have_left(first):
    stayed = owed = 0
    for seed in range(first, first + 50):
        rng = random.Random(seed)
        graph, _, memgraph = random_plan(rng)
        verify(memgraph)
        stayed += len(memgraph.residents)
        owed += int((memgraph.owed >= 0).sum())
        check_one_run_after_another(rng, memgraph, seed)
    assert stayed > 15
    assert owed > 0


def test_what_cannot_stay_is_refused():
    refused = 0
    for seed in range(60):
        rng = random.Random(seed)
        graph, able, _ = random_plan(rng)
        for t in set(range(len(graph.tensors))) - set(able):
            span = graph.tensors[t].argument
            donated = {i for i, _ in graph.donated}
            over = {v.inputs[k] for v in graph.vertices for k, _ in v.overwrites}
            if span is not None and (span.index in donated and t not in over):
                continue  # legal, and of no use
            if span is not None and graph.tensors[t].results and t not in over:
                continue  # likewise
            with pytest.raises(ValueError, match=f"residents names tensor {t}, which cannot stay"):
                build_memgraph(graph, fitting(rng, graph, [t]), residents=[t])
            refused += 1
    assert refused > 100


def sweep(layers=8, size=4096, results=False):
    """A vertex a layer, each with a weight of its own; weights are updated at the end if asked."""
    tensors = [Tensor(size, argument=Span(k, 0)) for k in range(layers)]
    vertices, last = [], None
    for k in range(layers):
        tensors.append(Tensor(256))
        inputs = (k,) if last is None else (last, k)
        vertices.append(Vertex(VertexKind.KERNEL, inputs, (len(tensors) - 1,), seconds=1e-6))
        last = len(tensors) - 1
    donated = []
    for k in reversed(range(layers if results else 0)):
        tensors.append(Tensor(size, results=(Span(k, 0),)))
        made = len(tensors) - 1
        vertices.append(
            Vertex(VertexKind.KERNEL, (k, last), (made,), overwrites=((0, 0),), seconds=1e-6)
        )
        donated.append((k, k))
    if not results:
        tensors[last] = dataclasses.replace(tensors[last], results=(Span(0, 0),))
    graph = TaskGraph(tuple(tensors), tuple(vertices), tuple(donated))
    graph.check()
    return graph


def test_what_others_have_bytes_of_does_not_stay_with_an_output_over_it():
    """The first is long, and the second ends before the third begins."""
    tensors = (
        Tensor(4096, argument=Span(0, 0)),
        Tensor(256, argument=Span(0, 256)),
        Tensor(256, argument=Span(0, 1024)),
        Tensor(256, argument=Span(0, 4096)),
        *(Tensor(256) for _ in range(2)),
        Tensor(256, results=(Span(0, 1024),)),
        Tensor(256, results=(Span(0, 4096),)),
    )
    kernel = VertexKind.KERNEL
    vertices = (
        Vertex(kernel, (0,), (4,)),
        Vertex(kernel, (1, 4), (5,)),
        Vertex(kernel, (2, 5), (6,), overwrites=((0, 0),)),
        Vertex(kernel, (3, 5), (7,), overwrites=((0, 0),)),
    )
    assert can_stay(TaskGraph(tensors, vertices, ((0, 0),)), [0]) == {3: 7}


SLOW = dataclasses.replace(SMALL_SERVER, to_device=Link(1e6, 0.0), from_device=Link(1e6, 0.0))


def planned(graph, budget):
    lasting = range(len(graph.tensors))
    return with_residents(
        build_memgraph(graph, budget),
        lasting,
        lambda tensors: build_memgraph(graph, budget, residents=tensors),
        SLOW,
    )[0]


@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("kept", [0, 3, 6])
def test_a_sweep_moves_what_does_not_fit(kept, updated):
    """Least recently used would move everything."""
    graph = sweep(results=updated)
    room = least_room(graph)
    found = planned(graph, room + kept * 4096)
    verify(found)
    stays = found.resident_bytes()
    assert (kept - 1) * 4096 <= stays <= (kept + 1) * 4096
    once = (8 + (7 if updated else 0)) * 4096  # the last weight is still there for its update
    carried = 4 * 256
    assert found.moved_bytes(Kind.RELOAD) <= once - stays * (2 if updated else 1) + carried
    assert found.moved_bytes(Kind.OFFLOAD) <= (8 * 4096 - stays if updated else 0) + carried


def test_what_streams_arrives_early_beside_one_that_is_far_larger():
    """As the layers of a decoder do, whose vocabulary stays: room for one more layer is enough, and
    is given up; room for one more vocabulary would be most of what stays."""
    layers, large, kept = 32, 40 * 4096, 20
    graph = sweep(layers)
    vertices = [dataclasses.replace(v, seconds=0.5 * 4096 / 1e6) for v in graph.vertices]
    tensors = [*graph.tensors[: layers - 1], Tensor(large, argument=Span(layers - 1, 0))]
    graph = dataclasses.replace(
        graph, tensors=(*tensors, *graph.tensors[layers:]), vertices=tuple(vertices)
    )
    found = planned(graph, least_room(graph) + kept * 4096)
    verify(found)
    assert found.resident_bytes() < large + kept * 4096
    kernels = sum(v.seconds for v in vertices)
    assert found.moved_bytes(Kind.RELOAD) / 1e6 < kernels
    assert simulate(found, machine=SLOW).seconds <= 1.05 * kernels


def test_all_stays_where_all_fits():
    graph = sweep(results=True)
    found = planned(graph, 1 << 20)
    assert found.resident_bytes() == 8 * 4096
    assert found.moved_bytes(Kind.RELOAD) == found.moved_bytes(Kind.OFFLOAD) == 0


def broken_laws(memgraph):
    try:
        verify(memgraph)
    except VerifyError as error:
        return {violation.law for violation in error.violations}
    return set()


def test_the_verifier_sees_who_is_not_alone():
    graph = sweep()
    found = planned(graph, least_room(graph) + 3 * 4096)
    version = int(found.residents[0])
    for other in np.flatnonzero(found.space == Space.DEVICE).tolist():
        if other == version or other in found.residents:
            continue
        offset = found.offset.copy()
        offset[version] = offset[other]
        assert Law.STAYS in broken_laws(dataclasses.replace(found, offset=offset))


def test_the_verifier_sees_whoever_is_in_a_part_of_the_place():
    """Every pair of places looked at, which the verifier does not."""
    rng, seen = random.Random(0), collections.Counter()
    for seed in range(150):
        _, _, memgraph = random_plan(random.Random(seed))
        mine = memgraph.residents[memgraph.owed < 0]
        if not len(mine):
            continue
        version = int(rng.choice(mine.tolist()))
        device, sizes = memgraph.index[version], memgraph.version_bytes()
        last = max(0, int(memgraph.capacity[device] - sizes[version])) // 256
        for _ in range(6):
            offset = with_entry(memgraph.offset, version, 256 * rng.randint(0, last))
            start, end = offset, offset + sizes
            others = (memgraph.space == Space.DEVICE) & (memgraph.index == device) & (sizes > 0)
            others[version] = False
            meets = others & (start < end[version]) & (start[version] < end)
            is_broken = Law.STAYS in broken_laws(dataclasses.replace(memgraph, offset=offset))
            assert is_broken == meets.any()
            seen[is_broken] += 1
    assert min(seen[True], seen[False]) > 20


@pytest.mark.parametrize("results", [False, True])
def test_the_verifier_sees_what_cannot_stay(results):
    graph = sweep(results=results)
    found = planned(graph, least_room(graph) + 3 * 4096)
    assert broken_laws(found) == set()
    wrong = []
    for version in range(found.num_versions):
        if version not in found.residents:
            names = np.append(found.residents, np.int32(version))
            wrong.append((names, np.append(found.owed, np.int32(-1))))
    wrong.append((np.append(found.residents, found.residents[:1]), np.append(found.owed, -1)))
    wrong.append((found.residents, found.owed[:-1]))
    if results:
        wrong.append((found.residents, np.full_like(found.owed, -1)))
        wrong.append((found.residents, np.roll(found.owed, 1)))
    for names, owed in wrong:
        assert Law.STAYS in broken_laws(dataclasses.replace(found, residents=names, owed=owed))


def test_the_verifier_sees_residents_that_are_no_arguments():
    """Of what a run makes, moves away and brings back."""
    seen = 0
    for seed in range(60):
        graph, _, memgraph = random_plan(random.Random(seed))
        made = [
            version
            for version in np.flatnonzero(memgraph.space == Space.DEVICE).tolist()
            if memgraph.kind[memgraph.writer[version]] == Kind.RELOAD
            and graph.tensors[memgraph.tensor[version]].argument is None
        ]
        for version in [*made[:3], memgraph.num_versions, -1]:
            names = np.append(memgraph.residents, np.int32(version))
            owed = np.append(memgraph.owed, np.int32(-1))
            changed = dataclasses.replace(memgraph, residents=names, owed=owed)
            assert Law.STAYS in broken_laws(changed)
        seen += len(made)
    assert seen > 10


def with_entry(array, at, value):
    found = array.copy()
    found[at] = value
    return found


def test_the_verifier_sees_debts_that_are_not_paid():
    graph = sweep(results=True)
    found = planned(graph, least_room(graph) + 3 * 4096)
    result = int(found.owed[0])
    payer = int(found.writer[result])
    others = [v for v in range(-1, found.num_versions + 1) if v != result]
    wrong = [{"owed": with_entry(found.owed, 0, other)} for other in others]
    wrong.append({"taskgraph": dataclasses.replace(graph, donated=())})
    wrong.append({"offset": with_entry(found.offset, result, 256)})
    wrong.append({"kind": with_entry(found.kind, payer, Kind.RELOAD)})
    wrong.append({"space": with_entry(found.space, int(found.residents[0]), Space.HOST)})
    mine = found.input_offsets[payer]
    elsewhere = [v for v in range(found.num_versions) if v != found.inputs[mine]]
    wrong += [{"inputs": with_entry(found.inputs, mine, v)} for v in elsewhere]
    wrong += [
        {"inputs": with_entry(found.inputs, at, result)}
        for at in range(len(found.inputs))
        if at != mine
    ]
    for changes in wrong:
        assert Law.STAYS in broken_laws(dataclasses.replace(found, **changes)), changes


def test_the_verifier_sees_debts_of_what_nothing_writes_over():
    graph = sweep()
    found = planned(graph, least_room(graph) + 3 * 4096)
    for version in range(found.num_versions):
        owed = with_entry(found.owed, 0, version)
        assert Law.STAYS in broken_laws(dataclasses.replace(found, owed=owed))
    space = with_entry(found.space, int(found.residents[0]), Space.HOST)
    assert Law.STAYS in broken_laws(dataclasses.replace(found, space=space))


def test_devices_have_residents_of_their_own():
    seen = set()
    for seed in range(100):
        _, _, memgraph = random_plan(random.Random(seed))
        seen |= set(memgraph.index[memgraph.residents].tolist())
        assert num_devices(memgraph.taskgraph) == len(memgraph.capacity)
    assert seen == {0, 1}

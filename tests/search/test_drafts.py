"""Drafts that are made several at once are those that are made one after another."""

import itertools
import threading

import pytest

from benchmarks.planner import tensor_parallel
from jaxoffload.plan.alloc.build import VARIANTS, build_memgraph
from jaxoffload.plan.alloc.limits import min_budget, resident_peak
from jaxoffload.plan.cost.machines import P100_SERVER
from jaxoffload.search import drafts as drafting

GRAPH = tensor_parallel(1000, num_devices=P100_SERVER.num_devices)
BUDGET = max(min_budget(GRAPH)[0], resident_peak(GRAPH) // 4)
WANTED = [(GRAPH, rule) for rule in VARIANTS]


@pytest.fixture
def at_once(monkeypatch):
    """Graphs of any size are large, and there are four cores."""
    monkeypatch.setattr(drafting, "_AT_ONCE", 0)
    monkeypatch.setattr(drafting.os, "sched_getaffinity", lambda _: range(4))


def drafts(build=build_memgraph):
    return drafting.Drafts(build, P100_SERVER)


def test_at_once_they_are_the_same_and_their_work_counts_as_much(at_once, monkeypatch):
    threads, calls, meeting = set(), itertools.count(), threading.Barrier(2, timeout=60)

    def build(*args, **choices):
        threads.add(threading.get_ident())
        if next(calls) < 2:
            meeting.wait()  # only two threads that are in here together pass
        return build_memgraph(*args, **choices)

    together = drafts(build)
    found = list(together.each(WANTED, BUDGET))
    assert threading.get_ident() not in threads
    monkeypatch.setattr(drafting, "_AT_ONCE", len(GRAPH.vertices) + 1)
    alone = drafts()
    assert found == list(alone.each(WANTED, BUDGET))
    assert len(set(found)) > 1  # rules do differ here
    assert together.work == alone.work == sum(draft.vertices for draft in found)


def test_who_stops_asking_has_asked_for_no_more_and_no_thread_goes_on(at_once):
    before = threading.active_count()
    some = drafts()
    (first,) = itertools.islice(some.each(WANTED, BUDGET), 1)
    assert some.work == first.vertices
    assert threading.active_count() == before


def test_what_fails_in_a_thread_fails_where_it_is_asked_for(at_once):
    def build(graph, budget, *, victims, **choices):
        if victims != VARIANTS[0]["victims"]:
            raise ZeroDivisionError(victims)
        return build_memgraph(graph, budget, victims=victims, **choices)

    found = drafts(build).each(WANTED, BUDGET)
    assert next(found).seconds > 0
    with pytest.raises(ZeroDivisionError, match=VARIANTS[1]["victims"]):
        next(found)

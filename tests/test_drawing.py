"""Which cases of a test a day draws (drawing.py)."""

import itertools
import types

import pytest

from tests import drawing

PAIRS = [frozenset({("budget", i), ("tier", j)}) for i, j in itertools.product(range(4), range(6))]


@pytest.mark.parametrize("count", [1, 4, 7, 24, 30])
def test_every_case_has_its_day(count):
    days = [drawing.drawn("name", PAIRS, count, day) for day in range(20784, 20784 + len(PAIRS))]
    assert all(len(set(found)) == min(count, len(PAIRS)) for found in days)
    assert set().union(*days[: -(-len(PAIRS) // count)]) == set(range(len(PAIRS)))


def test_every_value_is_drawn_every_day():
    days = [drawing.drawn("name", PAIRS, None, day) for day in range(len(PAIRS))]
    for found in days:
        assert frozenset().union(*(PAIRS[i] for i in found)) == frozenset().union(*PAIRS)
        assert len(found) < 10
    assert set().union(*days) == set(range(len(PAIRS)))
    assert drawing.drawn("other", PAIRS, None, 0) != days[0]


def test_items_keep_their_order_and_those_without_the_marker_stay():
    def item(name, number=None, mark=None):
        about = {"nodeid": name if number is None else f"{name}[{number}]"}
        if number is not None:
            about["callspec"] = types.SimpleNamespace(params={"x": number})
        return types.SimpleNamespace(**about, get_closest_marker=lambda _: mark)

    three = pytest.mark.drawn(3).mark
    items = [item("a"), *(item("b", i, three) for i in range(9)), *(item("c", i) for i in range(5))]
    kept, left = drawing.select(items, 1)
    assert len(left) == 6 and all(each.nodeid.startswith("b[") for each in left)
    assert kept == [each for each in items if each not in left]
    assert items[0] in kept and items[-1] in kept


def test_long_tests_have_their_days():
    mark = pytest.mark.drawn(every=3).mark
    items = [
        types.SimpleNamespace(nodeid=name, get_closest_marker=lambda _: mark) for name in "abcdef"
    ]
    days = [[item.nodeid for item in drawing.select(items, day)[0]] for day in range(6)]
    assert [len(names) for names in days] == [2] * 6 and days[:3] == days[3:]
    assert sorted(sum(days[:3], [])) == list("abcdef")


@pytest.mark.drawn()
@pytest.mark.parametrize("x", range(4))
@pytest.mark.parametrize("y", "abc")
def test_of_these_cases_few_are_drawn(x, y, request):
    items = [item for item in request.session.items if "few_are_drawn[" in item.nodeid]
    cases = {(item.callspec.params["x"], item.callspec.params["y"]) for item in items}
    assert (x, y) in cases and len(cases) == len(items)
    if drawing.draws(request.config):
        assert {x for x, _ in cases} == set(range(4)) and {y for _, y in cases} == set("abc")
        assert len(cases) < 8

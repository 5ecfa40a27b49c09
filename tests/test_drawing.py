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
            about["callspec"] = types.SimpleNamespace(indices={"x": number})
        return types.SimpleNamespace(**about, get_closest_marker=lambda _: mark)

    three = pytest.mark.drawn(3).mark
    items = [item("a"), *(item("b", i, three) for i in range(9)), *(item("c", i) for i in range(5))]
    kept, left = drawing.select(items, 1)
    assert len(left) == 6 and all(each.nodeid.startswith("b[") for each in left)
    assert kept == [each for each in items if each not in left]
    assert items[0] in kept and items[-1] in kept


def test_a_long_test_has_its_days():
    mark = pytest.mark.drawn(every=3).mark
    long = types.SimpleNamespace(nodeid="a", get_closest_marker=lambda _: mark)
    drawn = [day for day in range(30) if drawing.select([long], day)[0]]
    assert len(drawn) == 10 and {b - a for a, b in itertools.pairwise(drawn)} == {3}

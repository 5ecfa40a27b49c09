"""Static placement: valid always; on instances whose least capacity is known, close to it."""

import itertools
import math
import random

import numpy as np
import pytest

from jaxoffload import _native
from jaxoffload.plan.alloc import place_intervals, placement


def cut_up(source, pieces, duration=1000, capacity=1 << 20):
    """Buffers that fill a rectangle of time and memory exactly, by random cuts."""
    rectangles = [(0, duration, 0, capacity)]
    while len(rectangles) < pieces:
        a, b, low, high = rectangles.pop(source.randrange(len(rectangles)))
        if source.random() < 0.5 and b - a > 1:
            at = source.randrange(a + 1, b)
            rectangles += [(a, at, low, high), (at, b, low, high)]
        elif high - low > 1:
            at = source.randrange(low + 1, high)
            rectangles += [(a, b, low, at), (a, b, at, high)]
        else:
            rectangles.append((a, b, low, high))
    lower, upper, low, high = (list(x) for x in zip(*rectangles, strict=True))
    return lower, upper, [h - x for x, h in zip(low, high, strict=True)]


def check(lower, upper, size, offsets, capacity):
    assert (offsets >= 0).all() and (offsets + size <= capacity).all()
    for i, j in itertools.combinations(range(len(size)), 2):
        if lower[i] < upper[j] and lower[j] < upper[i] and size[i] and size[j]:
            assert offsets[i] + size[i] <= offsets[j] or offsets[j] + size[j] <= offsets[i]


@pytest.mark.parametrize("search, allowed", [(False, 1.2), (True, 1.1)])
def test_placements_are_valid_and_not_far_from_the_least(search, allowed):
    for seed in range(5):
        lower, upper, size = cut_up(random.Random(seed), 80)
        capacity = int(allowed * 2**20)
        offsets = place_intervals(lower, upper, size, capacity, search=search)
        assert offsets is not None
        check(lower, upper, np.array(size), offsets, capacity)


def test_small_placements_are_found_wherever_there_is_one():
    for seed in range(40):
        lower, upper, size = cut_up(random.Random(seed), 12, duration=20, capacity=64)
        offsets = place_intervals(lower, upper, size, 64)
        assert offsets is not None
        check(lower, upper, np.array(size), offsets, 64)


def test_stretches_of_time_that_nothing_connects_are_placed_apart():
    lower, upper, size = cut_up(random.Random(3), 30)
    lower = [a + 1000 * k for k in range(20) for a in lower]
    upper = [b + 1000 * k for k in range(20) for b in upper]
    capacity = int(1.1 * 2**20)
    offsets = place_intervals(lower, upper, size * 20, capacity)
    check(lower, upper, np.array(size * 20), offsets, capacity)


def test_very_many_buffers_take_the_skyline(monkeypatch):
    monkeypatch.setattr(placement, "MAX_SEARCHED", 50)
    lower, upper, size = cut_up(random.Random(1), 80)
    capacity = int(1.4 * 2**20)
    offsets = place_intervals(lower, upper, size, capacity)
    check(lower, upper, np.array(size), offsets, capacity)
    assert place_intervals(lower, upper, size, 2**20 - 1) is None


def on_skyline(lower, upper, size, order, capacity):
    """What skyline.cc does, as it can be read; empty once it is over the capacity."""
    waiting = list(order)
    line = [(min(lower), max(upper), 0)]
    offsets = [0] * len(size)
    while waiting:
        at = min(range(len(line)), key=lambda k: line[k][2])
        begin, end, height = line[at]
        pick = next((k for k, i in enumerate(waiting) if lower[i] >= begin and upper[i] <= end), -1)
        if pick < 0:
            left = line[at - 1][2] if at else math.inf
            right = line[at + 1][2] if at + 1 < len(line) else math.inf
            first = line[at - 1][0] if left <= right else begin
            last = line[at + 1][1] if right <= left else end
            rest = (at - (left <= right), at + 1 + (right <= left))
            line[rest[0] : rest[1]] = [(first, last, int(min(left, right)))]
            continue
        i = waiting.pop(pick)
        offsets[i] = height
        raised = height + size[i]
        if raised > capacity:
            return []
        pieces = [(lower[i], upper[i], raised)]
        if lower[i] > begin:
            pieces.insert(0, (begin, lower[i], height))
        if upper[i] < end:
            pieces.append((upper[i], end, height))
        line[at : at + 1] = pieces
    return offsets


def test_the_skyline_is_the_one_that_can_be_read():
    for seed in range(200):
        source = random.Random(seed)
        count, moments = source.choice((1, 5, 40, 150)), source.choice((2, 10, 200))
        lower = [source.randrange(moments) for _ in range(count)]
        upper = [a + source.randint(1, source.choice((1, 5, moments))) for a in lower]
        size = [source.choice((0, 1, 1, 7, 64)) for _ in range(count)]
        order = source.sample(range(count), count)
        for capacity in (sum(size), sum(size) // 2):
            want = on_skyline(lower, upper, size, order, capacity)
            assert _native.place_on_skyline(lower, upper, size, order, capacity) == want


def test_what_cannot_fit_is_none_and_what_needs_no_place_gets_one():
    assert place_intervals([0, 0], [2, 2], [6, 6], 11) is None
    np.testing.assert_array_equal(place_intervals([0, 2], [2, 4], [6, 6], 6), [0, 0])
    assert place_intervals([], [], [], 0).tolist() == []
    assert place_intervals([0], [1], [0], 0).tolist() == [0]
    same = [place_intervals(*cut_up(random.Random(1), 40), 3 << 20) for _ in range(2)]
    np.testing.assert_array_equal(*same)


def test_bad_buffers_are_refused():
    with pytest.raises(ValueError, match=r"buffer 1 lives in \[3, 3\)"):
        place_intervals([0, 3], [1, 3], [1, 1], 9)
    with pytest.raises(ValueError, match="have 1, 2 and 1 entries"):
        place_intervals([0], [1, 2], [1], 9)

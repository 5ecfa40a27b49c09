"""What a plan brings back at its end, in hand-made plans: refused where it is wrong."""

import numpy as np
import pytest

from tests.runtime.plan_builder import (
    ARGUMENT,
    DEVICE,
    OFFLOAD,
    RELOAD,
    RESULT,
    PlanBuilder,
)

SHAPE, SIZE = (32, 48), 32 * 48 * 4


def double(x):
    return (x * 2,)


def bringing_back():
    """Two arguments pass through one place, and the first is brought there again.

    Returns:
      The builder, what is first there, and last.
    """
    b = PlanBuilder()
    x, y = (b.version(ARGUMENT, i, 0, SHAPE) for i in range(2))
    first, second, last = (b.version(DEVICE, 0, 0, SHAPE) for _ in range(3))
    made = [b.version(DEVICE, 0, (1 + i) * SIZE, SHAPE) for i in range(2)]
    b.copy(RELOAD, x, first)
    read = b.kernel(double, [first], [made[0]])
    b.copy(RELOAD, y, second, after=[read])
    read = b.kernel(double, [second], [made[1]])
    for i, version in enumerate(made):
        b.copy(OFFLOAD, version, b.version(RESULT, i, 0, SHAPE))
    b.copy(RELOAD, x, last, after=[read])
    return b, first, last


def stays(first, last, owed=-1):
    return {
        "residents": np.array([first], np.int32),
        "owed": np.array([owed], np.int32),
        "returned": np.array([last], np.int32),
    }


def test_a_plan_that_brings_something_back_is_loaded():
    b, first, last = bringing_back()
    b.build(**stays(first, last))


@pytest.mark.parametrize("other", ["first", "second", "made", "argument", "beyond"])
def test_what_is_not_brought_back_is_refused(other):
    b, first, last = bringing_back()
    wrong = {"first": first, "second": first + 1, "made": last + 1, "argument": 0, "beyond": 99}
    with pytest.raises(ValueError, match=rf"residents\[0\]={first} is not brought back"):
        b.build(**stays(first, wrong[other]))


def test_another_place_is_refused():
    b, first, last = bringing_back()
    space, index, _, *rest = b.versions[last]
    b.versions[last] = space, index, 3 * SIZE, *rest
    with pytest.raises(ValueError, match="is not brought back"):
        b.build(**stays(first, last))


def bringing_back_an_update(result=0, offset=0):
    """An argument is donated, and the result in its place is brought back."""
    b = PlanBuilder()
    x = b.version(ARGUMENT, 0, 0, SHAPE)
    first, last = (b.version(DEVICE, 0, 0, SHAPE) for _ in range(2))
    made = b.version(DEVICE, 0, SIZE, SHAPE)
    b.copy(RELOAD, x, first)
    read = b.kernel(double, [first], [made])
    back = b.version(RESULT, result, offset, SHAPE)
    b.copy(OFFLOAD, made, back)
    if (result, offset) != (0, 0):
        b.copy(OFFLOAD, made, b.version(RESULT, 0, 0, SHAPE))
    if offset:
        b.version(ARGUMENT, 0, offset, SHAPE)
    b.copy(RELOAD, back, last, after=[read])
    b.donated = [(0, 0)]
    return b, first, last


def test_an_update_that_is_brought_back_is_loaded():
    b, first, last = bringing_back_an_update()
    b.build(**stays(first, last))


@pytest.mark.parametrize(("result", "offset"), [(1, 0), (0, SIZE)])
def test_another_part_of_the_results_is_refused(result, offset):
    b, first, last = bringing_back_an_update(result, offset)
    with pytest.raises(ValueError, match="is not brought back"):
        b.build(**stays(first, last))


@pytest.mark.parametrize("how", ["computed", "written over"])
def test_what_holds_something_else_in_the_end_is_refused(how):
    b = PlanBuilder()
    x = b.version(ARGUMENT, 0, 0, SHAPE)
    first, last, over = (b.version(DEVICE, 0, 0, SHAPE) for _ in range(3))
    made = b.version(DEVICE, 0, SIZE, SHAPE)
    b.copy(RELOAD, x, first)
    read = b.kernel(double, [first], [made])
    if how == "computed":
        b.kernel(double, [x], [last], after=[read])
        over = last
    else:
        b.copy(RELOAD, x, last, after=[read])
        b.kernel(double, [last], [over], overwrites=[(0, 0)])
    b.copy(OFFLOAD, made, b.version(RESULT, 0, 0, SHAPE))
    b.copy(OFFLOAD, over, b.version(RESULT, 1, 0, SHAPE))
    with pytest.raises(ValueError, match="is not brought back"):
        b.build(**stays(first, last))


def test_another_source_is_refused():
    b = PlanBuilder()
    x, y = (b.version(ARGUMENT, i, 0, SHAPE) for i in range(2))
    first, last = (b.version(DEVICE, 0, 0, SHAPE) for _ in range(2))
    made = b.version(DEVICE, 0, SIZE, SHAPE)
    b.copy(RELOAD, x, first)
    read = b.kernel(double, [first], [made])
    b.copy(RELOAD, y, last, after=[read])
    b.copy(OFFLOAD, made, b.version(RESULT, 0, 0, SHAPE))
    with pytest.raises(ValueError, match="is not brought back"):
        b.build(**stays(first, last))


def test_entries_for_each_resident():
    b, first, last = bringing_back()
    wrong = stays(first, last) | {"returned": np.zeros(0, np.int32)}
    with pytest.raises(ValueError, match="returned has not one entry for each resident"):
        b.build(**wrong)

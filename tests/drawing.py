"""Of tests with many cases that are alike a run draws some, that of another day others.

`@pytest.mark.drawn(3)`: three of a test's cases. `@pytest.mark.drawn()`: as few as have every value
of each of its parameters. `@pytest.mark.drawn(every=2)`: a long test of one case, each second day.
After as many days as a test has cases each has been drawn. A run ends by telling its day, and
JAXOFFLOAD_TEST_DAY=20784 draws the same again. `--every-case` draws all, and so does naming cases,
by `-k` or by their ids.

Takes pytest's items; gives those that are drawn.
"""

import os
import random
import time
from collections.abc import Sequence
from typing import Any

DAY = "JAXOFFLOAD_TEST_DAY"
SECONDS_OF_A_DAY = 86400


def day() -> int:
    """Days since 1970, the same in all processes of a run, which may go on after midnight."""
    return int(os.environ.setdefault(DAY, str(int(time.time()) // SECONDS_OF_A_DAY)))


def draws(config: Any) -> bool:
    """Whether a run draws: it was neither asked for every case nor for some by name."""
    is_named = any("[" in argument for argument in config.args) or config.getoption("keyword")
    return not (is_named or config.getoption("--every-case"))


def drawn(name: str, values: Sequence[frozenset[Any]], count: int | None, day: int) -> list[int]:
    """Numbers of the cases of a test that a day draws, ascending.

    Args:
      values: of each case, what its parameters are.
      count: how many; None: until every value has been drawn.
    """
    order = list(range(len(values)))
    random.Random(name).shuffle(order)
    start = day * (count or 1) % len(order)
    order = order[start:] + order[:start]
    if count is not None:
        return sorted(order[:count])
    seen: set[Any] = set()
    found = []
    for case in order:
        if not values[case] <= seen:
            seen |= values[case]
            found.append(case)
    return sorted(found)


def select(items: Sequence[Any], day: int) -> tuple[list[Any], list[Any]]:
    """Items that are run on a day, in their order, and those that are not."""
    left: set[int] = set()
    long = 0
    tests: dict[str, list[Any]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items():
        marker = cases[0].get_closest_marker("drawn")
        if marker is None:
            continue
        if "every" in marker.kwargs:
            if (day + long) % marker.kwargs["every"]:
                left |= set(map(id, cases))
            long += 1  # on each day about as many
            continue
        assert hasattr(cases[0], "callspec"), f"{name} has no cases to draw"
        params = [case.callspec.params for case in cases]
        values = [frozenset((key, id(value)) for key, value in each.items()) for each in params]
        chosen = set(drawn(name, values, *(marker.args or (None,)), day))
        left |= {id(case) for number, case in enumerate(cases) if number not in chosen}
    return [i for i in items if id(i) not in left], [i for i in items if id(i) in left]

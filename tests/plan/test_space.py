"""The simulated range of addresses against a byte map that remembers everything."""

import random

import hypothesis
import hypothesis.strategies as st

from jaxoffload.plan.alloc.space import AddressSpace


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(rng=st.randoms(use_true_random=False), grows=st.booleans())
def test_places_are_free_and_depend_on_every_former_occupant(rng: random.Random, grows):
    capacity = 24
    space = AddressSpace(None if grows else capacity)
    former = [(0, -1)] * 1000  # (vertex that must be done, last use) of each address
    taken: dict[int, int] = {}
    for step in range(1, 60):
        if taken and rng.random() < 0.45:
            start = rng.choice(sorted(taken))
            size = taken.pop(start)
            space.give(start, size, (step,), step)
            former[start : start + size] = [(step, step)] * size
            continue
        size = rng.randint(0, 9)
        busy = {a for s, n in taken.items() for a in range(s, s + n)}
        free = [a for a in range(capacity) if a not in busy]
        fitting = [a for a in range(capacity - size + 1) if busy.isdisjoint(range(a, a + size))]
        found = space.take(size)
        if found is None:
            assert not grows and not fitting, (free, size)
            continue
        start, after, used = found
        if size:
            covered = range(start, start + size)
            assert busy.isdisjoint(covered)
            assert grows or covered.stop <= capacity
            assert set(after) == {former[a][0] for a in covered} - {0}
            assert used == max(former[a][1] for a in covered)
            taken[start] = size


def test_of_places_that_fit_alike_the_one_unused_longest_is_taken():
    """TURNIP, section 6."""
    space = AddressSpace(5)
    for _ in range(5):
        space.take(1)
    for start, used in ((0, 3), (2, 1), (4, 2)):
        space.give(start, 1, (used,), used)
    assert [space.take(1)[0] for _ in range(3)] == [2, 4, 0]

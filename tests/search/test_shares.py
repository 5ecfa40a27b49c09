"""How much is recomputed, with seconds that are given: what is tried, and what is not."""

import types

import pytest

from jaxoffload.search.cut import Cut
from jaxoffload.search.shares import CHAINED, NEVER, REUSE_DISTANCES, Shares, Tried


class Fake:
    """Simulates cuts by functions of what is recomputed and of the reuse distance."""

    budget = 100

    def __init__(self, seconds, kernels, best=NEVER):
        self._seconds, self._kernels, self.best = seconds, kernels, best
        self.tried = []
        self.cutter = types.SimpleNamespace(
            floor=lambda cut: types.SimpleNamespace(recomputes=cut.recomputed > 0)
        )

    def is_enough(self):
        return False

    def least_seconds(self, cut):
        return 0.0, 0.0

    def kernel_seconds(self, cut):
        return self._kernels(cut.recomputed)

    def seconds(self, cut):
        self.tried.append((cut.reuse_distance / self.budget, cut.recomputed))
        took = self._seconds(cut.recomputed)
        self.best = min(self.best, took)
        return took

    def go_on_if_it_pays(self, took, least):
        pass


def tried(seconds, kernels, best=NEVER):
    fake = Fake(seconds, kernels, best)
    Shares(fake, Tried(seconds(0.0), 0, Cut(50))).run()
    return fake.tried


def test_no_more_is_recomputed_than_what_is_waited_for():
    """From half on nothing waits for copies: more recomputation is more computation."""
    found = tried(lambda share: max(10 - 16 * share, 2 + share), lambda share: 2 + share)
    far = [share for distance, share in found if distance == REUSE_DISTANCES[0]]
    assert far == [0.25, 0.5, 0.375]
    more = tried(lambda share: max(10 - 7 * share, 2 + share), lambda share: 2 + share)
    assert {0.75, 1.0} <= {share for distance, share in more if distance == REUSE_DISTANCES[0]}


@pytest.mark.parametrize("best, is_slow", [(1.6, True), (1.7, False)])
def test_nothing_is_recomputed_of_a_cut_whose_kernels_alone_are_slow(best, is_slow):
    found = tried(lambda share: 10 - 8 * share, lambda share: 2.0, best)
    assert bool(found) != is_slow


def test_where_nothing_works_more_than_all_is_recomputed():
    class Short(Fake):
        def seconds(self, cut):
            works = cut.reuse_distance == self.budget and cut.recomputed > 1
            self.tried.append((cut.reuse_distance / self.budget, cut.recomputed))
            return 3.0 if works else NEVER

    fake = Short(None, lambda share: 1.0)
    Shares(fake, Tried(NEVER, 0, Cut(50))).run()
    assert fake.tried[-3:] == [(1.0, 1.0), (2.0, CHAINED), (1.0, CHAINED)]


def test_what_does_not_work_says_nothing_of_kernels():
    found = tried(lambda share: NEVER if share < 1 else 3.0, lambda share: 1.0)
    assert (REUSE_DISTANCES[0], 1.0) in found

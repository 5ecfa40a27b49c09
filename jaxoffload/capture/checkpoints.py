"""Checkpoints: small values to keep so that large ones can be made again from them.

Takes values that cannot be made again from what is there, and what each is made from; gives those
of the latter that are worth their memory, as what a loop carries is, of which its steps make much
that is read later.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence

from jaxoffload.capture.flat import Value

SHARE = 0.25
"""Of the bytes of what can be made again with a checkpoint, up to which it is kept."""


def chosen(
    values: Sequence[Value],
    sources: Sequence[Mapping[Value, None]],
    read_again: Callable[[int, set[Value]], set[Value]],
) -> set[Value]:
    """The checkpoints. First are looked at the values that most can be made from for their bytes.

    Args:
      values: that cannot be made again.
      sources: for each what it is made from that would not be there, a few operations back.
      read_again: what making a value again reads, by its number, where more is there; nothing
        where it still cannot be made.
    """
    served: dict[Value, list[int]] = {}
    for number, each in enumerate(sources):
        for v in each:
            served.setdefault(v, []).append(number)
    waiting = {v: sum(values[k].num_bytes() for k in numbers) for v, numbers in served.items()}
    candidates = list(served)

    def rank(index: int) -> tuple[float, int]:
        v = candidates[index]
        return -waiting[v] / max(1, v.num_bytes()), index

    ranked = [rank(index) for index in range(len(candidates))]
    heapq.heapify(ranked)
    kept: set[Value] = set()
    tried: set[Value] = set()
    known = [False] * len(values)
    while ranked and -ranked[0][0] * SHARE >= 1:
        index = heapq.heappop(ranked)[1]
        if ranked and rank(index) > ranked[0]:  # some can be made from others by now
            heapq.heappush(ranked, rank(index))
            continue
        v = candidates[index]
        tried.add(v)
        found, used = [], set()
        for number in served[v]:
            if not known[number] and (reads := read_again(number, tried)):
                found.append(number)
                used |= reads & tried - kept
        # Of what each is made from, too much would have to be kept.
        if SHARE * sum(values[k].num_bytes() for k in found) < sum(x.num_bytes() for x in used):
            continue
        kept |= used
        for number in found:
            known[number] = True
            for x in sources[number]:
                waiting[x] -= values[number].num_bytes()
    return kept

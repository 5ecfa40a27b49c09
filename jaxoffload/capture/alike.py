"""Chunks of one scan that give the same, though not all of it is read of each: one executable.

Of the last chunk nobody reads the carries, of one that is run again not all rows; each such
difference would be one more loop to compile. What is given for nothing takes its place only while
the vertex runs, and is given only where it takes no vertex more memory than some vertex takes
anyway.
"""

from collections.abc import Sequence

from jaxoffload.capture.cluster import Cluster
from jaxoffload.capture.flat import Value
from jaxoffload.capture.kernel import body_key

_LITTLE = 2**16
"""Bytes that are written for nothing in less time than it takes to launch a vertex."""
_SHARE = 1 / 16
"""Of what a vertex reads and writes anyway, what else may be written for nothing."""


def make_alike(clusters: Sequence[Cluster]) -> None:
    """Adds outputs to clusters that are loops, so that those that compute the same are the same."""
    groups: dict[object, list[tuple[Cluster, dict[Value, int]]]] = {}
    for cluster in clusters:
        if any(e.operation.repeats is not None for e in cluster.equations):
            key, slots = body_key(cluster)
            groups.setdefault(key, []).append((cluster, slots))
    most = max(map(_moved, clusters)) if groups else 0
    for group in groups.values():
        wanted = [{slots[v] for v in cluster.outputs} for cluster, slots in group]
        for known in (set().union(*wanted), *sorted(wanted, key=len, reverse=True)):
            for (cluster, slots), read in zip(group, wanted, strict=True):
                if read < known:
                    values = [v for v, slot in slots.items() if slot in known]
                    more = sum(v.num_bytes() for v in values if slots[v] not in read)
                    before = _moved(cluster)
                    if before + more <= most and more <= max(_LITTLE, _SHARE * before):
                        cluster.outputs = values
                        read |= known


def _moved(cluster: Cluster) -> int:
    return sum(v.num_bytes() for v in (*cluster.inputs, *cluster.outputs))

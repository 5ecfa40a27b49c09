"""Mini-batches of a graph: neighbours sampled and their rows brought up while the step before runs.

A thread samples, takes the rows of tables in host memory or on disk, and fills them up to a size
that few shapes have, so that a step is compiled, and planned, once.
"""

import collections
import math
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxoffload.graph.device_rows import DeviceRows
from jaxoffload.graph.hot_rows import HotRows
from jaxoffload.graph.relational import Graph
from jaxoffload.graph.sampling import sample
from jaxoffload.runtime.arrays import TierArray


class Batch(NamedTuple):
    """One step's arguments, N nodes and E edges; a pytree.

    Attributes:
      seeds: int32[B], nodes of the graph; where the last batch is short, the first one again.
      is_seed: bool[B], which of them count.
      nodes: int32[N]; seeds first. Nodes that fill up are node 0 of the graph, the last always.
      rows: of each table the nodes' rows, [N, ...], zeros where nodes fill up; of `DeviceRows`
        `SplitRows`, of which `joined` makes that.
      sources, destinations, relations: int32[E], in positions of `nodes`. Edges that fill up lead
        from the last node to itself.
    """

    seeds: np.ndarray
    is_seed: np.ndarray
    nodes: np.ndarray
    rows: Any
    sources: np.ndarray
    destinations: np.ndarray
    relations: np.ndarray


class Batches:
    """An epoch's batches; iterate once for each epoch. Not for several threads at once.

    Args:
      graph: from which neighbours are drawn.
      seeds: the nodes to learn from, each once.
      tables: a pytree of arrays with a row for each node: on disk, in host memory, NumPy's,
        `HotRows`, or `DeviceRows`.
      fanouts, per_relation: as of `sample`.
      batch_size: seeds a batch.
      seed: of their order and the samples; each epoch has others.
      shuffle: whether an epoch takes the seeds in an order of its own.
      ahead: batches that are made while steps run; each is in memory.

    Attributes:
      rows_taken, bytes_taken: of tables in a lower tier since the beginning: each row once a batch,
        and none that `HotRows` or `DeviceRows` keep.
      sizes: (N, E) of the next batch unless it needs more.
    """

    def __init__(
        self,
        graph: Graph,
        seeds: Any,
        tables: Any,
        *,
        fanouts: Sequence[int],
        batch_size: int,
        per_relation: bool = False,
        seed: int = 0,
        shuffle: bool = True,
        ahead: int = 2,
    ):
        if batch_size < 1 or ahead < 1:
            raise ValueError(f"Batches: batch_size={batch_size}, ahead={ahead} must be at least 1.")
        for path, table in jax.tree_util.tree_leaves_with_path(tables):
            if not table.shape or table.shape[0] != graph.num_nodes:
                name = jax.tree_util.keystr(path)
                raise ValueError(
                    f"Batches: tables{name} of shape {table.shape} has no row for each of the "
                    f"{graph.num_nodes} nodes."
                )
        self._graph, self._tables = graph, tables
        self._seeds = np.asarray(seeds).astype(np.int32)
        self._fanouts, self._per_relation = tuple(fanouts), per_relation
        self._batch_size, self._seed, self._shuffle = batch_size, seed, shuffle
        self._ahead, self._epoch = ahead, 0
        self.rows_taken = self.bytes_taken = 0
        self.sizes = (0, 0)
        self._others: dict[int, _Room] = {}  # of each DeviceRows, for rows that are not kept

    def __len__(self) -> int:
        return -(-len(self._seeds) // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        made: queue.Queue[Batch | BaseException | None] = queue.Queue(self._ahead)
        stop = threading.Event()
        thread = threading.Thread(
            target=self._fill, args=(epoch, made, stop), name="jaxoffload batches", daemon=True
        )
        thread.start()
        try:
            while (found := made.get()) is not None:
                if isinstance(found, BaseException):
                    raise found
                yield found
        finally:  # also where the loop is left early
            stop.set()
            thread.join()

    def _fill(self, epoch: int, made: queue.Queue, stop: threading.Event) -> None:
        def hand_over(found: Any) -> None:
            while not stop.is_set():
                try:
                    return made.put(found, timeout=0.05)
                except queue.Full:
                    pass

        try:
            for table in jax.tree.leaves(self._tables):
                if isinstance(table, HotRows | DeviceRows):
                    table.refresh()
            random = np.random.default_rng([self._seed, epoch])
            order = random.permutation(len(self._seeds)) if self._shuffle else slice(None)
            seeds = self._seeds[order]
            for start in range(0, len(seeds), self._batch_size):
                if stop.is_set():
                    return
                chosen = seeds[start : start + self._batch_size]
                hand_over(self._batch(chosen, int(random.integers(2**63))))
            hand_over(None)
        except BaseException as error:  # raised where batches are taken
            hand_over(error)

    def _batch(self, seeds: np.ndarray, seed: int) -> Batch:
        found = sample(
            self._graph, seeds, self._fanouts, seed=seed, per_relation=self._per_relation
        )
        # The last node is always one that fills up.
        needed = (len(found.nodes) + 1, len(found.sources))
        num_nodes, num_edges = self.sizes
        num_nodes = num_nodes if needed[0] <= num_nodes else room_for(needed[0])
        num_edges = num_edges if needed[1] <= num_edges else room_for(needed[1])
        self.sizes = num_nodes, num_edges
        missing = self._batch_size - len(seeds)
        return Batch(
            np.concatenate([seeds, np.repeat(seeds[:1], missing)]),
            np.arange(self._batch_size) < len(seeds),
            _filled(found.nodes, num_nodes, 0),
            jax.tree.map(lambda t: self._rows(t, found.nodes, num_nodes), self._tables),
            _filled(found.sources, num_edges, num_nodes - 1),
            _filled(found.destinations, num_edges, num_nodes - 1),
            _filled(found.relations, num_edges, 0),
        )

    def _rows(self, table: Any, nodes: np.ndarray, count: int) -> Any:
        if isinstance(table, DeviceRows):
            before = table.misses
            room = self._others.setdefault(id(table), _Room())
            split = table.split(nodes, count, room.for_rows)
            self._note(table, table.misses - before)
            return split
        rows = np.empty((count, *table.shape[1:]), table.dtype)
        if isinstance(table, TierArray | HotRows):
            before = table.misses if isinstance(table, HotRows) else 0
            table.take(nodes, out=rows[: len(nodes)])
            taken = table.misses - before if isinstance(table, HotRows) else len(nodes)
            self._note(table, taken)
        else:
            rows[: len(nodes)] = np.asarray(table)[nodes]
        rows[len(nodes) :] = 0
        return rows

    def _note(self, table: Any, taken: int) -> None:
        self.rows_taken += taken
        self.bytes_taken += taken * (math.prod(table.shape[1:]) * table.dtype.itemsize)


class _Room:
    """One of few sizes for a number that differs from batch to batch, and falls for good."""

    def __init__(self) -> None:
        self._last: collections.deque[int] = collections.deque(maxlen=16)
        self._size = 0

    def for_rows(self, number: int) -> int:
        """A size that is enough: that of the batch before where it is, and not far too much."""
        self._last.append(number)
        if number > self._size:
            self._size = room_for(number)
        elif len(self._last) == self._last.maxlen:
            enough = room_for(max(self._last))
            self._size = enough if enough <= 0.8 * self._size else self._size
        return self._size


def room_for(count: int) -> int:
    """The least of few sizes that has room for so many: an eighth to spare, five a doubling."""
    size = 64
    while size < count + count // 8:
        size = -(-size * 115 // 100 // 16) * 16
    return size


def _filled(values: np.ndarray, size: int, rest: int) -> np.ndarray:
    found = np.full(size, rest, np.int32)
    found[: len(values)] = values
    return found

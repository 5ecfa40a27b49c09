"""What becomes of one tensor: why it was evicted, when it comes back, what that costs, what waited.

Takes a `Scene` and part of a name, a source line or an argument's path; gives text.
"""

import difflib
from collections.abc import Callable, Sequence

import numpy as np

from jaxoffload.graphs.memgraph import COPIES, Kind, Space
from jaxoffload.options import format_bytes
from jaxoffload.report.predict import Prediction
from jaxoffload.report.scene import KINDS, Scene
from jaxoffload.report.subjects import format_seconds, scene_of
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.run import Run
from jaxoffload.search.whole import WholePlan
from jaxoffload.showing import told

_SHOWN = 6
"""Tensors that are told of in full; the others are counted."""
_STAYS = 8
"""Stays on the device that are told of each."""
_CLOSE = 5


@told.register(Plan)
@told.register(Run)
@told.register(Prediction)
def _of_scene(shown: Plan | Run | Prediction, about: str) -> str:
    return fate(scene_of(shown), about)


@told.register
def _of_whole(shown: WholePlan, about: str) -> str:
    return f"{shown.name} runs whole, as jax.jit runs it: everything fits, and nothing is evicted."


def fate(scene: Scene, about: str) -> str:
    """The text for all tensors that `about` stands for."""
    tensors = scene.graph.taskgraph.tensors
    names = [_names(scene, t) for t in range(len(tensors))]
    found = _matching(names, about.lower())
    if not found:
        return _nothing(about, sorted({name for of in names for name in of}))
    teller = _Teller(scene)
    found.sort(key=lambda t: (-teller.moved_bytes(t), -tensors[t].bytes, t))
    lines = []
    if len(found) > 1:
        moved = sum(teller.moved_bytes(t) for t in found)
        lines.append(
            f"{len(found)} tensors match {about!r}; they move {format_bytes(moved)}"
            + (f". The first {_SHOWN}:" if len(found) > _SHOWN else ":")
        )
    for tensor in found[:_SHOWN]:
        lines += teller.lines(tensor)
    return "\n".join(lines)


def _matching(names: Sequence[Sequence[str]], wanted: str) -> list[int]:
    """Those with just that name; else those of an argument so called ("params"); else those of
    which any name holds it."""
    tests: tuple[Callable[[str], bool], ...] = (
        lambda name: name == wanted,
        lambda name: name.startswith((f"{wanted}[", f"{wanted}.")),
        lambda name: wanted in name,
    )
    for test in tests:
        found = [t for t, of in enumerate(names) if any(test(name.lower()) for name in of)]
        if found:
            return found
    return []


def _names(scene: Scene, tensor_id: int) -> list[str]:
    """Its name, its line, its argument's path."""
    tensor = scene.graph.taskgraph.tensors[tensor_id]
    names = [tensor.name, tensor.source]
    if tensor.argument is not None:
        index = tensor.argument.index
        names.append(f"argument {index}")
        names += scene.arguments[index : index + 1]
    return [name for name in names if name]


def _nothing(about: str, known: Sequence[str]) -> str:
    # Parts of names are asked for, so parts are compared: the file and line, the path.
    by_word = {part.lower(): name for name in known for part in (name, *name.split())}
    close = difflib.get_close_matches(about.lower(), list(by_word), n=_CLOSE, cutoff=0.4)
    shown = list(dict.fromkeys(by_word[word] for word in close)) or list(known[:_CLOSE])
    return f"No tensor's name, source line or argument holds {about!r}. Close: " + "; ".join(shown)


class _Teller:
    """What is known of all tensors of a scene."""

    def __init__(self, scene: Scene):
        self._scene, self._graph = scene, scene.graph
        self._times = scene.times[0]
        self._begin, self._end = scene.live_ranges(self._times)
        self._whom, _ = self._times.waits(self._graph)
        self._idle = self._times.idle()
        copying = np.isin(self._graph.kind, COPIES)
        self._copies: dict[int, list[int]] = {}
        for vertex in np.flatnonzero(copying).tolist():
            made = self._graph.outputs[self._graph.output_offsets[vertex]]
            tensor = int(self._graph.tensor[made])
            self._copies.setdefault(tensor, []).append(vertex)
        self._versions: dict[int, list[int]] = {}
        for version, tensor in enumerate(self._graph.tensor.tolist()):
            self._versions.setdefault(tensor, []).append(version)

    def moved_bytes(self, tensor_id: int) -> int:
        return self._graph.taskgraph.tensors[tensor_id].bytes * len(self._copies.get(tensor_id, ()))

    def lines(self, tensor_id: int) -> list[str]:
        graph, tensor = self._graph, self._graph.taskgraph.tensors[tensor_id]
        kind = KINDS[tensor.kind][0]
        names = "; ".join(_names(self._scene, tensor_id)[1:])
        if tensor.argument is not None and tensor.argument.offset:
            names += f", from byte {tensor.argument.offset}"
        lines = [f"{tensor.name}, {format_bytes(tensor.bytes)}, {kind}: {names}".rstrip(": ")]
        for copied in COPIES:
            chosen = [v for v in self._copies.get(tensor_id, ()) if graph.kind[v] == copied]
            if chosen:
                spent = sum(float(self._times.end[v] - self._times.start[v]) for v in chosen)
                lines.append(
                    f"  {_WAYS[copied]} {_times(len(chosen))}: "
                    f"{format_bytes(tensor.bytes * len(chosen))}, {format_seconds(spent)} of that "
                    "lane"
                )
        versions = [v for v in self._versions.get(tensor_id, ()) if graph.space[v] == Space.DEVICE]
        versions.sort(key=lambda v: (self._begin[v], v))
        if not versions:
            lines.append("  is read or written where the caller has it, and takes no place")
        for n, version in enumerate(versions[:_STAYS]):
            later = [v for v in versions[n + 1 :] if graph.index[v] == graph.index[version]]
            lines += self._stay(version, later[0] if later else None)
        if len(versions) > _STAYS:
            lines.append(f"  and {len(versions) - _STAYS} more stays on the device")
        return lines

    def _stay(self, version: int, back: int | None) -> list[str]:
        """One stay on the device and how it ended."""
        graph, times = self._graph, self._times
        lines = [
            f"  on device {graph.index[version]} from {format_seconds(self._begin[version])} to "
            f"{format_seconds(self._end[version])}"
        ]
        if back is None:
            return lines
        copied = any(
            graph.inputs[graph.input_offsets[v]] == version and graph.kind[v] == Kind.OFFLOAD
            for v in self._copies[int(graph.tensor[version])]
        )
        lines.append(f"    evicted {self._for_whom(version)}; " + (
            "copied to host memory" if copied else "a lower tier has its bytes: nothing was copied"
        ))  # fmt: skip
        others, sooner = self._read_sooner(version)
        if others:
            lines.append(
                f"    of what else was on the device then, {sooner} of {others} are read sooner"
            )
        reload = int(graph.writer[back])
        readers = self._scene.readers[graph.inputs == back]
        first = int(readers[np.argmin(times.start[readers])]) if len(readers) else reload
        waited = ", which waited for nothing of it"
        if self._whom[first] == reload and self._idle[first] > 0:
            waited = f", which waited for it, {format_seconds(self._idle[first])}"
        lines.append(
            f"    comes back at {format_seconds(self._begin[back])}, "
            f"{format_seconds(self._begin[back] - self._end[version])} later, for "
            f"{graph.describe(first)}{waited}"
        )
        return lines

    def _read_sooner(self, version: int) -> tuple[int, int]:
        """Versions that could have gone in its place, and how many of them are read before it."""
        graph, taker = self._graph, int(self._scene.next_occupant[version])
        moment = self._end[version] if taker < 0 else self._begin[taker]
        there = (self._begin < moment) & (self._end > moment)
        there &= (graph.space == Space.DEVICE) & (graph.index == graph.index[version])
        if taker >= 0:
            there[graph.inputs[self._scene.readers == graph.writer[taker]]] = False
        there[[version, *([taker] if taker >= 0 else [])]] = False
        others = np.unique(graph.tensor[there])
        start = self._times.start[self._scene.readers]
        reads = (graph.kind[self._scene.readers] == Kind.KERNEL) & (start >= moment)
        following = np.full(len(graph.taskgraph.tensors), np.inf)
        np.minimum.at(following, graph.tensor[graph.inputs[reads]], start[reads])
        own = following[graph.tensor[version]]
        return len(others), int((following[others] < own).sum())

    def _for_whom(self, version: int) -> str:
        graph, tensors = self._graph, self._graph.taskgraph.tensors
        taker = int(self._scene.next_occupant[version])
        if taker < 0:
            return "as a room of its size was wanted"
        writer = int(graph.writer[taker])
        name = tensors[graph.tensor[taker]].name
        return f"to make room for {name} ({graph.describe(writer)})"


_WAYS = {
    Kind.RELOAD: "copied to the device",
    Kind.OFFLOAD: "copied away from the device",
    Kind.LOAD: "read from disk",
    Kind.STORE: "written to disk",
    Kind.PEER_RELOAD: "copied from another device",
}


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"

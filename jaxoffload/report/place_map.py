"""The place map: which tensor is at which address, when; and what each lane did meanwhile.

Takes a `Run` (the trace of one execution); gives SVG text. Colours are Okabe and Ito's, which
colour-blind readers can tell apart; text and frame follow the page's own colour.
"""

import html

import numpy as np

from jaxoffload.graphs.memgraph import Space
from jaxoffload.graphs.taskgraph import TensorKind
from jaxoffload.options import format_bytes
from jaxoffload.runtime.run import LANES, Run

_COLOURS = {
    TensorKind.WEIGHT: ("weights", "#0072B2"),
    TensorKind.OPTIMIZER: ("optimizer", "#CC79A7"),
    TensorKind.BATCH: ("batch", "#F0E442"),
    TensorKind.ACTIVATION: ("activations", "#E69F00"),
    TensorKind.TEMPORARY: ("temporaries", "#009E73"),
}
_LANE_COLOUR = "#56B4E9"
_STYLE = (
    "".join(
        f".k{int(kind)}{{fill:{colour};fill-opacity:.85;stroke:#fff;stroke-width:.3}}"
        for kind, (_, colour) in _COLOURS.items()
    )
    + f".lane{{fill:{_LANE_COLOUR}}}"
)
_HINT_AREA = 40.0
"""A box smaller than this gets no tooltip: nobody could point at it."""
_WIDTH, _LEFT, _TOP, _MAP, _LANE = 900, 96, 40, 320, 22


def place_map_svg(run: Run, title: str = "") -> str:
    """The place map of one run as SVG, of its first device.

    Args:
      run: from `Offloaded.last_run`.
      title: a line above the picture.

    Returns:
      SVG text; write it to a file, or show it with IPython.display.SVG.
    """
    graph = run.memgraph
    span = max(run.seconds, 1e-9)
    ceiling = max(int(graph.peak_arena_bytes()[0]), 1)
    wide, height = _WIDTH - _LEFT - 12, _TOP + _MAP + 24 + len(LANES) * (_LANE + 6) + 40

    def x(seconds: float) -> float:
        return _LEFT + wide * seconds / span

    until = _last_use(run)
    sizes = graph.version_bytes()
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12" fill="currentColor" color="#444">',
        f"<style>{_STYLE}</style>",
        f'<text x="{_LEFT}" y="16" font-weight="bold">{html.escape(title)}</text>',
    ]
    for version in np.flatnonzero((graph.space == Space.DEVICE) & (graph.index == 0)):
        tensor = graph.taskgraph.tensors[graph.tensor[version]]
        start = run.start_seconds[graph.writer[version]]
        low = _TOP + _MAP * (1 - (graph.offset[version] + sizes[version]) / ceiling)
        tall = _MAP * sizes[version] / ceiling
        length = max(x(until[version]) - x(start), 0.4)
        if tall < 0.3:
            continue
        hint = f"{tensor.name} {format_bytes(tensor.bytes)} {tensor.source}"
        parts.append(_box(x(start), low, length, tall, f"k{int(tensor.kind)}", hint))
    parts.append(
        f'<rect x="{_LEFT}" y="{_TOP}" width="{wide}" height="{_MAP}" fill="none" stroke="#888"/>'
        f'<text x="{_LEFT - 6}" y="{_TOP + 10}" text-anchor="end">{format_bytes(ceiling)}</text>'
        f'<text x="{_LEFT - 6}" y="{_TOP + _MAP}" text-anchor="end">0</text>'
        f'<text x="{_LEFT - 6}" y="{_TOP + _MAP / 2}" text-anchor="end">address</text>'
    )
    shown = {lane: name for lane, (device, name) in run.lanes.items() if device in (0, None)}
    for row, (lane, name) in enumerate(shown.items()):
        top = _TOP + _MAP + 16 + row * (_LANE + 6)
        parts.append(f'<text x="{_LEFT - 6}" y="{top + 15}" text-anchor="end">{name}</text>')
        for vertex_id in np.flatnonzero(run.lane == lane):
            start, end = run.start_seconds[vertex_id], run.end_seconds[vertex_id]
            hint = graph.describe(int(vertex_id))
            parts.append(_box(x(start), top, max(x(end) - x(start), 0.3), _LANE, "lane", hint))
    base = height - 14
    parts.append(f'<text x="{_LEFT + wide}" y="{base}" text-anchor="end">{span:.3g} s</text>')
    at = _LEFT
    for name, colour in _COLOURS.values():
        parts.append(
            f'<rect x="{at}" y="{base - 10}" width="12" height="12" fill="{colour}"/>'
            f'<text x="{at + 16}" y="{base}">{name}</text>'
        )
        at += 100
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(x: float, y: float, wide: float, tall: float, style: str, hint: str) -> str:
    box = f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" class="{style}"'
    if wide * tall < _HINT_AREA:
        return box + "/>"
    return f"{box}><title>{html.escape(hint)}</title></rect>"


def _last_use(run: Run) -> np.ndarray:
    """Seconds at which each version was last read, or written if nobody reads it."""
    graph = run.memgraph
    until = np.zeros(graph.num_versions)
    written = graph.writer >= 0
    until[written] = run.end_seconds[graph.writer[written]]
    readers = np.repeat(np.arange(graph.num_vertices), np.diff(graph.input_offsets))
    np.maximum.at(until, graph.inputs, run.end_seconds[readers])
    return until

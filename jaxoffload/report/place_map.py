"""The picture that needs no script: memory over time, the place map, the lanes; as SVG.

Takes a `Scene` or a `Run`; gives SVG text. Text and frames follow the page's own colour.
"""

import html

import numpy as np

from jaxoffload.graphs.memgraph import Kind, Space
from jaxoffload.options import format_bytes
from jaxoffload.report.scene import KINDS, Scene
from jaxoffload.report.subjects import format_seconds, scene_of
from jaxoffload.runtime.run import LANE_OF_KIND, LANES, Run

_LANE_COLOUR = "#56B4E9"
_STYLE = (
    "".join(
        f".k{int(kind)}{{fill:{colour};fill-opacity:.85;stroke:#fff;stroke-width:.3}}"
        for kind, (_, colour) in KINDS.items()
    )
    + f".lane{{fill:{_LANE_COLOUR}}}"
)
_HINT_AREA = 40.0
"""A box smaller than this gets no tooltip: nobody could point at it."""
_WIDTH, _LEFT, _TOP, _USE, _MAP, _LANE = 900, 104, 40, 80, 300, 22
_WIDE = _WIDTH - _LEFT - 12


def place_map_svg(run: Run, title: str = "") -> str:
    """The place map of one run as SVG, of its first device.

    Args:
      run: from `Offloaded.last_run`.
      title: a line above the picture.

    Returns:
      SVG text; write it to a file, or show it with IPython.display.SVG.
    """
    return picture(scene_of(run), title, 'xmlns="http://www.w3.org/2000/svg" color="#444"')


def picture(
    scene: Scene,
    title: str = "",
    attributes: str = "",
    most: int | None = None,
    hints: bool = True,
) -> str:
    """A scene's first times on its first device as SVG.

    Args:
      title: a line above the picture.
      attributes: more of the svg element's.
      most: boxes to draw at most in memory and in lanes each, the largest; None for all that are
        large enough to be seen.
      hints: whether boxes tell what they are when they are pointed at.
    """
    lanes = _lanes(scene, most)
    height = _TOP + _USE + 12 + _MAP + 24 + len(lanes) * (_LANE + 6) + 40
    base = height - 14
    parts = [
        f'<svg {attributes} viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="12" fill="currentColor">',
        f"<style>{_STYLE}</style>",
        f'<text x="{_LEFT}" y="16" font-weight="bold">{html.escape(title)}</text>',
        *_use(scene),
        *_places(scene, most, hints),
    ]
    for row, (name, boxes) in enumerate(lanes.items()):
        top = _TOP + _USE + 12 + _MAP + 16 + row * (_LANE + 6)
        parts.append(f'<text x="{_LEFT - 6}" y="{top + 15}" text-anchor="end">{name}</text>')
        parts += [
            _box(x, top, wide, _LANE, "lane", hint if hints else "") for x, wide, hint in boxes
        ]
    parts.append(
        f'<text x="{_LEFT + _WIDE}" y="{base}" text-anchor="end">'
        f"{format_seconds(scene.times[0].seconds)}</text>"
    )
    at = _LEFT
    for name, colour in KINDS.values():
        parts.append(
            f'<rect x="{at}" y="{base - 10}" width="12" height="12" fill="{colour}"/>'
            f'<text x="{at + 16}" y="{base}">{name}</text>'
        )
        at += 100
    return "\n".join([*parts, "</svg>"]) + "\n"


def _scale(scene: Scene) -> float:
    return _WIDE / (scene.times[0].seconds or 1.0)


def _use(scene: Scene) -> list[str]:
    """Bytes by kind over time, one area on the other, under the budget."""
    seconds, usage = scene.usage(scene.times[0])
    ceiling = max(int(usage.sum(axis=1).max(initial=0)) + scene.reserved, scene.budget or 0, 1)
    base, scale = _TOP + _USE, _USE / ceiling
    # Of each pixel's moments that at which most is in use, so that no peak is lost.
    column = np.floor(seconds * _scale(scene)).astype(np.int64)
    order = np.lexsort((usage.sum(axis=1), column))
    last = np.flatnonzero(np.diff(column[order], append=-1))
    chosen = order[last]
    low = np.full(len(chosen), float(scene.reserved))
    parts = []
    if scene.reserved:
        tall = scene.reserved * scale
        parts.append(
            f'<rect x="{_LEFT}" y="{base - tall:.1f}" width="{_WIDE}" height="{tall:.1f}" '
            f'fill="#999" fill-opacity=".6"><title>workspace and in place: '
            f"{format_bytes(scene.reserved)}</title></rect>"
        )
    for kind, (name, colour) in KINDS.items():
        high = low + usage[chosen, kind]
        if (high > low).any():
            xs = (_LEFT + column[chosen]).tolist()
            top = _steps(xs, (base - high * scale).tolist())
            bottom = _steps(xs, (base - low * scale).tolist())[::-1]
            points = " ".join(f"{x:.0f},{y:.1f}" for x, y in top + bottom)
            parts.append(
                f'<polygon points="{points}" fill="{colour}"><title>{name}</title></polygon>'
            )
        low = high
    if scene.budget:
        y = base - scene.budget * scale
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}h{_WIDE}" stroke="currentColor" stroke-width="2"/>'
            f'<text x="{_LEFT + 6}" y="{y - 4:.1f}">budget {format_bytes(scene.budget)}</text>'
        )
    parts.append(
        f'<text x="{_LEFT - 6}" y="{_TOP + 10}" text-anchor="end">{format_bytes(ceiling)}</text>'
        f'<text x="{_LEFT - 6}" y="{_TOP + 26}" text-anchor="end">in use</text>'
        f'<text x="{_LEFT - 6}" y="{base}" text-anchor="end">0</text>'
    )
    return parts


def _steps(xs: list[float], ys: list[float]) -> list[tuple[float, float]]:
    """A line that keeps each height until the next."""
    found = []
    for n, (x, y) in enumerate(zip(xs, ys, strict=True)):
        found += [(x, y), (xs[min(n + 1, len(xs) - 1)], y)]
    return found


def _places(scene: Scene, most: int | None, hints: bool) -> list[str]:
    """What is at which address, when."""
    graph, sizes, scale = scene.graph, scene.sizes, _scale(scene)
    begin, end = scene.lives(scene.times[0])
    ceiling = max(int(graph.peak_arena_bytes()[0]), 1)
    top, parts = _TOP + _USE + 12, []
    versions = np.flatnonzero((graph.space == Space.DEVICE) & (graph.index == 0))
    if most is not None and len(versions) > most:
        area = ((end - begin) * sizes)[versions]
        versions = np.sort(versions[np.argsort(-area, kind="stable")[:most]])
    for version in versions.tolist():
        tensor = graph.taskgraph.tensors[graph.tensor[version]]
        low = top + _MAP * (1 - (graph.offset[version] + sizes[version]) / ceiling)
        tall = _MAP * sizes[version] / ceiling
        if tall < 0.3:
            continue
        x, wide = _LEFT + begin[version] * scale, max((end - begin)[version] * scale, 0.4)
        hint = f"{tensor.name} {format_bytes(tensor.bytes)} {tensor.source}" if hints else ""
        parts.append(_box(x, low, wide, tall, f"k{int(tensor.kind)}", hint))
    parts.append(
        f'<rect x="{_LEFT}" y="{top}" width="{_WIDE}" height="{_MAP}" fill="none" stroke="#888"/>'
        f'<text x="{_LEFT - 6}" y="{top + 10}" text-anchor="end">{format_bytes(ceiling)}</text>'
        f'<text x="{_LEFT - 6}" y="{top + _MAP}" text-anchor="end">0</text>'
        f'<text x="{_LEFT - 6}" y="{top + _MAP / 2}" text-anchor="end">address</text>'
    )
    return parts


def _lanes(scene: Scene, most: int | None) -> dict[str, list[tuple[float, float, str]]]:
    """(x, width, hint) of the boxes of each lane of the first device that has any."""
    graph, times, scale = scene.graph, scene.times[0], _scale(scene)
    spent = times.end - times.start
    has_device = ~np.isin(graph.kind, (Kind.LOAD, Kind.STORE))
    vertices = np.flatnonzero((graph.device == 0) | ~has_device)
    if most is not None and len(vertices) > most:
        longest = np.argsort(-spent[vertices], kind="stable")[:most]
        vertices = np.sort(vertices[longest])
    found: dict[str, list[tuple[float, float, str]]] = {}
    for name in LANES:
        found[name] = [
            (_LEFT + times.start[v] * scale, max(spent[v] * scale, 0.3), graph.describe(v))
            for v in vertices.tolist()
            if LANE_OF_KIND[Kind(graph.kind[v])] == name
        ]
    return {name: boxes for name, boxes in found.items() if boxes}


def _box(x: float, y: float, wide: float, tall: float, style: str, hint: str) -> str:
    box = f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" class="{style}"'
    if not hint or wide * tall < _HINT_AREA:
        return box + "/>"
    return f"{box}><title>{html.escape(hint)}</title></rect>"

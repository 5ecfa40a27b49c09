"""Pages: what a notebook shows, and what `save` writes, of plans, runs, predictions, trade-offs.

Takes what is shown; gives HTML. A page is one piece: words, a static picture, the data, and a
script (model.js, view.js) that replaces the picture by a view to look into. Nothing is fetched.
Whatever the user named is escaped.
"""

import base64
import dataclasses
import functools
import html
import importlib.resources
import json
from collections.abc import Sequence
from typing import Any

from jaxoffload.report.place_map import picture
from jaxoffload.report.predict import Prediction
from jaxoffload.report.scene import KINDS, Scene, encoded
from jaxoffload.report.subjects import scene_of
from jaxoffload.report.tradeoff import Tradeoff
from jaxoffload.runtime.plan import Plan
from jaxoffload.runtime.run import Run
from jaxoffload.search.whole import WholePlan, WholeRun
from jaxoffload.showing import Shown, page, words

_FILES = importlib.resources.files("jaxoffload.report")
_STATIC_BOXES = 800
"""In the picture for where no script runs, of memory and of lanes each."""
_THEME = (
    "<style>svg{color:#222;background:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#ddd;background:#16181c}}</style>"
)
"""Colours of pictures as view.css has them: an image knows nothing of the page's own."""
_MOST_IN_A_NOTEBOOK = 50_000
"""Boxes of what a notebook shows: it keeps every output, and these take five megabytes."""
_MOST_BOXES = 200_000
"""In all plans of a trade-off's page; beyond that smaller ones only are looked into."""


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison(Shown):
    """Several plans, runs or predictions in one view; from `compare`.

    Attributes:
      shown: in order of their budgets.
    """

    shown: tuple[Plan | Run | Prediction, ...]

    def __repr__(self) -> str:
        return "\n".join(repr(one) for one in self.shown)


def compare(*shown: Plan | Run | Prediction) -> Comparison:
    """Plans for several budgets in one view, with a slider to go from one to the next.

    Args:
      shown: plans (`Offloaded.plan`), runs (`last_run`) or predictions, made beforehand.

    Returns:
      What a notebook shows, and `save(path)` writes.

    Raises:
      TypeError: one of them is something else, or ran whole. ValueError: there is none.

    >>> import jax, jaxoffload as jo
    >>> x = jax.ShapeDtypeStruct((64, 64), "float32")
    >>> f = jo.offload(lambda x: x @ x, device_memory=None, cut="always")
    >>> len(jo.compare(f.plan(x), f.predict(x, machine="H200")).shown)
    2
    """
    if not shown:
        raise ValueError("compare: shown=() is empty. Pass plans, runs or predictions.")
    for one in shown:
        if isinstance(one, WholePlan | WholeRun) or not isinstance(one, Plan | Run | Prediction):
            raise TypeError(
                f"compare: {one!r} is a {type(one).__name__}. Pass plans, runs or predictions of "
                "functions that were cut."
            )
    order = sorted(shown, key=lambda one: float("inf") if one.budget is None else one.budget)
    return Comparison(tuple(order))


@page.register(Plan)
@page.register(Run)
@page.register(Prediction)
def _page_of_one(shown: Plan | Run | Prediction, *, is_file: bool) -> str:
    return scenes_page([scene_of(shown)], str(shown), is_file=is_file)


@page.register
def _page_of_several(shown: Comparison, *, is_file: bool) -> str:
    return scenes_page([scene_of(one) for one in shown.shown], words(shown), is_file=is_file)


@page.register(WholePlan)
@page.register(WholeRun)
def _page_of_whole(shown: WholePlan | WholeRun, *, is_file: bool) -> str:
    text = "Everything fits: it runs whole, as jax.jit runs it, and nothing is moved."
    return _page(f"{_title(text)}<pre>{html.escape(str(shown))}</pre>", text, is_file)


@page.register
def _page_of_tradeoff(shown: Tradeoff, *, is_file: bool) -> str:
    """The curves, and below them the plans to look into."""
    made = [p.prediction for p in shown.points if p.prediction is not None]
    scenes, boxes = [], 0
    for found in sorted(made, key=lambda found: found.memgraph.num_versions):
        boxes += found.memgraph.num_versions
        if boxes <= _MOST_BOXES:
            scenes.append(scene_of(found))
    scenes.sort(key=lambda scene: scene.budget or 0)
    text = str(shown)
    if len(scenes) < len(made):
        text += f"\n{len(made) - len(scenes)} plans are too large to be looked into on this page."
    curves = _image(shown.svg(), f"{shown.name} on {shown.machine}: time over device memory")
    return scenes_page(scenes, text, is_file=is_file, more=curves)


def scenes_page(scenes: Sequence[Scene], text: str, *, is_file: bool, more: str = "") -> str:
    """HTML of some scenes, the last of them in view.

    Args:
      text: the words above.
      more: HTML between these and the view.
    """
    if not scenes:
        return _page(f"<pre>{html.escape(text)}</pre>{more}", "jaxoffload", is_file)
    title = scenes[-1].title
    boxes = sum(scene.graph.num_versions for scene in scenes)
    if not is_file and boxes > _MOST_IN_A_NOTEBOOK:
        text += f"\n{boxes} boxes are too many for a notebook: .save('plan.html') writes the view."
        return _page(
            f"{_title(title)}<pre>{html.escape(text)}</pre>{more}{_still(scenes[-1])}",
            title,
            False,
        )
    data = {
        "colours": [colour for _, colour in KINDS.values()],
        "selected": len(scenes) - 1,
        "scenes": [encoded(scene) for scene in scenes],
    }
    body = (
        f"{_title(title)}<pre>{html.escape(text)}</pre>{more}"
        f'<div class="static">{_still(scenes[-1])}</div>'
        f'<script type="application/json">{_json(data)}</script>'
    )
    return _page(body, title, is_file, _script())


def _title(text: str) -> str:
    """No heading: notebooks list those of outputs among their own."""
    return f'<p class="title"><strong>{html.escape(text)}</strong></p>'


def _still(scene: Scene) -> str:
    return _image(
        picture(scene, "", 'xmlns="http://www.w3.org/2000/svg"', most=_STATIC_BOXES, hints=False),
        f"{scene.title}: memory and lanes over time",
    )


def _image(svg: str, says: str) -> str:
    """A picture as an image that holds all of itself.

    Notebooks that are not trusted keep such images. Of an svg element JupyterLab would leave the
    words, and GitHub no colours.
    """
    head, _, rest = svg.partition(">")
    data = base64.b64encode(f"{head}>{_THEME}{rest}".encode()).decode()
    return f'<img alt="{html.escape(says)}" src="data:image/svg+xml;base64,{data}">'


def _page(body: str, title: str, is_file: bool, script: str = "") -> str:
    part = f'<div class="jaxoffload-view"><style>{_resource("view.css")}</style>{body}</div>'
    if script:
        part += f"<script>{script}</script>"
    if not is_file:
        return part
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title></head>"
        f'<body class="jaxoffload-page">{part}</body></html>\n'
    )


def _json(data: Any) -> str:
    """JSON in which no text of the user's can end the element that holds it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _script() -> str:
    """Both files in one function: a page may hold several views."""
    return f"(function () {{\n{_resource('model.js')}\n{_resource('view.js')}}})();"


@functools.cache
def _resource(name: str) -> str:
    return _FILES.joinpath(name).read_text(encoding="utf-8")

"""Pictures and traces of a run that really moved something."""

import dataclasses
import re
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxoffload as jo
from jaxoffload.plan.cost.machines import SMALL_SERVER, Link
from jaxoffload.report.place_map import place_map_svg


@pytest.fixture(scope="module")
def run():
    def function(x):
        parts = [jnp.sin(x * (i + 1)) @ x for i in range(6)]
        for part in reversed(parts):
            x = jnp.tanh(x @ part)
        return x

    step = jo.offload(function, device_memory="70KiB", vertex_memory=1)
    step(np.ones((64, 64), np.float32))
    return step.last_run


def test_place_map_draws_every_place_and_vertex(run):
    root = xml.etree.ElementTree.fromstring(place_map_svg(run, "a <title> & more"))
    boxes = [e for e in root if e.tag.endswith("rect")]
    lanes = [e for e in boxes if e.get("class") == "lane"]
    assert len(lanes) == run.memgraph.num_vertices
    places = [e for e in boxes if (e.get("class") or "").startswith("k")]
    assert len(places) == (run.memgraph.space == 0).sum()
    frame = next(e for e in boxes if e.get("fill") == "none")
    low, high = float(frame.get("y")), float(frame.get("y")) + float(frame.get("height"))
    for box in places:
        top = float(box.get("y"))
        assert low - 0.2 <= top and top + float(box.get("height")) <= high + 0.2


def test_bytes_by_tensor_add_up(run):
    down, up = (sum(column) for column in zip(*run.bytes_by_tensor.values(), strict=True))
    assert (down, up) == (run.bytes_offloaded, run.bytes_reloaded)


@pytest.mark.parametrize("activation", [jnp.sin, jnp.tanh])
def test_tradeoff_has_every_strategy_and_both_is_never_slower(activation):
    def loss(weights, x):
        for w in weights:
            x = activation(x @ w)
        return jnp.mean(x * x)

    shapes = [jax.ShapeDtypeStruct((64, 64), np.float32)] * 12
    batch = jax.ShapeDtypeStruct((512, 64), np.float32)
    link = Link(1e8, 0.0)
    machine = dataclasses.replace(SMALL_SERVER, name="slow", to_device=link, from_device=link)
    step = jo.offload(jax.grad(loss), device_memory=None)
    found = step.tradeoff(shapes, batch, machine=machine, shares=(0.6, 0.4))
    by = {(p.strategy, p.budget): p for p in found.points}
    assert found.points[0].strategy == "keep" and len(by) == 7
    for budget in {p.budget for p in found.points[1:]}:
        best = by["both", budget].seconds
        assert best <= 1.1 * min(by["offload", budget].seconds, by["recompute", budget].seconds)
        less = by["recompute", budget].bytes_moved / by["offload", budget].bytes_moved
        assert less < 0.9 or activation is jnp.tanh  # its derivative is another on jax 0.12
    assert "keep everything" in str(found) and "recompute" in str(found)
    root = xml.etree.ElementTree.fromstring(found.svg())
    assert len([e for e in root if e.tag.endswith("circle")]) == len(found.points)
    with pytest.raises(ValueError, match=r"shares=\[0\] holds 0"):
        step.tradeoff(shapes, batch, machine=machine, shares=[0])


def test_explain_says_what_would_lower_the_memory():
    def step(weights, moments, x, unused, same):
        def loss(weights, x):
            for w in weights:
                x = jnp.tanh(x @ w)
            return jnp.mean(x * x)

        grads = jax.grad(loss)(weights, x)
        product = jnp.sort(x @ weights[0], axis=0)
        updated = [w - g + same.sum() for w, g in zip(weights, grads, strict=True)]
        return updated, moments, product, product

    weights = [np.ones((64, 64), np.float32) for _ in range(6)]
    x, other = jnp.ones((1024, 64)), jnp.ones((256, 256))
    found = jo.offload(step, device_memory="3MiB").explain(weights, other, x, other + 1, x)
    lines = {line.split(":")[0]: line for line in found.advice}
    assert set(lines) >= {
        "Donate",
        "Recompute",
        "Unused",
        "Duplicate",
        "Smallest budget",
        "Dtype",
    }
    text = str(found)
    assert "nothing reads unused: 256 KiB" in text
    assert "x and same are the same array" in text
    assert "results 7, 8 are the same, 256 KiB each" in text
    assert "result 6 is moments unchanged" in text
    assert "in bfloat16" in lines["Dtype"] and "test_report.py" in lines["Smallest budget"]
    assert "memory of weights[0], weights[1]" in lines["Donate"]
    lean = jo.offload(lambda x: jnp.tanh(x), device_memory=None, donate_argnums=0)
    assert {line.split(":")[0] for line in lean.explain(x).advice} <= {
        "Smallest budget", "Dtype", "Split"
    }  # fmt: skip


def test_explain_calls_arguments_what_the_user_calls_them_and_layers_of_a_stack_one():
    def step(params, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0]

    shapes = {"layers": jax.ShapeDtypeStruct((6, 512, 512), np.float32)}
    found = jo.offload(step, device_memory="4MiB").explain(shapes, jnp.ones((512, 512)))
    (count,) = [
        count
        for (*_, origin), count in zip(found.usage.largest, found.usage.num_equal, strict=True)
        if origin == "params['layers']"
    ]
    assert count == 6  # as many as are alive at once: arguments are throughout
    assert "6 x     1 MiB  f32[512,512]         weights      params['layers']" in str(found)
    assert found.plan is not None and not found.plan.resident
    assert "\nSimulated on " in str(found) and " (free: " in str(found)


def test_a_line_of_an_installed_library_says_who_called_it():
    optimizer = optax.adam(1e-3)

    def step(params, state, grads):
        return optimizer.update(grads, state, params)

    params = jnp.ones((64, 64))
    text = str(
        jo.offload(step, device_memory="1MiB").explain(params, optimizer.init(params), params)
    )
    assert "site-packages" not in text
    assert re.search(r"at optax/\S+\.py:\d+", text)
    assert "called at tests/report/test_report.py:" in text
    # Where nobody's own code called it, it stands alone.
    alone = jo.offload(optimizer.update, device_memory="1MiB")
    alone = str(alone.explain(params, optimizer.init(params), params))
    assert re.search(r"at optax/\S+\.py:\d+", alone) and "called at" not in alone

"""Training steps of many kinds, as their authors would write them: nothing in them knows of us.

Each entry of `STEPS` takes a share of the full size (`1` takes a few tenths of a second on two
cores) and gives a function and its arguments.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

Step = tuple[Callable[..., Any], tuple[Any, ...]]


class _Random:
    """Arrays of normal numbers, another one each time."""

    def __init__(self) -> None:
        self._key = jax.random.key(0)

    def __call__(self, *shape: int, scale: float | None = None, dtype: Any = jnp.float32) -> Any:
        self._key, key = jax.random.split(self._key)
        scale = shape[0] ** -0.5 if scale is None else scale
        return (scale * jax.random.normal(key, shape)).astype(dtype)

    def whole(self, limit: int, *shape: int) -> Any:
        """Whole numbers below a limit."""
        self._key, key = jax.random.split(self._key)
        return jax.random.randint(key, shape, 0, limit)


def _trained(loss: Callable[..., Any], params: Any, data: Sequence[Any], optimizer: Any) -> Step:
    """A step of an optimizer: (params, state, *data) to (params, state, loss)."""

    def step(params: Any, state: Any, *data: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *data)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), *data)


def _conv(x: Any, kernel: Any, stride: int = 1, groups: int = 1) -> Any:
    space = "HW"[: x.ndim - 2]
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride,) * (x.ndim - 2),
        "SAME",
        dimension_numbers=(f"N{space}C", f"{space}IO", f"N{space}C"),
        feature_group_count=groups,
    )


def _norm(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


def _crossentropy(logits: Any, labels: Any) -> Any:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _attention(x: Any, qkv: Any, out: Any, heads: int, causal: bool = True) -> Any:
    batch, length, width = x.shape
    q, k, v = jnp.split((x @ qkv).reshape(batch, length, heads, -1), 3, -1)
    scores = jnp.einsum("bqhc,bkhc->bhqk", q, k) * (width // heads) ** -0.5
    if causal:
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, -1e9)
    shares = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
    return jnp.einsum("bhqk,bkhc->bqhc", shares, v).reshape(batch, length, width) @ out


def _blocks(random: _Random, layers: int, width: int, dtype: Any = jnp.float32) -> list[Any]:
    return [
        (
            random(width, 3 * width, dtype=dtype),
            random(width, width, dtype=dtype),
            random(width, 4 * width, dtype=dtype),
            random(4 * width, width, dtype=dtype),
        )
        for _ in range(layers)
    ]


def _transformed(blocks: Any, x: Any, heads: int, causal: bool = True) -> Any:
    for qkv, out, up, down in blocks:
        x = x + _attention(_norm(x), qkv, out, heads, causal)
        x = x + jax.nn.gelu(_norm(x) @ up) @ down
    return x


def residual_convolutions(share: float) -> Step:
    """Images of 32 x 32, 13 convolutions, SGD with momentum."""
    random, width, batch = _Random(), 32, max(2, int(32 * share))
    params = {
        "first": random(3, 3, 3, width, scale=0.2),
        "blocks": [[random(3, 3, width, width, scale=0.05) for _ in "ab"] for _ in range(6)],
        "last": random(width, 10),
    }

    def loss(params: Any, images: Any, labels: Any) -> Any:
        x = jax.nn.relu(_conv(images, params["first"]))
        for first, second in params["blocks"]:
            x = jax.nn.relu(x + _conv(jax.nn.relu(_conv(x, first)), second))
        return _crossentropy(x.mean((1, 2)) @ params["last"], labels)

    data = random(batch, 32, 32, 3), random.whole(10, batch)
    return _trained(loss, params, data, optax.sgd(0.1, 0.9))


def batch_normalized(share: float) -> Step:
    """Residual blocks of three widths, normalized over the batch, so that no image is by itself."""
    random, width, batch = _Random(), 32, max(2, int(32 * share))
    widths = [width, width, width, 2 * width, 2 * width, 4 * width, 4 * width]
    params = {
        "first": random(3, 3, 3, width, scale=0.2),
        "blocks": [
            (random(3, 3, a, b, scale=0.05), random(3, 3, b, b, scale=0.05), random(1, 1, a, b))
            for a, b in zip(widths, widths[1:], strict=False)
        ],
        "last": random(widths[-1], 10),
    }

    def norm(x: Any) -> Any:
        x = x - x.mean((0, 1, 2), keepdims=True)
        return x * lax.rsqrt(jnp.square(x).mean((0, 1, 2), keepdims=True) + 1e-5)

    def loss(params: Any, images: Any, labels: Any) -> Any:
        x = jax.nn.relu(norm(_conv(images, params["first"])))
        for first, second, beside in params["blocks"]:
            stride = beside.shape[-1] // beside.shape[-2]
            y = jax.nn.relu(norm(_conv(x, first, stride)))
            x = jax.nn.relu(_conv(x, beside, stride) + norm(_conv(y, second)))
        return _crossentropy(x.mean((1, 2)) @ params["last"], labels)

    data = random(batch, 32, 32, 3), random.whole(10, batch)
    return _trained(loss, params, data, optax.adamw(1e-3))


def depthwise_convolutions(share: float) -> Step:
    """Depthwise kernels of 7 x 7, then two products, AdamW."""
    random, width, batch = _Random(), 64, max(2, int(16 * share))
    params = {
        "first": random(4, 4, 3, width, scale=0.2),
        "blocks": [
            (random(7, 7, 1, width, scale=0.1), random(width, 4 * width), random(4 * width, width))
            for _ in range(4)
        ],
        "last": random(width, 10),
    }

    def loss(params: Any, images: Any, labels: Any) -> Any:
        x = _conv(images, params["first"], 4)
        for spread, up, down in params["blocks"]:
            x = x + jax.nn.gelu(_norm(_conv(x, spread, groups=width)) @ up) @ down
        return _crossentropy(x.mean((1, 2)) @ params["last"], labels)

    data = random(batch, 96, 96, 3), random.whole(10, batch)
    return _trained(loss, params, data, optax.adamw(1e-3))


def audio_convolutions(share: float) -> Step:
    """Convolutions along a wave, each of half its length, Adam."""
    random, batch = _Random(), max(2, int(8 * share))
    widths = (1, 32, 64, 96, 128)
    kernels = [
        random(9, a, b, scale=(9 * a) ** -0.5) for a, b in zip(widths, widths[1:], strict=False)
    ]

    def loss(params: Any, wave: Any, labels: Any) -> Any:
        x = wave
        for kernel in params[:-1]:
            x = jax.nn.silu(_conv(x, kernel, 2))
        return _crossentropy(x.mean(1) @ params[-1], labels)

    data = random(batch, 16384, 1, scale=1.0), random.whole(10, batch)
    return _trained(loss, [*kernels, random(128, 10)], data, optax.adam(1e-3))


def vision_transformer(share: float) -> Step:
    """64 patches an image, 4 layers of width 192, AdamW."""
    random, width, batch = _Random(), 192, max(2, int(32 * share))
    params = {
        "patch": random(4, 4, 3, width, scale=0.2),
        "place": random(64, width, scale=0.02),
        "blocks": _blocks(random, 4, width),
        "last": random(width, 10),
    }

    def loss(params: Any, images: Any, labels: Any) -> Any:
        x = _conv(images, params["patch"], 4).reshape(batch, 64, width) + params["place"][None]
        x = _norm(_transformed(params["blocks"], x, 6, causal=False))
        return _crossentropy(x.mean(1) @ params["last"], labels)

    data = random(batch, 32, 32, 3), random.whole(10, batch)
    return _trained(loss, params, data, optax.adamw(1e-3))


def mixture_of_experts(share: float) -> Step:
    """8 experts, all of them for every token, 4 layers, AdamW."""
    random, width, tokens = _Random(), 256, max(64, int(1024 * share))
    layer = lambda: (random(width, 8), random(8, width, 512), random(8, 512, width))  # noqa: E731

    def loss(params: Any, x: Any, wanted: Any) -> Any:
        for gate, up, down in params:
            shares = jax.nn.softmax(x @ gate)
            hidden = jax.nn.gelu(jnp.einsum("tc,ecf->etf", x, up))
            x = x + jnp.einsum("etf,efc,te->tc", hidden, down, shares)
        return jnp.square(x - wanted).mean()

    data = random(tokens, width, scale=1.0), random(tokens, width, scale=1.0)
    return _trained(loss, [layer() for _ in range(4)], data, optax.adamw(1e-3))


def bfloat16_perceptron(share: float) -> Step:
    """8 layers of 1024 x 1024 in bfloat16, batch 512, AdamW."""
    random, width = _Random(), max(64, int(1024 * share))
    batch, dtype = width // 2, jnp.bfloat16

    def loss(params: Any, x: Any, wanted: Any) -> Any:
        for w in params:
            x = jax.nn.relu(x @ w)
        return jnp.square((x - wanted).astype(jnp.float32)).mean()

    params = [random(width, width, dtype=dtype) for _ in range(8)]
    data = [random(batch, width, scale=1.0, dtype=dtype) for _ in "xy"]
    return _trained(loss, params, data, optax.adamw(1e-3))


def _recurrent(share: float, gates: int, cell: Callable[..., Any]) -> Step:
    random, width, batch = _Random(), 256, max(2, int(32 * share))
    params = {
        "in": random(width, gates * width),
        "own": random(width, gates * width),
        "out": random(width, 64),
    }

    def loss(params: Any, x: Any, labels: Any) -> Any:
        start = (jnp.zeros((batch, width)),) * 2
        step = lambda carry, x: cell(params, carry, x)  # noqa: E731
        _, hidden = lax.scan(step, start, x)
        return _crossentropy(hidden @ params["out"], labels)

    data = random(64, batch, width, scale=1.0), random.whole(64, 64, batch)
    return _trained(loss, params, data, optax.adam(1e-3))


def lstm(share: float) -> Step:
    """64 steps under scan, width 256, batch 32, Adam."""

    def cell(params: Any, carry: Any, x: Any) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(x @ params["in"] + h @ params["own"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return _recurrent(share, 4, cell)


def gru(share: float) -> Step:
    """64 steps under scan, width 256, batch 32, Adam."""

    def cell(params: Any, carry: Any, x: Any) -> Any:
        h, c = carry
        new = jnp.split(x @ params["in"], 3, -1)
        old = jnp.split(h @ params["own"], 3, -1)
        reset, update = (jax.nn.sigmoid(a + b) for a, b in zip(new[:2], old[:2], strict=True))
        h = (1 - update) * jnp.tanh(new[2] + reset * old[2]) + update * h
        return (h, c), h

    return _recurrent(share, 3, cell)


def _language_model(share: float, layers: int, width: int, dtype: Any) -> Step:
    random, words, batch = _Random(), 1024, max(1, int(8 * share))
    params = {
        "words": random(words, width, scale=0.02, dtype=dtype),
        "blocks": _blocks(random, layers, width, dtype),
    }

    def loss(params: Any, tokens: Any) -> Any:
        x = _transformed(params["blocks"], params["words"][tokens[:, :-1]], 8)
        return _crossentropy(_norm(x) @ params["words"].T, tokens[:, 1:])

    return _trained(loss, params, (random.whole(words, batch, 257),), optax.adamw(1e-3))


def transformer(share: float) -> Step:
    """6 layers that are not under scan, width 256, 8 x 256 tokens, AdamW."""
    return _language_model(share, max(1, int(6 * share)), 256, jnp.float32)


def bfloat16_transformer(share: float) -> Step:
    """4 layers of width 512 in bfloat16, 8 x 256 tokens, AdamW."""
    return _language_model(share, max(1, int(4 * share)), 512, jnp.bfloat16)


def multi_query_attention(share: float) -> Step:
    """8 heads of queries, one of keys and values, rotary positions, 2 x 512 tokens, AdamW."""
    random, width, heads, length = _Random(), 256, 8, max(64, int(512 * share))
    size = width // heads
    params = [
        (random(width, width), random(width, 2 * size), random(width, width)) for _ in range(3)
    ]

    def turned(x: Any) -> Any:
        rates = 10000.0 ** (-jnp.arange(size // 2) / (size // 2))
        angles = (jnp.arange(length)[:, None] * rates[None])[None, :, None]
        first, second = jnp.split(x, 2, -1)
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], -1)

    def loss(params: Any, x: Any, wanted: Any) -> Any:
        for query, both, out in params:
            normal = _norm(x)
            q = turned((normal @ query).reshape(2, length, heads, size))
            k, v = jnp.split(normal @ both, 2, -1)
            k = turned(k[:, :, None])[:, :, 0]
            scores = jnp.einsum("bqhc,bkc->bhqk", q, k) * size**-0.5
            scores = jnp.where(jnp.tri(length, dtype=bool), scores, -1e9)
            mixed = jnp.einsum("bhqk,bkc->bqhc", jax.nn.softmax(scores), v)
            x = x + mixed.reshape(2, length, width) @ out
        return jnp.square(x - wanted).mean()

    data = random(2, length, width, scale=1.0), random(2, length, width, scale=1.0)
    return _trained(loss, params, data, optax.adamw(1e-3))


def sliding_window_attention(share: float) -> Step:
    """Each block of 64 tokens sees itself and the one before, 2 x 2048 tokens, AdamW."""
    random, width, heads, block = _Random(), 256, 8, 64
    blocks = max(2, int(32 * share))
    params = _blocks(random, 2, width)

    def mixed(x: Any, qkv: Any, out: Any) -> Any:
        parts = jnp.split((x @ qkv).reshape(2, blocks, block, heads, -1), 3, -1)
        q, k, v = parts
        before = lambda a: jnp.pad(a, ((0, 0), (1, 0)) + ((0, 0),) * 3)[:, :-1]  # noqa: E731
        k, v = (jnp.concatenate([before(a), a], 2) for a in (k, v))
        scores = jnp.einsum("bnqhc,bnkhc->bnhqk", q, k) * (width // heads) ** -0.5
        there = jnp.arange(2 * block)[None] - block <= jnp.arange(block)[:, None]
        shares = jax.nn.softmax(jnp.where(there, scores, -1e9))
        return jnp.einsum("bnhqk,bnkhc->bnqhc", shares, v).reshape(x.shape) @ out

    def loss(params: Any, x: Any, wanted: Any) -> Any:
        for qkv, out, up, down in params:
            x = x + mixed(_norm(x), qkv, out)
            x = x + jax.nn.gelu(_norm(x) @ up) @ down
        return jnp.square(x - wanted).mean()

    data = [random(2, blocks * block, width, scale=1.0) for _ in "xy"]
    return _trained(loss, params, data, optax.adamw(1e-3))


def graph(share: float) -> Step:
    """Messages along 40,000 edges between 10,000 nodes, 4 rounds, Adam."""
    random, width = _Random(), 64
    nodes, edges = int(10000 * share), int(40000 * share)
    params = [(random(width, width), random(width, width)) for _ in range(4)]

    def loss(params: Any, x: Any, source: Any, target: Any, wanted: Any) -> Any:
        for own, other in params:
            sent = jax.nn.relu(x[source] @ other)
            x = jax.nn.relu(x @ own + jax.ops.segment_sum(sent, target, nodes))
        return jnp.square(x - wanted).mean()

    ends = random.whole(nodes, edges), random.whole(nodes, edges)
    data = random(nodes, width, scale=1.0), *ends, random(nodes, width, scale=1.0)
    return _trained(loss, params, data, optax.adam(1e-3))


def runge_kutta(field: Any, size: float) -> Any:
    """One step of the fourth order, of some size, as the body of a scan."""

    def step(x: Any, _: Any) -> Any:
        a = field(x)
        b = field(x + size / 2 * a)
        c = field(x + size / 2 * b)
        d = field(x + size * c)
        return x + size / 6 * (a + 2 * b + 2 * c + d), None

    return step


def differential_equation(share: float) -> Step:
    """30 Runge-Kutta steps of a small perceptron's field, through a loop, Adam."""
    random, width = _Random(), 128
    params = random(width, 2 * width), random(2 * width, width)

    def loss(params: Any, x: Any, wanted: Any) -> Any:
        field = lambda x: jnp.tanh(x @ params[0]) @ params[1]  # noqa: E731
        step = runge_kutta(field, 0.1)
        return jnp.square(lax.scan(step, x, None, length=30)[0] - wanted).mean()

    batch = max(8, int(256 * share))
    data = random(batch, width, scale=1.0), random(batch, width, scale=1.0)
    return _trained(loss, params, data, optax.adam(1e-3))


def recommender(share: float) -> Step:
    """Eight tables of 20,000 rows, their pairwise products, a perceptron, SGD."""
    random, width, batch = _Random(), 32, max(16, int(4096 * share))
    rows = max(100, int(20000 * share))
    params = {
        "tables": [random(rows, width, scale=0.1) for _ in range(8)],
        "layers": [random(64, 512), random(512, 256), random(256, 1)],
    }

    def loss(params: Any, features: Any, clicked: Any) -> Any:
        found = jnp.stack([t[features[:, i]] for i, t in enumerate(params["tables"])], 1)
        x = jnp.einsum("bic,bjc->bij", found, found).reshape(batch, 64)
        for w in params["layers"][:-1]:
            x = jax.nn.relu(x @ w)
        return optax.sigmoid_binary_cross_entropy((x @ params["layers"][-1])[:, 0], clicked).mean()

    data = random.whole(rows, batch, 8), random.whole(2, batch).astype(jnp.float32)
    return _trained(loss, params, data, optax.sgd(0.1))


def diffusion(share: float) -> Step:
    """A perceptron that takes noise away, told the time by sines, and the mean of its weights."""
    random, width, batch = _Random(), 512, max(16, int(1024 * share))
    params = [random(192, width), *(random(width, width) for _ in range(4)), random(width, 64)]
    optimizer = optax.adamw(1e-3)

    def loss(params: Any, points: Any, key: Any) -> Any:
        for_noise, for_time = jax.random.split(key)
        noise = jax.random.normal(for_noise, points.shape)
        time = jax.random.uniform(for_time, (batch, 1))
        angles = time * jnp.exp(jnp.linspace(0.0, 6.0, 64))[None]
        seen = jnp.cos(time) * points + jnp.sin(time) * noise
        x = jnp.concatenate([seen, jnp.sin(angles), jnp.cos(angles)], 1)
        for w in params[:-1]:
            x = jax.nn.silu(x @ w)
        return jnp.square(x @ params[-1] - noise).mean()

    step, (params, state, *data) = _trained(
        loss, params, (random(batch, 64, scale=1.0), jax.random.key(1)), optimizer
    )

    def with_mean(params: Any, state: Any, mean: Any, points: Any, key: Any) -> Any:
        params, state, value = step(params, state, points, key)
        mean = jax.tree.map(lambda m, p: 0.999 * m + 0.001 * p, mean, params)
        return params, state, mean, value

    return with_mean, (params, state, params, *data)


def low_rank_adapters(share: float) -> Step:
    """4 frozen layers of width 512, adapters of rank 8 to each product, 4 x 256 tokens, AdamW."""
    random, width, batch = _Random(), 512, max(1, int(4 * share))
    frozen = _blocks(random, max(1, int(4 * share)), width)
    adapters = [
        [(random(w.shape[0], 8), random(8, w.shape[1], scale=0.0)) for w in block]
        for block in frozen
    ]

    def loss(adapters: Any, frozen: Any, x: Any, wanted: Any) -> Any:
        for block, pairs in zip(frozen, adapters, strict=True):
            qkv, out, up, down = (w + a @ b for w, (a, b) in zip(block, pairs, strict=True))
            x = _transformed([(qkv, out, up, down)], x, 8)
        return jnp.square(x - wanted).mean()

    data = frozen, random(batch, 256, width, scale=1.0), random(batch, 256, width, scale=1.0)
    return _trained(loss, adapters, data, optax.adamw(1e-3))


def attention_by_blocks(share: float) -> Step:
    """One layer of 8 heads, 2 x 2048 tokens: a scan over blocks of keys for each block of queries,
    without a checkpoint of what they make for the gradient, Adam."""
    random, width, heads, length, block = _Random(), 512, 8, max(512, int(2048 * share)), 256

    def of_queries(q: Any, keys: Any) -> Any:
        def step(carry: Any, pair: Any) -> Any:
            total, top, weight = carry
            scores = jnp.einsum("bqhc,bkhc->bhqk", q, pair[0]) * (width // heads) ** -0.5
            now = jnp.maximum(top, scores.max(-1))
            each, before = jnp.exp(scores - now[..., None]), jnp.exp(top - now)
            total = total * before[..., None] + jnp.einsum("bhqk,bkhc->bhqc", each, pair[1])
            return (total, now, weight * before + each.sum(-1)), None

        shape = (q.shape[0], heads, block)
        start = jnp.zeros((*shape, width // heads)), jnp.full(shape, -1e30), jnp.zeros(shape)
        (total, _, weight), _ = lax.scan(step, start, keys)
        return total / weight[..., None]

    def loss(params: Any, x: Any) -> Any:
        parts = jnp.split(
            (x @ params["qkv"]).reshape(2, -1, block, heads, 3 * width // heads), 3, -1
        )
        q, k, v = (part.swapaxes(0, 1) for part in parts)
        found = lax.map(lambda q: of_queries(q, (k, v)), q).transpose(1, 0, 3, 2, 4)
        return jnp.square(found.reshape(x.shape) @ params["out"] - x).mean()

    params = {"qkv": random(width, 3 * width), "out": random(width, width)}
    return _trained(loss, params, (random(2, length, width),), optax.adam(1e-3))


def conditional_field(share: float) -> Step:
    """All ways through 64 labels over 127 steps of a scan, each of which makes 64 times what it
    carries, batch 64, Adam."""
    random, labels, batch = _Random(), 64, max(4, int(64 * share))

    def loss(params: Any, x: Any, way: Any) -> Any:
        scores = x @ params["scores"]

        def step(sums: Any, here: Any) -> Any:
            return jax.nn.logsumexp(sums[:, :, None] + params["next"], axis=1) + here, None

        sums, _ = lax.scan(step, scores[:, 0], scores[:, 1:].swapaxes(0, 1))
        taken = jnp.take_along_axis(scores, way[..., None], -1)[..., 0].sum(1)
        taken = taken + params["next"][way[:, :-1], way[:, 1:]].sum(1)
        return (jax.nn.logsumexp(sums, axis=1) - taken).mean()

    params = {"scores": random(512, labels), "next": random(labels, labels)}
    data = random(batch, 128, 512), random.whole(labels, batch, 128)
    return _trained(loss, params, data, optax.adam(1e-3))


STEPS: dict[str, Callable[[float], Step]] = {
    "residual convolutions": residual_convolutions,
    "mixture of experts": mixture_of_experts,
    "perceptron, bfloat16": bfloat16_perceptron,
    "LSTM": lstm,
    "transformer": transformer,
    "depthwise convolutions": depthwise_convolutions,
    "audio convolutions": audio_convolutions,
    "vision transformer": vision_transformer,
    "GRU": gru,
    "graph network": graph,
    "differential equation": differential_equation,
    "multi-query attention": multi_query_attention,
    "sliding window attention": sliding_window_attention,
    "recommender": recommender,
    "transformer, bfloat16": bfloat16_transformer,
    "diffusion": diffusion,
    "low-rank adapters": low_rank_adapters,
}

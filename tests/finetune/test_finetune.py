"""Tokenizer, model, adapters and the command, against references of their own."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoffload.finetune import data, lora, model, train
from jaxoffload.finetune.tokenizer import Tokenizer

CONFIG = model.PRESETS["tiny"]
LORA = lora.LoraConfig(rank=4)
TEXT = b"def f(x):\n    return f(x) + f(x)\n" * 50


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXT + data.standard_library_text(60_000), 400)


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(text=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_decoding_gives_back_what_was_encoded(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_most_frequent_pair_is_merged_first():
    trained = Tokenizer.train(b"ab ab ab cd cd xyz", 258)
    assert trained.merges[0] == (ord("a"), ord("b"))


def test_merges_shorten_the_text(tokenizer):
    text = data.standard_library_text(60_000)
    assert len(tokenizer.encode(text)) < 0.6 * len(text)
    with pytest.raises(ValueError, match="vocab_size=3"):
        Tokenizer.train(TEXT, 3)


def test_batches_are_windows_of_the_text_in_a_seeded_order():
    tokens = np.arange(1000, dtype=np.int32)
    one, two = (next(data.batches(tokens, 3, 10, seed=5)) for _ in range(2))
    np.testing.assert_array_equal(one, two)
    assert one.shape == (3, 11) and (np.diff(one) == 1).all()
    with pytest.raises(ValueError, match="fewer than one window"):
        next(data.batches(tokens[:5], 3, 10, seed=5))


def reference_logits(config, params, tokens):
    """The model in NumPy and float64, written for one sequence and with loops."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = p["embed"][tokens]
    length, d = len(tokens), config.head_width
    group = config.num_heads // config.num_kv_heads

    def norm(v, scale):
        return v / np.sqrt((v * v).mean(-1, keepdims=True) + config.norm_eps) * scale

    def rope(v):
        half = d // 2
        out = np.empty_like(v)
        for t in range(length):
            for i in range(half):
                angle = t * config.rope_theta ** (-i / half)
                a, b = v[t, i], v[t, i + half]
                out[t, i] = a * np.cos(angle) - b * np.sin(angle)
                out[t, i + half] = b * np.cos(angle) + a * np.sin(angle)
        return out

    for n in range(config.num_layers):
        w = {k: v[n] for k, v in p["layers"].items()}
        h = norm(x, w["attention_norm"])
        heads = []
        for head in range(config.num_heads):
            kv = head // group
            q = rope(h @ w["wq"][:, head * d : (head + 1) * d])
            k = rope(h @ w["wk"][:, kv * d : (kv + 1) * d])
            v = h @ w["wv"][:, kv * d : (kv + 1) * d]
            scores = np.where(np.tri(length, dtype=bool), q @ k.T / np.sqrt(d), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v)
        x = x + np.concatenate(heads, -1) @ w["wo"]
        h = norm(x, w["ffn_norm"])
        gate = h @ w["w_gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["w_up"])) @ w["w_down"]
    return norm(x, p["norm"]) @ p["unembed"]


@pytest.fixture(scope="module")
def params():
    return model.init(CONFIG, jax.random.key(0))


TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 12)).astype(np.int32)


def test_model_equals_its_reference(params):
    got = model.forward(CONFIG, params, TOKENS)
    for b in range(2):
        want = reference_logits(CONFIG, params, TOKENS[b])
        np.testing.assert_allclose(got[b], want, rtol=2e-4, atol=2e-4)


def test_the_future_does_not_change_the_past(params):
    other = TOKENS.copy()
    other[:, 8:] = (other[:, 8:] + 1) % CONFIG.vocab_size
    one, two = (model.forward(CONFIG, params, t) for t in (TOKENS, other))
    np.testing.assert_array_equal(one[:, :8], two[:, :8])
    assert not np.array_equal(one[:, 8:], two[:, 8:])


def test_fresh_adapters_change_nothing_and_trained_ones_equal_merged_weights(params):
    adapters = lora.init_adapters(CONFIG, LORA, jax.random.key(1))
    project = lora.project_with(LORA)
    plain = model.forward(CONFIG, params, TOKENS)
    np.testing.assert_array_equal(model.forward(CONFIG, params, TOKENS, adapters, project), plain)
    trained = jax.tree.map(lambda x: x + 0.02, adapters)
    merged = lora.merge(params, trained, LORA)
    np.testing.assert_allclose(
        model.forward(CONFIG, params, TOKENS, trained, project),
        model.forward(CONFIG, merged, TOKENS),
        rtol=1e-3,
        atol=1e-3,
    )


def test_loss_is_cross_entropy():
    logits = np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32)
    targets = np.array([[0, 1, 2], [4, 3, 0]], np.int32)
    log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = -np.take_along_axis(log, targets[..., None], -1).mean()
    np.testing.assert_allclose(model.loss(jnp.asarray(logits), targets), want, rtol=1e-6)


def test_a_few_steps_make_the_loss_fall(params):
    adapters = lora.init_adapters(CONFIG, LORA, jax.random.key(1))
    optimizer = train.optimizer(1e-2, 20)
    step = jax.jit(train.make_step(CONFIG, LORA, optimizer))
    runner = train.Runner.start(step, params, adapters, optimizer.init(adapters))
    for _ in range(20):
        runner.advance(TOKENS)
    assert runner.losses[-1] < 0.7 * runner.losses[0]


def test_seven_billion_parameters_are_counted_from_shapes():
    assert 6.7e9 < model.PRESETS["7b"].num_params() < 6.8e9
    assert dataclasses.replace(CONFIG, dtype="bfloat16").dtype == "bfloat16"


def test_the_command_trains_within_a_quarter_of_the_memory(tmp_path):
    import subprocess
    import sys

    flags = ["--preset=tiny", "--steps=4", "--batch=2", "--length=64", "--text_bytes=40000"]
    flags += [f"--trace={tmp_path / 'map.svg'}", f"--out={tmp_path / 'adapters.npz'}"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxoffload.finetune", *flags], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for word in ("tokens a second", "held out", "device memory", "moved each step", "sample"):
        assert word in done.stdout
    assert (tmp_path / "map.svg").read_text().startswith("<svg")
    assert "['wq']['a']" in np.load(tmp_path / "adapters.npz")

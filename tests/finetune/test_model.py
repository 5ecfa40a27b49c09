"""The decoder against its float64 reference, layer layouts, packing and the loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.finetune import model
from jaxoffload.finetune.rope import Rope
from tests.finetune import reference

CONFIG = model.PRESETS["tiny"]
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 12)).astype(np.int32)
TINY = model.Config(64, 32, 3, 4, 2, 48)
OTHERS = {
    "tied, biases": dataclasses.replace(
        TINY, is_tied=True, has_qkv_bias=True, has_out_bias=True, has_mlp_bias=True
    ),
    "window": dataclasses.replace(TINY, window=4),
    "query and key norms, wide heads": dataclasses.replace(TINY, has_qk_norm=True, head_width=16),
    "everything else": dataclasses.replace(
        TINY,
        has_qk_norm=True,
        has_sandwich_norms=True,
        norm_adds_one=True,
        embedding_scale=32**0.5,
        activation="gelu_tanh",
        query_scale=24**-0.5,
        window=5,
        sliding=(True, False, True),
        rope=Rope(1e6, "linear", 8.0),
        sliding_rope=Rope(1e4),
    ),
}


def random_params(config, seed=0):
    """Weights of NumPy's none of which is zero or one."""
    source = np.random.default_rng(seed)

    def draw(path, shape):
        is_norm = "norm" in str(path) and not config.norm_adds_one
        scale = 0.3 if len(shape.shape) < 3 else shape.shape[-1] ** -0.5
        return (source.standard_normal(shape.shape) * scale + is_norm).astype(shape.dtype)

    return jax.tree_util.tree_map_with_path(draw, model.init_shapes(config))


def as_tuple(params):
    """The same weights with a dict for each layer."""
    stack = params["model"]["layers"]
    count = len(jax.tree.leaves(stack)[0])
    parts = tuple(jax.tree.map(lambda x, i=i: x[i], stack) for i in range(count))
    return {**params, "model": {**params["model"], "layers": parts}}


@pytest.fixture(scope="module")
def params():
    return jax.jit(model.init, static_argnums=0)(CONFIG, jax.random.key(0))


forward = jax.jit(model.forward, static_argnums=0)


def assert_near(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())


def test_model_equals_its_reference(params):
    got = forward(CONFIG, params, TOKENS)
    assert got.shape == (2, 12, CONFIG.vocab_size) and got.dtype == np.float32
    for b in range(2):
        assert_near(got[b], reference.logits(CONFIG, params, TOKENS[b]))


@pytest.mark.parametrize("name", OTHERS)
def test_every_switch_equals_its_reference_stacked_and_one_by_one(name):
    config = OTHERS[name]
    params = random_params(config)
    tokens = TOKENS[:1] % config.vocab_size
    want = reference.logits(config, params, tokens[0])
    assert_near(forward(config, params, tokens)[0], want)
    one_by_one = jax.jit(lambda p, t: model.forward(config, p, t, wrap_layer=jax.checkpoint))
    assert_near(one_by_one(as_tuple(params), tokens)[0], want)


def test_shapes_are_those_of_a_checkpoint(params):
    weights = params["model"]["layers"]["self_attn"]
    assert weights["k_proj"]["weight"].shape == (2, 32, 64)  # layers, out, in
    assert params["lm_head"]["weight"].shape == (512, 64)
    assert "lm_head" not in model.init_shapes(OTHERS["tied, biases"])
    assert 6.7e9 < model.PRESETS["7b"].num_params() < 6.8e9


def test_the_future_does_not_change_the_past(params):
    other = TOKENS.copy()
    other[:, 8:] = (other[:, 8:] + 1) % CONFIG.vocab_size
    one, two = (forward(CONFIG, params, t) for t in (TOKENS, other))
    np.testing.assert_array_equal(one[:, :8], two[:, :8])
    assert not np.array_equal(one[:, 8:], two[:, 8:])


def test_packed_texts_do_not_see_each_other():
    config = OTHERS["everything else"]
    params = random_params(config)
    texts = [TOKENS[0, :7] % 64, TOKENS[1, :5] % 64]
    packed = np.concatenate(texts)[None]
    segments = np.array([[1] * 7 + [2] * 5], np.int32)
    got = forward(config, params, packed, segments=segments)[0]
    alone = [forward(config, params, text[None])[0] for text in texts]
    assert_near(got[:7], alone[0])
    assert_near(got[7:], alone[1])
    assert np.abs(got - forward(config, params, packed)[0])[7:].max() > 1e-2


def test_packed_texts_count_from_their_own_beginning():
    """Which a rope shows whose rates follow the last position."""
    config = dataclasses.replace(TINY, rope=Rope(1e4, "dynamic", 4.0, 8))
    params = random_params(config)
    texts = [TOKENS[0, :7] % 64, TOKENS[1, :5] % 64]
    packed, segments = np.concatenate(texts)[None], np.array([[3] * 7 + [1] * 5], np.int32)
    got = forward(config, params, packed, segments=segments)[0]
    assert_near(got[:7], forward(config, params, texts[0][None])[0])
    assert_near(got[7:], forward(config, params, texts[1][None])[0])


def test_positions_are_those_given(params):
    later = np.arange(12, dtype=np.int32)[None] + 5
    same = forward(CONFIG, params, TOKENS[:1], positions=later)
    assert_near(same, forward(CONFIG, params, TOKENS[:1]))  # only distances count
    apart = forward(CONFIG, params, TOKENS[:1], positions=2 * later)
    assert np.abs(apart - same).max() > 1e-2


def test_a_layer_that_everything_or_nothing_slides_in_takes_the_right_window():
    config = dataclasses.replace(TINY, window=3, sliding=(False,) * 3)
    params = random_params(config)
    full, tokens = dataclasses.replace(TINY), TOKENS[:1] % 64
    np.testing.assert_array_equal(forward(config, params, tokens), forward(full, params, tokens))


def test_the_scale_of_embeddings_is_rounded_to_their_dtype():
    """As Gemma's is: the root of 1,152 is 33.94, and 34 in bfloat16."""
    config = dataclasses.replace(TINY, width=1152, embedding_scale=1152**0.5, dtype="bfloat16")
    table = jnp.full((4, 1152), 1.5, jnp.bfloat16)
    params = {"model": {"embed_tokens": {"weight": table}}}
    got = model.embed(config, params, np.zeros((1, 2), np.int32))
    assert got.dtype == jnp.bfloat16 and (got == 51.0).all()


def test_loss_is_cross_entropy_of_the_tokens_that_count():
    logits = np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32)
    targets = np.array([[0, 1, 2], [4, 3, 0]], np.int32)
    log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    each = -np.take_along_axis(log, targets[..., None], -1)[..., 0]
    logits = jnp.asarray(logits)
    np.testing.assert_allclose(model.loss(logits, targets), each.mean(), rtol=1e-6)
    weights = np.array([[1, 0, 1], [0, 0, 2]], np.float32)
    want = (each * weights).sum() / weights.sum()
    np.testing.assert_allclose(model.loss(logits, targets, weights), want, rtol=1e-6)
    value, grad = jax.value_and_grad(model.loss)(logits, targets, np.zeros((2, 3), np.int32))
    assert value == 0 and not np.asarray(grad).any()


def test_a_prefill_in_a_part_of_the_memory_equals_jit(params):
    def prefill(params, tokens):
        return model.forward(CONFIG, params, tokens)

    step = jo.offload(prefill, device_memory="500KiB", cut="always")
    assert_near(step(params, TOKENS), np.asarray(jax.jit(prefill)(params, TOKENS)))
    assert step.last_run.peak_device_bytes <= 500 * 1024


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(num_kv_heads=3), "num_kv_heads=3"),
        (dict(window=3, sliding=(True,)), "1 entries for 3 layers"),
    ],
)
def test_impossible_shapes_are_refused(change, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(TINY, **change)

"""Random weights of every architecture, as llama.cpp writes them and as Hugging Face does."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxoffload.finetune import gguf_config, huggingface, model, models
from jaxoffload.finetune.rope import Rope
from tests.finetune import gguf_files, reference
from tests.finetune.test_huggingface import CONFIG, GEMMA, random_params

package = pytest.importorskip("gguf", reason="pip install 'jaxoffload[finetune]'")
pytest.importorskip("tokenizers", reason="pip install 'jaxoffload[finetune]'")

GEMMA_6 = dataclasses.replace(
    GEMMA, num_layers=6, sliding=(True,) * 5 + (False,), query_scale=32**-0.5
)
WORDS = [chr(0x100 + i) for i in range(CONFIG.vocab_size)]
BYTE_LEVEL = {"model": "gpt2", "tokens": WORDS}
SENTENCEPIECE = {
    "model": "llama", "tokens": WORDS, "scores": [-float(i) for i in range(len(WORDS))],
    "token_type": [1] * len(WORDS), "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
}  # fmt: skip
GEMMA_VALUES = {
    "attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 4,
    "rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
}  # fmt: skip
LLAMA3 = Rope(5e5, "llama3", 8.0, 8192, 1.0, 4.0)
WIDE = dataclasses.replace(CONFIG, head_width=32)

# Name: architecture, what Hugging Face's folder says, metadata beside the counts, tokenizer.
FILES = {
    "llama": ("llama", CONFIG, {"rope.freq_base": 1e4, "rope.dimension_count": 16}, BYTE_LEVEL),
    "llama, SentencePiece": ("llama", CONFIG, {}, SENTENCEPIECE),
    "llama, biases": (
        "llama",
        dataclasses.replace(
            CONFIG, has_qkv_bias=True, has_out_bias=True, has_mlp_bias=True, is_tied=True
        ),
        {},
        BYTE_LEVEL | {"pre": "smollm"},
    ),
    "llama 3": (
        "llama",
        dataclasses.replace(WIDE, rope=LLAMA3),
        {"attention.key_length": 32, "rope.freq_base": 5e5},
        BYTE_LEVEL | {"pre": "llama-bpe"},
    ),
    "qwen2": (
        "qwen2",
        dataclasses.replace(
            CONFIG, family="qwen2", has_qkv_bias=True, norm_eps=1e-6,
            rope=Rope(1e6, "yarn", 4.0, 32),
        ),
        {"rope.freq_base": 1e6, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
         "rope.scaling.original_context_length": 32},
        BYTE_LEVEL | {"pre": "qwen2"},
    ),
    "qwen3": (
        "qwen3",
        dataclasses.replace(WIDE, family="qwen3", has_qk_norm=True, is_tied=True),
        {"attention.key_length": 32},
        BYTE_LEVEL | {"pre": "qwen2"},
    ),
    "gemma3": ("gemma3", GEMMA_6, GEMMA_VALUES, SENTENCEPIECE | {"add_space_prefix": False}),
    "gemma3, told by period": (
        "gemma3",
        dataclasses.replace(GEMMA_6, num_layers=3, sliding=(True, True, False)),
        GEMMA_VALUES | {"attention.sliding_window_pattern": 3},
        SENTENCEPIECE,
    ),
    "gemma3, told by layer": (
        "gemma3",
        dataclasses.replace(
            GEMMA_6, num_layers=3, sliding=(True, False, True), sliding_rope=Rope(2e4)
        ),
        GEMMA_VALUES
        | {"attention.sliding_window_pattern": [True, False, True], "rope.freq_base_swa": 2e4},
        SENTENCEPIECE,
    ),
}  # fmt: skip


def counts_of(config):
    return {
        "block_count": config.num_layers, "embedding_length": config.width,
        "feed_forward_length": config.ffn_width, "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads, "context_length": config.max_length,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
    }  # fmt: skip


def written(path, name, params, more=(), **values):
    architecture, config, given, words = FILES[name]
    tensors = list(
        gguf_files.tensors_of(architecture, params, config.num_heads, config.num_kv_heads)
    )
    if config.rope.kind == "llama3":
        factors = gguf_files.llama3_factors(config.head_width // 2, 5e5, 8.0, 8192)
        tensors.append(("rope_freqs.weight", factors))
    return gguf_files.write(
        package, path, architecture, counts_of(config) | given | values, words, [*tensors, *more]
    )


def near(got, want):
    """Gemma's norms were written with 1 added, in float32."""
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=1.2e-7)


@pytest.mark.parametrize("name", FILES)
def test_a_file_opens_as_the_folder_of_the_same_weights(tmp_path, name):
    config = FILES[name][1]
    params = random_params(config)
    huggingface.save_model(tmp_path / "m", config, params)
    opened, folder = (
        models.open_model(path)
        for path in (written(tmp_path / "m.gguf", name, params), tmp_path / "m")
    )
    assert opened.config == folder.config == config
    jax.tree.map(near if config.norm_adds_one else np.testing.assert_array_equal,
                 opened.params, folder.params)  # fmt: skip
    assert opened.tokenizer.vocab_size == config.vocab_size
    tokens = np.arange(40, dtype=np.int32)
    got = jax.jit(model.forward, static_argnums=0)(
        opened.config, jax.tree.map(np.asarray, opened.params), tokens[None]
    )[0]
    want = reference.logits(config, params, tokens)
    np.testing.assert_allclose(got, want, atol=5e-6 * np.abs(want).max())


@pytest.mark.parametrize("architecture", gguf_config.ARCHITECTURES)
def test_names_are_those_of_the_package_gguf(architecture):
    """Its table is what llama.cpp's converter goes by."""
    kinds = {name: kind for kind, name in package.MODEL_ARCH_NAMES.items()}
    table = package.get_tensor_name_map(kinds[architecture], 2)
    config = next(config for kind, config, *_ in FILES.values() if kind == architecture)
    inner = (f"model.layers.1.{name}" for name in model.layer_shapes(config))
    for name in (*model.outer_shapes(config), *inner):
        theirs = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs and gguf_config.name_of(architecture, theirs) == name


@pytest.mark.parametrize("tier", ["disk", "device"])
def test_gemmas_norms_are_the_same_in_every_tier(tmp_path, tier):
    params = random_params(GEMMA_6)
    opened = models.open_model(written(tmp_path / "m.gguf", "gemma3", params), tier=tier)
    layers = opened.params["model"]["layers"]
    if tier == "disk":
        assert layers[0]["self_attn"]["q_proj"]["weight"].tier == "disk"
        layers = jax.tree.map(lambda *x: np.stack([np.asarray(each) for each in x]), *layers)
    jax.tree.map(near, layers, params["model"]["layers"])
    near(opened.params["model"]["norm"]["weight"], params["model"]["norm"]["weight"])


@pytest.mark.parametrize("half, factor, length", [(64, 8.0, 8192), (64, 32.0, 8192),
                                                  (32, 32.0, 8192), (40, 4.0, 3000),
                                                  (2, 8.0, 4096)])  # fmt: skip
def test_llama3s_rope_is_found_from_what_its_rates_are_divided_by(half, factor, length):
    factors = gguf_files.llama3_factors(half, 5e5, factor, length)
    found = rope_of(factors)
    assert (found.kind, found.factor, found.theta) == ("llama3", factor, 5e5)
    if half > 2:  # of two factors, 1 and the largest, many lengths are right
        assert found.original_length == length
    again = gguf_files.llama3_factors(half, 5e5, factor, found.original_length)
    np.testing.assert_array_equal(again, factors)


def rope_of(factors, **more):
    values = counts_of(CONFIG) | {"rope.freq_base": 5e5}
    if factors is not None:
        values["attention.key_length"] = 2 * len(factors)
    values |= more
    fields = {f"llama.{key}": value for key, value in values.items()}
    fields["general.architecture"] = "llama"
    shapes = {"token_embd.weight": (64, 96)}
    return gguf_config.config_of("m.gguf", fields, shapes, factors).rope


def test_other_ways_to_say_a_rope_are_read():
    assert rope_of(None) == rope_of(np.ones(8, np.float32)) == Rope(5e5)
    assert rope_of(None, **{"rope.scaling.type": "none", "rope.scaling.factor": 2.0}) == Rope(5e5)
    assert rope_of(None, **{"rope.scale_linear": 2.0}) == Rope(5e5, "linear", 2.0)
    assert rope_of(None, **{"rope.scaling.factor": 2.0}) == Rope(5e5, "linear", 2.0)
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    assert rope_of(None, **yarn) == Rope(5e5, "yarn", 4.0, CONFIG.max_length)
    betas = {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0}
    want = Rope(5e5, "yarn", 4.0, 128, beta_fast=16.0, beta_slow=2.0)
    assert rope_of(None, **yarn, **betas) == want


@pytest.mark.parametrize(
    "factors, more, match",
    [
        (np.linspace(1, 9, 8), {}, "rope_freqs.weight that is not made as Llama 3's, of 8 factors"),
        (np.array([1.0, 1.0, 4.0, 8.0]), {"rope.scaling.factor": 2.0}, "both rope_freqs.weight"),
        (np.ones(4), {"attention.key_length": 16}, r"rope_freqs.weight of shape \[4\].*\[8\]"),
        (None, {"rope.scaling.yarn_attn_factor": 0.5}, "yarn_attn_factor = 0.5; only 1.0"),
        (None, {"rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        (None, {"final_logit_softcapping": 30.0}, "soft-capped logits"),
        (None, {"rope.dimension_count": 8}, "rotates a part of each head"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(factors, more, match):
    with pytest.raises(ValueError, match=match):
        rope_of(factors, **more)


def gemma_of(**more):
    fields = counts_of(GEMMA_6) | GEMMA_VALUES | more
    fields = {f"gemma3.{key}": value for key, value in fields.items()}
    fields["general.architecture"] = "gemma3"
    return gguf_config.config_of("m.gguf", fields, {"token_embd.weight": (64, 96)}, None)


def test_the_largest_gemma_scales_its_scores_otherwise():
    large = gemma_of(block_count=62)
    assert large.query_scale == 16**-0.5 and large.head_width == 32
    assert sum(large.sliding) == 52


def test_windows_are_told_in_every_way():
    pattern = "attention.sliding_window_pattern"
    assert all(gemma_of(**{pattern: 0}).sliding) and not any(gemma_of(**{pattern: 1}).sliding)
    none = gemma_of(**{"attention.sliding_window": 0})
    assert none.window is None and not none.slides(0)
    for wrong in (-1, [True], "six"):
        with pytest.raises(ValueError, match="sliding_window_pattern = .*a list of 6 switches"):
            gemma_of(**{pattern: wrong})


def test_a_file_of_another_family_is_refused(tmp_path):
    """Gemma's extra norms in LLaMA's file, which has no such names."""
    extra = [("blk.0.post_ffw_norm.weight", np.ones(64, np.float32))]
    path = written(tmp_path / "m.gguf", "llama", random_params(CONFIG), extra)
    with pytest.raises(ValueError, match=r"a tensor 'blk.0.post_ffw_norm.weight'"):
        models.open_model(path)

"""SmolLM2's real weights, and files of the package gguf's own writer with something wrong."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.finetune import gguf, model, models
from jaxoffload.finetune.quantize import Quantized
from tests.finetune import gguf_files, reference

package = pytest.importorskip("gguf", reason="pip install 'jaxoffload[finetune]'")
pytest.importorskip("tokenizers", reason="pip install 'jaxoffload[finetune]'")
pytest.importorskip("jinja2", reason="pip install 'jaxoffload[finetune]'")

PARAGRAPH = """The Earth is the third planet from the Sun, and the only one that is known to have
life. Most of its surface is covered by the ocean; the rest is land, with mountains, deserts,
plains and forests. It is surrounded by an atmosphere that consists mainly of nitrogen and oxygen.
The Earth orbits the Sun once in about 365 days, and turns around its axis once every 24 hours.
Because this axis is tilted, different parts of the planet receive more light at different times,
which causes the seasons. The Moon is its only natural satellite, and the gravity of the Moon
causes the tides.""".replace("\n", " ")


@pytest.fixture(scope="module")
def smollm2():
    try:
        return models.open_model(models.smollm2())
    except ImportError as error:
        pytest.skip(str(error))


def test_real_weights_stay_packed(smollm2):
    weights = smollm2.params["model"]["layers"]["mlp"]["down_proj"]["weight"]
    assert isinstance(weights, Quantized) and weights.kind == "q4_1"
    assert isinstance(weights.packed, jo.HostArray) and weights.shape == (30, 576, 1536)
    assert smollm2.params["model"]["embed_tokens"]["weight"].kind == "q8_0"
    assert smollm2.config.num_params() == 134_515_008
    assert sum(x.nbytes for x in jax.tree.leaves(smollm2.params)) < 97e6


def test_real_weights_know_english_and_the_order_of_rows_matters(smollm2):
    """Queries and keys in the file's own order are as random as they are plausible."""
    config = smollm2.config
    params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), smollm2.params)
    tokens = np.array([smollm2.tokenizer.encode(PARAGRAPH)], np.int32)

    @jax.jit
    def perplexity(params):
        logits = model.forward(config, params, tokens)
        return jnp.exp(model.loss(logits[:, :-1], tokens[:, 1:]))

    right = perplexity(params)
    attention = params["model"]["layers"]["self_attn"]
    for name, heads in (("q_proj", 9), ("k_proj", 3)):
        rows = np.arange(heads * 64).reshape(heads, 2, 32).swapaxes(1, 2).reshape(-1)
        attention[name] = {"weight": attention[name]["weight"].permuted(rows)}
    assert 5 < right < 12 and perplexity(params) > 4 * right


def test_it_answers(smollm2):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert models.answer(smollm2, question) == "The capital of France is Paris."


def test_its_tokenizer_splits_digits_and_keeps_special_tokens(smollm2):
    words = smollm2.tokenizer
    assert words.vocab_size == 49_152 and words.eos_id == 2
    for text in (PARAGRAPH, "é 日本 \n\n\t x=12345", "<|im_start|>user\nHi<|im_end|>"):
        assert words.decode(words.encode(text)) == text
    assert len(words.encode("12345")) == 5
    assert words.encode("<|im_start|>") == [1] and words.encode("<|im_end|>") == [2]
    assert words.decode([1, *words.encode("Hi"), 2], skip_special_tokens=True) == "Hi"
    prompt = words.apply_chat_template([{"role": "user", "content": "Hi"}], True)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


CONFIG = model.Config(260, 64, 2, 4, 2, 128, is_tied=True, norm_eps=1e-5, max_length=128)
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{theirs}": name for theirs, name in gguf_files.ATTENTION.items()},
    **{f"mlp.{theirs}": name for theirs, name in gguf_files.PERCEPTRON.items()},
}  # fmt: skip


def random_params(config):
    source = np.random.default_rng(0)
    shapes = model.init_shapes(config)
    return jax.tree.map(
        lambda s: (source.standard_normal(s.shape) * s.shape[-1] ** -0.5).astype(s.dtype), shapes
    )


def written(path, config, params, *, architecture="llama", leave_out=(), packs=False, **fields):
    """A file as llama.cpp's converter would write it."""
    writer = package.GGUFWriter(path, architecture)
    values = {
        "block_count": config.num_layers, "embedding_length": config.width,
        "feed_forward_length": config.ffn_width, "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads, "context_length": config.max_length,
    }  # fmt: skip
    for name, value in values.items():
        if name not in leave_out:
            writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.norm_eps)
    writer.add_float32(f"{architecture}.rope.freq_base", config.rope.theta)
    tokens = [chr(0x100 + i) for i in range(config.vocab_size)]
    writer.add_tokenizer_model(fields.pop("tokenizer", "gpt2"))
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(fields.pop("tokens", tokens))
    writer.add_token_merges([])
    for name, value in fields.items():
        name = f"{architecture}.rope.scaling.{name}"
        writer.add_string(name, value) if isinstance(value, str) else writer.add_float32(
            name, value
        )

    def add(name, array):
        if name in leave_out:
            return
        if packs and array.ndim == 2:
            kind = package.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, package.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))

    add("token_embd.weight", params["model"]["embed_tokens"]["weight"])
    add("output_norm.weight", params["model"]["norm"]["weight"])
    for i in range(config.num_layers):
        for name in model.layer_shapes(config):
            module, _, last = name.rpartition(".")
            array = params["model"]["layers"]
            for part in name.split("."):
                array = array[part]
            array = array[i]
            heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(NAMES[module])
            if heads and architecture == "llama":
                split = array.reshape(heads, 2, -1, config.width)
                array = split.swapaxes(1, 2).reshape(-1, config.width)
            add(f"blk.{i}.{NAMES[module]}.{last}", array)
    if "extra" in leave_out:
        writer.add_tensor("blk.0.ffn_gate_inp.weight", np.ones((2, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_plain_file_opens_as_the_weights_that_were_written(tmp_path):
    params = random_params(CONFIG)
    opened = gguf.open_model(written(tmp_path / "m.gguf", CONFIG, params))
    assert opened.config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, opened.params, params)
    half = gguf.open_model(tmp_path / "m.gguf", dtype="bfloat16", tier="device")
    table = half.params["model"]["embed_tokens"]["weight"]
    assert isinstance(table, jax.Array) and table.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "architecture, has",
    [("llama", {}), ("qwen2", {"has_qkv_bias": True}), ("qwen3", {"has_qk_norm": True})],
)
def test_other_architectures_keep_their_order_and_have_their_own(tmp_path, architecture, has):
    config = dataclasses.replace(CONFIG, family=architecture, **has)
    params = random_params(config)
    opened = gguf.open_model(
        written(tmp_path / "m.gguf", config, params, architecture=architecture)
    )
    assert opened.config == config
    jax.tree.map(np.testing.assert_array_equal, opened.params, params)


@pytest.mark.drawn()
@pytest.mark.parametrize("tier", ["host", "device", "disk"])
@pytest.mark.parametrize("form", [None, "none", "int8", "nf4"])
def test_every_tier_and_packing_gives_the_same_logits(tmp_path, tier, form):
    path = written(tmp_path / "m.gguf", CONFIG, random_params(CONFIG), packs=True)
    if tier == "disk" and form:
        with pytest.raises(ValueError, match=f"quantize='{form}' makes new weights"):
            gguf.open_model(path, tier=tier, quantize=form)
        return
    opened = gguf.open_model(path, tier=tier, quantize=form)
    node = Quantized if form != "none" else (jo.HostArray if tier == "host" else jax.Array)
    layers = opened.params["model"]["layers"]
    first = layers[0] if tier == "disk" else layers
    assert isinstance(first["mlp"]["up_proj"]["weight"], node)
    if tier == "disk":
        assert first["mlp"]["up_proj"]["weight"].packed.tier == "disk"
        assert first["self_attn"]["q_proj"]["weight"].packed.tier == "host"
        stack = jax.tree.map(lambda *x: np.stack([np.asarray(each) for each in x]), *layers)
        opened.params["model"]["layers"] = stack
    params = jax.tree.map(np.asarray, opened.params)
    tokens = np.arange(9, dtype=np.int32)
    got = model.forward(opened.config, params, tokens[None])[0]
    plain = jax.tree.map(
        lambda x: np.asarray(x.dequantize()) if isinstance(x, Quantized) else x,
        params,
        is_leaf=lambda x: isinstance(x, Quantized),
    )
    want = reference.logits(opened.config, plain, tokens)
    np.testing.assert_allclose(got, want, atol=3e-6 * np.abs(want).max())
    exact = reference.logits(CONFIG, random_params(CONFIG), tokens)
    share = {"nf4": 0.5, "int8": 0.05}.get(form, 0.03)
    assert np.abs(want - exact).max() < share * np.abs(exact).max()


def test_ropes_of_files_are_read(tmp_path):
    params = random_params(CONFIG)
    path = written(tmp_path / "m.gguf", CONFIG, params, type="linear", factor=4.0)
    rope = gguf.open_model(path).config.rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 4.0, 10_000.0)
    path = written(
        tmp_path / "n.gguf", CONFIG, params, type="yarn", factor=4.0, original_context_length=64.0
    )
    rope = gguf.open_model(path).config.rope
    assert (rope.kind, rope.factor, rope.original_length) == ("yarn", 4.0, 64)
    path = written(tmp_path / "o.gguf", CONFIG, params, type="longrope")
    with pytest.raises(ValueError, match="rope scaling 'longrope'"):
        gguf.open_model(path)


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(architecture="mamba"), "architecture 'mamba'"),
        (dict(leave_out=("blk.1.ffn_up.weight",)), "no tensor 'model.layers.1.mlp.up_proj.weight'"),
        (dict(leave_out=("extra",)), "a tensor 'blk.0.ffn_gate_inp.weight'"),
        (dict(leave_out=("feed_forward_length",)), "does not say llama.feed_forward_length"),
        (dict(tokenizer="t5"), "a tokenizer 't5'"),
        (dict(tokens=[chr(0x100 + i) for i in range(261)]), "tokenizer has 261 tokens.*260 rows"),
    ],
)
def test_files_that_are_not_understood_are_refused_by_name(tmp_path, change, match):
    path = written(tmp_path / "m.gguf", CONFIG, random_params(CONFIG), **change)
    with pytest.raises(ValueError, match=match):
        gguf.open_model(path)


def test_a_matrix_of_another_shape_is_refused(tmp_path):
    params = random_params(CONFIG)
    params["model"]["layers"]["mlp"]["up_proj"]["weight"] = np.ones((2, 95, 64), np.float32)
    path = written(tmp_path / "m.gguf", CONFIG, params)
    with pytest.raises(ValueError, match=r"layers.0.mlp.up_proj.weight.*\[95, 64\].*\[128, 64\]"):
        gguf.open_model(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.5, 0.99])
def test_a_file_that_is_cut_short_is_refused(tmp_path, share):
    path = written(tmp_path / "m.gguf", CONFIG, random_params(CONFIG))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match="downloaded whole"):
        gguf.open_model(path)
    path.write_bytes(b"NOPE" + whole[4:])
    with pytest.raises(ValueError, match="m.gguf"):
        gguf.open_model(path)


def test_paths_and_options_that_are_not_are_refused(tmp_path):
    with pytest.raises(jo.DiskError, match="there is no"):
        models.open_model(tmp_path / "nothing.gguf")
    with pytest.raises(jo.DiskError):
        gguf.open_model(tmp_path)
    path = written(tmp_path / "m.gguf", CONFIG, random_params(CONFIG))
    for options, match in (
        (dict(tier="moon"), "tier='moon'"),
        (dict(quantize="q2"), "quantize='q2'"),
        (dict(dtype="int8"), "dtype='int8'"),
    ):
        with pytest.raises(ValueError, match=match):
            models.open_model(path, **options)

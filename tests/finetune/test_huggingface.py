"""Folders out and in again, real weights among them, and folders with something wrong."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.finetune import families, huggingface, lora, model, models, quantize
from jaxoffload.finetune.rope import Rope
from tests.finetune import reference

CONFIG = model.Config(96, 64, 2, 4, 2, 128, max_length=128)
GEMMA = dataclasses.replace(
    CONFIG,
    num_layers=3,
    head_width=32,
    is_tied=True,
    has_qk_norm=True,
    has_sandwich_norms=True,
    norm_adds_one=True,
    embedding_scale=8.0,
    activation="gelu_tanh",
    query_scale=24**-0.5,
    window=4,
    sliding=(True, True, False),
    rope=Rope(1e6, "linear", 8.0),
    sliding_rope=Rope(1e4),
    family="gemma3_text",
)
ROPES = {
    "linear": Rope(5e5, "linear", 2.0),
    "dynamic": Rope(1e4, "dynamic", 4.0, 128),
    "llama3": Rope(5e5, "llama3", 8.0, 32, 1.0, 4.0),
    "yarn": Rope(1e4, "yarn", 4.0, 32, beta_fast=16.0, attention_factor=1.2, truncate=False),
    "yarn, as in the paper": Rope(1e4, "yarn", 4.0, 32),
    "yarn, DeepSeek": Rope(1e4, "yarn", 4.0, 32, mscale=1.0, mscale_all_dim=0.8),
}
CONFIGS = {
    "llama": CONFIG,
    "llama, biases": dataclasses.replace(
        CONFIG, has_qkv_bias=True, has_out_bias=True, has_mlp_bias=True, is_tied=True
    ),
    **{f"llama, {n}": dataclasses.replace(CONFIG, rope=r) for n, r in ROPES.items()},
    "mistral": dataclasses.replace(CONFIG, family="mistral", window=5),
    "mistral, no window": dataclasses.replace(CONFIG, family="mistral"),
    "qwen2": dataclasses.replace(CONFIG, family="qwen2", has_qkv_bias=True),
    "qwen2, late window": dataclasses.replace(
        CONFIG, family="qwen2", has_qkv_bias=True, window=4, sliding=(False, True)
    ),
    "qwen3": dataclasses.replace(CONFIG, family="qwen3", has_qk_norm=True, head_width=32),
    "gemma3": GEMMA,
}


def random_params(config, dtype="float32"):
    source = np.random.default_rng(0)

    def draw(path, shape):
        is_norm = "norm" in str(path) and not config.norm_adds_one
        scale = 0.3 if len(shape.shape) < 3 else shape.shape[-1] ** -0.5
        return (source.standard_normal(shape.shape) * scale + is_norm).astype(dtype)

    return jax.tree_util.tree_map_with_path(draw, model.init_shapes(config))


def rewrite(path, change):
    entry = json.loads(path.read_text())
    change(entry)
    path.write_text(json.dumps(entry))


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_comes_back_as_it_was_written(tmp_path, name):
    config = CONFIGS[name]
    params = random_params(config)
    huggingface.save_model(tmp_path / "m", config, params)
    opened = models.open_model(tmp_path / "m")
    assert opened.config == config and opened.tokenizer is None
    jax.tree.map(np.testing.assert_array_equal, opened.params, params)
    tokens = np.arange(40, dtype=np.int32)
    got = jax.jit(model.forward, static_argnums=0)(
        config, jax.tree.map(np.asarray, opened.params), tokens[None]
    )[0]
    want = reference.logits(config, params, tokens)
    np.testing.assert_allclose(got, want, atol=5e-6 * np.abs(want).max())


@pytest.fixture
def folder(tmp_path):
    """Several shards."""
    params = random_params(CONFIG)
    huggingface.save_model(tmp_path / "m", CONFIG, params, max_shard_bytes=100_000)
    return tmp_path / "m"


def test_shards_are_as_others_write_them(folder):
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    assert len(shards) >= 3 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert all((folder / name).stat().st_size < 110_000 for name in shards)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * CONFIG.num_params()
    assert set(index["weight_map"].values()) == set(shards)
    assert "model.layers.1.self_attn.q_proj.weight" in index["weight_map"]
    assert not list(folder.parent.glob(".unfinished*"))


def test_tiers_and_packing(folder):
    params, tokens = random_params(CONFIG), np.arange(9, dtype=np.int32)[None]
    host = models.open_model(folder)
    assert all(isinstance(x, jo.HostArray) for x in jax.tree.leaves(host.params))
    device = models.open_model(folder, tier="device", dtype="bfloat16")
    assert device.config.dtype == "bfloat16"
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(device.params))
    disk = models.open_model(folder, tier="disk")
    layers = disk.params["model"]["layers"]
    assert isinstance(layers, tuple) and len(layers) == 2
    assert all(x.tier == "disk" for x in jax.tree.leaves(disk.params))

    def prefill(params, tokens):
        return model.forward(CONFIG, params, tokens)

    want = jax.jit(prefill)(params, tokens)
    for opened in (host, disk):
        step = jo.offload(prefill, device_memory="300KiB", host_memory="2MiB", cut="always")
        np.testing.assert_allclose(step(opened.params, tokens), want, rtol=1e-4, atol=1e-5)
    for kind in quantize.MADE:
        packed = models.open_model(folder, quantize=kind).params["model"]
        matrix = packed["layers"]["mlp"]["up_proj"]["weight"]
        assert matrix.kind == kind and matrix.packed.tier == "host"
        assert packed["layers"]["input_layernorm"]["weight"].dtype == np.float32
        one = quantize.quantize(params["model"]["layers"]["mlp"]["up_proj"]["weight"], kind)
        np.testing.assert_array_equal(matrix.packed, one.packed)
        np.testing.assert_array_equal(matrix.scales, one.scales)


def test_packed_and_disk_weights_are_written_plain(folder, tmp_path):
    packed = models.open_model(folder, quantize="int8")
    huggingface.save_model(tmp_path / "p", packed.config, packed.params)
    again = models.open_model(tmp_path / "p").params["model"]["layers"]["mlp"]["up_proj"]
    own = packed.params["model"]["layers"]["mlp"]["up_proj"]["weight"]
    np.testing.assert_array_equal(again["weight"], own.dequantize())
    disk = models.open_model(folder, tier="disk")
    huggingface.save_model(tmp_path / "d", disk.config, disk.params)
    again = models.open_model(tmp_path / "d").params
    jax.tree.map(np.testing.assert_array_equal, again, models.open_model(folder).params)


def test_real_weights_in_two_shards_give_the_same_logits(tmp_path):
    pytest.importorskip("gguf", reason="pip install 'jaxoffload[finetune]'")
    pytest.importorskip("tokenizers", reason="pip install 'jaxoffload[finetune]'")
    try:
        first = models.open_model(models.smollm2(), dtype="bfloat16", quantize="none")
    except ImportError as error:
        pytest.skip(str(error))
    huggingface.save_model(
        tmp_path / "m", first.config, first.params, first.tokenizer, max_shard_bytes=150 * 10**6
    )
    assert len(list(tmp_path.glob("m/*.safetensors"))) == 2
    second = models.open_model(tmp_path / "m")
    assert second.config == first.config
    jax.tree.map(np.testing.assert_array_equal, second.params, first.params)
    messages = [{"role": "user", "content": "Say 12 words."}]
    text = first.tokenizer.apply_chat_template(messages, True)
    assert second.tokenizer.apply_chat_template(messages, True) == text
    ids = first.tokenizer.encode(text)
    assert second.tokenizer.encode(text) == ids and second.tokenizer.eos_id == 2
    run = jax.jit(model.forward, static_argnums=0)
    logits = [
        run(m.config, jax.tree.map(np.asarray, m.params), np.array([ids])) for m in (first, second)
    ]
    np.testing.assert_array_equal(*logits)


def cut(path, share):
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])


def shard(folder, i=1):
    return sorted(folder.glob("*.safetensors"))[i]


def index(folder):
    return folder / "model.safetensors.index.json"


def put(folder, name, array):
    """Puts a tensor into the first shard and the index."""
    from jaxoffload.finetune import safetensors

    path = shard(folder, 0)
    tensors = {n: np.asarray(a) for n, a in jo.open_safetensors(path).items()}
    safetensors.save(path, {**tensors, name: array})
    rewrite(index(folder), lambda e: e["weight_map"].update({name: path.name}))


DAMAGES = {
    "no config": (lambda f: (f / "config.json").unlink(), jo.DiskError, "config.json: No such"),
    "cut config": (lambda f: cut(f / "config.json", 0.5), ValueError, "config.json is not JSON"),
    "config is a list": (
        lambda f: (f / "config.json").write_text("[]"), ValueError, "holds a list"
    ),
    "cut shard": (lambda f: cut(shard(f), 0.9), ValueError, "model-00002.*downloaded whole"),
    "empty shard": (lambda f: cut(shard(f), 0), ValueError, "model-00002.*downloaded whole"),
    "no shard": (lambda f: shard(f).unlink(), jo.DiskError, "lacks model-00002"),
    "extra shard": (
        lambda f: shard(f).with_name("model-00009-of-00009.safetensors").write_bytes(b"x"),
        ValueError,
        "has model-00009.*does not name",
    ),
    "cut index": (lambda f: cut(index(f), 0.5), ValueError, "index.json is not JSON"),
    "no index": (lambda f: index(f).unlink(), jo.DiskError, "neither model.safetensors nor"),
    "index elsewhere": (
        lambda f: rewrite(index(f), lambda e: e["weight_map"].update(x="../x.safetensors")),
        ValueError,
        "outside of the folder",
    ),
    "index of more": (
        lambda f: rewrite(index(f), lambda e: e["weight_map"].update(x=shard(f).name)),
        ValueError,
        "lacks the tensor 'x'",
    ),
    "index of less": (
        lambda f: rewrite(index(f), lambda e: e["weight_map"].pop("model.norm.weight")),
        ValueError,
        "has the tensor 'model.norm.weight'",
    ),
    "more layers": (
        lambda f: rewrite(f / "config.json", lambda e: e.update(num_hidden_layers=3)),
        ValueError,
        "no tensor 'model.layers.2.self_attn.q_proj.weight' and 8 more",
    ),
    "fewer layers": (
        lambda f: rewrite(f / "config.json", lambda e: e.update(num_hidden_layers=1)),
        ValueError,
        "has a tensor 'model.layers.1.*does not know",
    ),
    "other width": (
        lambda f: rewrite(f / "config.json", lambda e: e.update(intermediate_size=127)),
        ValueError,
        r"gate_proj.weight in .*\[128, 64\].*\[127, 64\]",
    ),
    "unknown tensor": (
        lambda f: put(f, "model.layers.0.moe.weight", np.ones(3, np.float32)),
        ValueError,
        "a tensor 'model.layers.0.moe.weight'",
    ),
    "integers": (
        lambda f: put(f, "model.norm.weight", np.ones(64, np.int8)),
        ValueError,
        "has the tensor|no floating dtype",
    ),
    "unknown family": (
        lambda f: rewrite(f / "config.json", lambda e: e.update(model_type="mamba")),
        ValueError,
        "config.json: model_type 'mamba' is not known; known are llama, mistral",
    ),
    "unknown class": (
        lambda f: rewrite(f / "config.json", lambda e: e.update(architectures=["LlamaForX"])),
        ValueError,
        "LlamaForX",
    ),
    "unknown rope": (
        lambda f: rewrite(f / "config.json", lambda e: e.update(rope_scaling={"type": "su"})),
        ValueError,
        "rope: type 'su' is not known",
    ),
    "unknown activation": (
        lambda f: rewrite(f / "config.json", lambda e: e.update(hidden_act="relu")),
        ValueError,
        "activation 'relu'",
    ),
    "quantized": (
        lambda f: rewrite(f / "config.json", lambda e: e.update(quantization_config={"b": 4})),
        ValueError,
        "quantization_config asks for",
    ),
    "no width": (
        lambda f: rewrite(f / "config.json", lambda e: e.pop("hidden_size")),
        ValueError,
        "hidden_size is None",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_folders_are_refused_by_name(folder, name):
    damage, kind, match = DAMAGES[name]
    damage(folder)
    with pytest.raises(kind, match=match):
        models.open_model(folder)


def test_what_a_folder_holds_beside_is_passed_over(folder):
    put(folder, "model.layers.0.self_attn.rotary_emb.inv_freq", np.ones(8, np.float32))
    (folder / "adapter_model.safetensors").write_bytes(b"not ours")
    rewrite(folder / "config.json", lambda e: e.update(use_cache=True, pretraining_tp=1))
    assert models.open_model(folder).config == CONFIG


def test_a_tokenizer_with_too_many_tokens_is_refused(folder):
    library = pytest.importorskip("tokenizers", reason="pip install 'jaxoffload[finetune]'")
    vocabulary = {chr(0x100 + i): i for i in range(97)}
    backend = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=[]))
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="tokenizer has 97 tokens.*96 rows"):
        models.open_model(folder)
    cut(folder / "tokenizer.json", 0.5)
    with pytest.raises(ValueError, match="tokenizer.json cannot be read"):
        models.open_model(folder)


def test_weights_that_do_not_belong_to_the_config_are_not_written(tmp_path):
    params = random_params(CONFIG)
    other = dataclasses.replace(CONFIG, ffn_width=96)
    with pytest.raises(ValueError, match=r"gate_proj.weight of all layers is \[2, 128, 64\]"):
        huggingface.save_model(tmp_path / "m", other, params)
    with pytest.raises(ValueError, match="has no 'lm_head.weight'"):
        less = {"model": params["model"]}
        huggingface.save_model(tmp_path / "m", CONFIG, less)
    with pytest.raises(ValueError, match="llama model cannot have has_qk_norm=True"):
        odd = dataclasses.replace(CONFIG, has_qk_norm=True)
        huggingface.save_model(tmp_path / "m", odd, random_params(odd))
    adapters = lora.LoraConfig(rank=2, target_modules=("q_proj",))
    attached = lora.attach(params, lora.init(params, adapters, jax.random.key(0)), adapters)
    with pytest.raises(ValueError, match="q_proj.weight has an adapter"):
        huggingface.save_model(tmp_path / "m", CONFIG, attached)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(ValueError, match="has something in it"):
        huggingface.save_model(tmp_path / "full", CONFIG, params)
    with pytest.raises(jo.DiskError):
        huggingface.save_model(tmp_path / "full" / "x" / "m", CONFIG, params)
    assert [p.name for p in tmp_path.iterdir()] == ["full"]


def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(path, value):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface, "write_json", full)
    with pytest.raises(jo.DiskError, match="No space left"):
        huggingface.save_model(tmp_path / "m", CONFIG, random_params(CONFIG))
    assert not list(tmp_path.iterdir())


def test_both_spellings_of_ropes_are_read():
    plain = families.to_huggingface(CONFIG)
    for change, want in (
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, Rope(1e4, "linear", 2.0)),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
            Rope(5e5, "linear", 2.0),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 32}},
            Rope(1e4, "yarn", 4.0, 32),
        ),
    ):
        assert families.from_huggingface(plain | change).rope == want
    for change, match in (
        ({"type": "linear"}, "'linear' has no factor"),
        ({"type": "linear", "factor": 2.0, "strange": 1}, "not known: strange"),
        ({"type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ):
        with pytest.raises(ValueError, match=match):
            families.from_huggingface(plain | {"rope_scaling": change})
    gemma = families.to_huggingface(GEMMA) | {"rope_scaling": None}
    gemma["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert families.from_huggingface(gemma) == GEMMA


@pytest.mark.parametrize("name", ["llama, yarn", "qwen2, late window", "gemma3"])
def test_values_that_a_key_cannot_have_are_refused(name):
    entry = families.to_huggingface(CONFIGS[name]) | {"sliding_window_pattern": 6}
    taken = []
    for key in entry:
        for wrong in (-1, "x", [1], {"a": 1}, float("nan")):
            try:
                families.from_huggingface({**entry, key: wrong})
                taken.append(key)
            except ValueError as error:
                assert str(error)
    unread = {"torch_dtype", "hidden_act", "hidden_activation", "rope_scaling"}
    assert set(taken) <= unread
    for key in ("num_key_value_heads", "hidden_size", "vocab_size"):
        with pytest.raises(ValueError, match=f"{key} is 0; it must be a whole number above 0"):
            families.from_huggingface({**entry, key: 0})

"""Adapters in PEFT's files: the very names and shapes that PEFT documents, and what is refused."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.finetune import lora, peft, safetensors

CONFIG = lora.LoraConfig(3, 6.0, True, 0.1, ("q_proj", "mlp.up_proj"))


def shapes(num_layers=3, width=4, ffn=6):
    def matrix(*shape):
        return {"weight": jax.ShapeDtypeStruct((num_layers, *shape), np.float32)}

    layers = {
        "self_attn": {"q_proj": matrix(width, width), "k_proj": matrix(2, width)},
        "mlp": {"up_proj": matrix(ffn, width)},
        "input_layernorm": matrix(width),
    }
    return {"model": {"layers": layers}}


def in_a_tuple(params):
    rows = tuple(
        jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params["model"]["layers"]
        )
        for _ in range(3)
    )
    return {"model": {"layers": rows}}


def adapters_of(params, config=CONFIG):
    made = lora.init(params, config, jax.random.key(0))
    return jax.tree.map(lambda x: x + 0.5, made)


@pytest.fixture
def saved(tmp_path):
    peft.save_adapters(tmp_path, adapters_of(shapes()), CONFIG, "org/base")
    return tmp_path


def rewrite(folder, change=None, **settings):
    """Changes a saved adapter: its settings, or its tensors by a function of the dict."""
    config = json.loads((folder / peft.CONFIG).read_text())
    (folder / peft.CONFIG).write_text(json.dumps({**config, **settings}))
    if change is not None:
        tensors = {k: np.asarray(v) for k, v in jo.open_safetensors(folder / peft.WEIGHTS).items()}
        change(tensors)
        safetensors.save(folder / peft.WEIGHTS, tensors)


def test_files_have_the_names_shapes_and_settings_of_peft(saved):
    tensors = jo.open_safetensors(saved / peft.WEIGHTS)
    start = "base_model.model.model.layers."
    want = {f"{start}{i}.self_attn.q_proj.lora_{x}.weight" for i in range(3) for x in "AB"}
    want |= {f"{start}{i}.mlp.up_proj.lora_{x}.weight" for i in range(3) for x in "AB"}
    assert set(tensors) == want and set(os.listdir(saved)) == {peft.CONFIG, peft.WEIGHTS}
    assert tensors[f"{start}1.mlp.up_proj.lora_A.weight"].shape == (3, 4)
    assert tensors[f"{start}1.mlp.up_proj.lora_B.weight"].shape == (6, 3)
    np.testing.assert_array_equal(
        np.asarray(tensors[f"{start}2.self_attn.q_proj.lora_A.weight"]),
        adapters_of(shapes())["model.layers.self_attn.q_proj"]["lora_A"][2],
    )
    settings = json.loads((saved / peft.CONFIG).read_text())
    for name, value in {
        "peft_type": "LORA", "r": 3, "lora_alpha": 6, "lora_dropout": 0.1, "use_rslora": True,
        "target_modules": ["mlp.up_proj", "q_proj"], "base_model_name_or_path": "org/base",
        "bias": "none", "use_dora": False, "fan_in_fan_out": False,
    }.items():  # fmt: skip
        assert settings[name] == value, name


def test_saved_adapters_come_back_in_either_layout(saved):
    for params in (shapes(), in_a_tuple(shapes())):
        loaded, config = peft.load_adapters(saved, params)
        assert config == lora.LoraConfig(3, 6.0, True, 0.1, ("mlp.up_proj", "q_proj"))
        want = adapters_of(params)
        assert loaded.keys() == want.keys()
        jax.tree.map(np.testing.assert_array_equal, loaded, want)


def test_a_tuple_of_layers_saves_the_same_file(saved, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    peft.save_adapters(other, adapters_of(in_a_tuple(shapes())), CONFIG, "org/base")
    for name in (peft.CONFIG, peft.WEIGHTS):
        assert (saved / name).read_bytes() == (other / name).read_bytes()


def test_a_regular_expression_is_written_as_the_modules_that_it_named(tmp_path):
    config = lora.LoraConfig(2, target_modules=r"model\.layers\.mlp\..*")
    peft.save_adapters(tmp_path, adapters_of(shapes(), config), config)
    settings = json.loads((tmp_path / peft.CONFIG).read_text())
    assert settings["target_modules"] == [f"model.layers.{i}.mlp.up_proj" for i in range(3)]
    _, loaded = peft.load_adapters(tmp_path, shapes())
    assert loaded.target_modules == ("model.layers.mlp.up_proj",)
    rewrite(tmp_path, target_modules="all-linear")
    assert peft.load_adapters(tmp_path, shapes())[0].keys() == {"model.layers.mlp.up_proj"}


def test_half_precision_files_of_others_are_read_as_float32(saved):
    def halve(tensors):
        tensors.update({k: jnp.asarray(v, jnp.bfloat16) for k, v in tensors.items()})

    rewrite(saved, halve, unknown_setting_of_a_later_peft=3)
    loaded, _ = peft.load_adapters(saved, shapes())
    assert {x.dtype for x in jax.tree.leaves(loaded)} == {np.dtype(np.float32)}
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16).astype(np.float32)),
        loaded,
        adapters_of(shapes()),
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"rank_pattern": {"q_proj": 4}},
        {"alpha_pattern": {"q_proj": 4}},
        {"layers_to_transform": [0]},
        {"bias": "lora_only"},
        {"modules_to_save": ["lm_head"]},
        {"peft_type": "IA3"},
        {"init_lora_weights": "pissa"},
        {"target_parameters": ["experts"]},
    ],
    ids=lambda s: next(iter(s)),
)
def test_what_is_not_done_is_refused_by_name(saved, settings):
    rewrite(saved, **settings)
    with pytest.raises(ValueError, match=f"{next(iter(settings))}=.*not supported"):
        peft.load_adapters(saved, shapes())


def key(i, name):
    return f"base_model.model.model.layers.{i}.{name}.weight"


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop(key(1, "mlp.up_proj.lora_B")), r"no tensor .*layers\.1\.mlp\.up_proj\.lo"),
        (
            lambda t: [t.pop(k) for k in list(t) if "up_proj" in k],
            r"no tensor .*layers\.0\.mlp\.up_proj\.lora_A",
        ),
        (lambda t: t.update({key(3, "mlp.up_proj.lora_B"): np.ones(3)}), "no layer of the model"),
        (
            lambda t: t.update({key(0, "mlp.down_proj.lora_A"): np.ones(3)}),
            "'model.layers.mlp.down_proj', which the model does not have",
        ),
        (lambda t: t.update({key(0, "x.lora_magnitude_vector"): np.ones(3)}), "not supported"),
        (
            lambda t: t.update({key(2, "self_attn.q_proj.lora_A"): np.ones((3, 5))}),
            r"layers\.2\.self_attn\.q_proj\.lora_A.weight' is \[3, 5\], must be \[3, 4\]",
        ),
    ],
    ids=["a tensor missing", "a target missing", "a layer too many", "unknown matrix", "dora",
         "wrong shape"],
)  # fmt: skip
def test_tensors_of_another_model_are_refused_by_name(saved, change, words):
    rewrite(saved, change)
    with pytest.raises(ValueError, match=words):
        peft.load_adapters(saved, shapes())


def test_a_wrong_rank_or_broken_settings_are_refused(saved):
    rewrite(saved, r=5)
    with pytest.raises(ValueError, match=r"is \[3, 4\], must be \[5, 4\] for r=5"):
        peft.load_adapters(saved, shapes())
    rewrite(saved, r=-1)
    with pytest.raises(ValueError, match="adapter_config.json: LoraConfig: rank=-1"):
        peft.load_adapters(saved, shapes())
    (saved / peft.CONFIG).write_text("{")
    with pytest.raises(ValueError, match="adapter_config.json is not JSON"):
        peft.load_adapters(saved, shapes())
    (saved / peft.CONFIG).unlink()
    with pytest.raises(jo.DiskError, match="adapter_config.json: No such file"):
        peft.load_adapters(saved, shapes())


def test_a_pickle_is_not_opened(saved):
    (saved / peft.WEIGHTS).rename(saved / "adapter_model.bin")
    with pytest.raises(ValueError, match="adapter_model.bin, a pickle"):
        peft.load_adapters(saved, shapes())


def test_stacks_that_are_no_layers_cannot_be_saved(tmp_path):
    config = lora.LoraConfig(2, target_modules=("experts",))
    made = lora.init({"experts": jnp.ones((3, 4, 4))}, config, jax.random.key(0))
    with pytest.raises(ValueError, match=r"lora_A of experts is \[3, 2, 4\]"):
        peft.save_adapters(tmp_path / "new", made, config)
    assert not (tmp_path / "new").exists()

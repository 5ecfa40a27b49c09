"""Logits of every family and rope against transformers, where it is installed beside torch.

Small random checkpoints, written by us and opened by both. Judged by the float64 reference: ours
may be twice as far off as theirs.
"""

import dataclasses

import jax
import numpy as np
import pytest

from jaxoffload.finetune import huggingface, model, models
from jaxoffload.finetune.rope import Rope
from tests.finetune import reference
from tests.finetune.test_huggingface import CONFIG, CONFIGS, GEMMA, random_params

pytestmark = pytest.mark.filterwarnings("ignore")

ALL = {
    **CONFIGS,
    "gemma3, yarn": dataclasses.replace(GEMMA, rope=Rope(1e6, "yarn", 8.0, 32)),
    "qwen3, yarn": dataclasses.replace(CONFIGS["qwen3"], rope=Rope(1e6, "yarn", 4.0, 32)),
    "llama, dynamic, short": dataclasses.replace(
        CONFIG, rope=Rope(1e4, "dynamic", 4.0, 512), max_length=512
    ),
}
LENGTH = 150
"""Tokens: more than any of the ropes was made for."""


@pytest.fixture(scope="module")
def transformers():
    reason = "pip install transformers torch, to compare logits with theirs"
    torch = pytest.importorskip("torch", reason=reason)
    torch.set_num_threads(1)
    return pytest.importorskip("transformers", reason=reason)


@pytest.mark.parametrize("name", ALL)
def test_logits_are_as_near_to_float64_as_those_of_transformers(
    tmp_path, transformers, record_property, name
):
    import torch

    config = ALL[name]
    params = random_params(config)
    huggingface.save_model(tmp_path / "m", config, params)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, LENGTH).astype(np.int32)
    other = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        theirs = other(torch.tensor(tokens[None].astype(np.int64))).logits[0].numpy()
    opened = models.open_model(tmp_path / "m", tier="device")
    ours = jax.jit(model.forward, static_argnums=0)(opened.config, opened.params, tokens[None])[0]
    want = reference.logits(config, params, tokens)
    errors = [float(np.abs(x - want).max() / np.abs(want).max()) for x in (ours, theirs)]
    record_property("errors", errors)
    print(f"{name}: {errors[0]:.2e} ours, {errors[1]:.2e} theirs")
    assert errors[1] < 1e-4, "transformers computes something else"
    assert errors[0] <= 2 * errors[1]

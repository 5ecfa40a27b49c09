"""Logits of every family and rope against those of transformers, which a file keeps.

Small random checkpoints, written by us and opened by both. Judged by the float64 reference: ours
may be twice as far off as theirs.
"""

import json

import jax
import numpy as np
import pytest

from jaxoffload.finetune import huggingface, model, models
from tests.finetune import reference
from tests.finetune.test_huggingface import random_params
from tests.finetune.transformers_logits import ALL, COLUMNS, KEPT, ROWS, error, tokens_of


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", ALL)
def test_logits_are_as_near_to_float64_as_those_of_transformers(tmp_path, name):
    config, theirs = ALL[name], json.loads(KEPT.read_text())["families"][name]
    params, tokens = random_params(config), tokens_of(config)
    want = reference.logits(config, params, tokens)
    kept = want[ROWS][:, COLUMNS]
    assert np.abs(theirs["logits"] - kept).max() < 1e-5 * np.abs(want).max(), "not the same model"
    huggingface.save_model(tmp_path / "m", config, params)
    opened = models.open_model(tmp_path / "m", tier="device")
    ours = jax.jit(model.forward, static_argnums=0)(opened.config, opened.params, tokens[None])[0]
    assert error(ours, want) <= 2 * theirs["error"]

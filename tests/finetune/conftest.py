"""The tiny model that is trained, and its adapters, for every file about training."""

import jax
import pytest

from jaxoffload.finetune import lora, model
from tests.finetune.training import CONFIG, LORA


@pytest.fixture(scope="module")
def params():
    return model.init(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def adapters(params):
    return lora.init(params, LORA, jax.random.key(1))

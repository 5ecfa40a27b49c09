"""Logits of transformers for small random checkpoints of every family and rope, kept in a file.

`python -m tests.finetune.transformers_logits` writes the file anew, where transformers and torch
are installed; the tests need neither.
"""

import dataclasses
import json
import pathlib
import tempfile

import numpy as np

from jaxoffload.finetune import huggingface
from jaxoffload.finetune.rope import Rope
from tests.finetune import reference
from tests.finetune.test_huggingface import CONFIG, CONFIGS, GEMMA, random_params

KEPT = pathlib.Path(__file__).with_suffix(".json")
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
ROWS, COLUMNS = [0, 60, 149], [3, 17, 31, 45, 59, 73, 87, 95]
"""Of the logits, those that are kept."""


def tokens_of(config):
    return np.random.default_rng(1).integers(0, config.vocab_size, LENGTH).astype(np.int32)


def error(logits, want):
    """Largest, over the largest logit."""
    return float(np.abs(logits - want).max() / np.abs(want).max())


def theirs(folder, tokens):
    """(tokens, vocabulary) in float32, by transformers."""
    import torch
    import transformers

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor(tokens[None].astype(np.int64))).logits[0].numpy()


def write():
    """Asks transformers, and judges it by float64."""
    import torch
    import transformers

    found = {"transformers": transformers.__version__, "torch": torch.__version__, "families": {}}
    for name, config in ALL.items():
        params, tokens = random_params(config), tokens_of(config)
        with tempfile.TemporaryDirectory() as folder:
            huggingface.save_model(folder + "/m", config, params)
            logits = theirs(folder + "/m", tokens)
        found["families"][name] = {
            "error": error(logits, reference.logits(config, params, tokens)),
            "logits": [[float(f"{x:.7g}") for x in row] for row in logits[ROWS][:, COLUMNS]],
        }
        print(name, found["families"][name]["error"])
    KEPT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    write()

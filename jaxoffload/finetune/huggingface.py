"""Hugging Face folders: not opened yet."""

import os
from typing import Any

from jaxoffload.finetune.weights import Model


def open_model(
    folder: str | os.PathLike[str], *, dtype: Any = None, tier: str = "host",
    quantize: str | None = None,
) -> Model:  # fmt: skip
    """Raises NotImplementedError."""
    raise NotImplementedError(f"{folder}: folders cannot be opened yet; open a GGUF file.")

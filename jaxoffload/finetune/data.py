"""Text that every Python installation has, as batches of tokens."""

import pathlib
import sysconfig
from collections.abc import Iterator

import numpy as np


def standard_library_text(limit: int) -> bytes:
    """Sources of the running Python's standard library, at most `limit` bytes.

    Files come in the order of their names, so that equal Pythons give equal text.

    Raises:
      FileNotFoundError: the sources are not installed.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    parts, total = [], 0
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py")):
        if "test" in path.parts[-2] or "site-packages" in path.parts:
            continue
        text = path.read_bytes()
        parts.append(text[: limit - total])
        total += len(parts[-1])
        if total >= limit:
            break
    if not parts:
        raise FileNotFoundError(
            f"the standard library's sources are not in {folder}. Install Python with its sources."
        )
    return b"".join(parts)


def split(tokens: np.ndarray, held_out: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    """Tokens to train on, and the last share of them to judge by."""
    cut = int(len(tokens) * (1 - held_out))
    return tokens[:cut], tokens[cut:]


def batches(tokens: np.ndarray, batch: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """Endless (batch, length + 1) windows of tokens, in a seeded random order.

    Raises:
      ValueError: fewer tokens than one window.
    """
    if len(tokens) <= length + 1:
        raise ValueError(
            f"batches: {len(tokens)} tokens are fewer than one window of {length + 1}. "
            "Pass more text or a shorter length."
        )
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(tokens) - length - 1, batch)
        yield np.stack([tokens[s : s + length + 1] for s in starts]).astype(np.int32)

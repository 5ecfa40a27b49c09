"""Rotary position embeddings and the ways to stretch them over longer texts.

Each pair of a head's elements (i, i + D/2) turns by position · rate_i. What kinds differ in is the
rates, and for "yarn" the length of the rotated vector too. Rates are made in float64, angles in
float32 as the models were trained.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclasses.dataclass(frozen=True, slots=True)
class Rope:
    """How positions turn vectors.

    Attributes:
      theta: base of the geometric sequence of rates.
      kind: one of `KINDS`.
      factor: by how much the text may be longer than `original_length`.
      original_length: tokens of the texts that the model was first trained on ("dynamic", "llama3",
        "yarn").
      low_freq_factor, high_freq_factor: "llama3": rates of fewer turns than the one over the
        original length are divided, of more than the other are kept.
      beta_fast, beta_slow: "yarn": the same, the other way round.
      attention_factor: "yarn": what rotated vectors are multiplied by; None: from the factor.
      mscale, mscale_all_dim: "yarn": DeepSeek's way to say it; 0 where not given.
      truncate: "yarn": whether the range between the betas is widened to whole elements.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"rope: type {self.kind!r} is not known. Known are {', '.join(KINDS)}."
            )
        if not self.theta > 1 or not self.factor > 0:
            raise ValueError(
                f"rope: theta={self.theta} must be above 1 and factor={self.factor} above 0."
            )
        if self.kind in ("dynamic", "llama3", "yarn") and self.original_length < 1:
            raise ValueError(
                f"rope: type {self.kind!r} needs original_max_position_embeddings, or the model's "
                f"max_position_embeddings; it has {self.original_length}."
            )
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"rope: high_freq_factor={self.high_freq_factor} must be above "
                f"low_freq_factor={self.low_freq_factor}."
            )


def rates(rope: Rope, half: int) -> np.ndarray:
    """Radians a token of each of `half` pairs, float64; "dynamic": up to the original length."""
    plain = rope.theta ** (-np.arange(half) / half)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_length * plain / (2 * np.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return plain * (kept + (1 - kept) / rope.factor)
    if rope.kind == "yarn":
        first, last = _yarn_range(rope, half)
        divided = np.clip((np.arange(half) - first) / max(last - first, 0.001), 0.0, 1.0)
        return plain * (1 - divided + divided / rope.factor)
    return plain


def _yarn_range(rope: Rope, half: int) -> tuple[float, float]:
    """The pairs between which rates go from kept to divided."""

    def pair_of(turns: float) -> float:
        length = math.log(rope.original_length / (turns * 2 * math.pi))
        return half * length / math.log(rope.theta)

    first, last = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    return max(first, 0), min(last, 2 * half - 1)


def length_factor(rope: Rope) -> float:
    """What the rotated vectors are multiplied by."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def tables(rope: Rope, positions: jax.Array, half: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines.

    Args:
      positions: (B, T) int32; of "dynamic" the largest decides how far the rates are stretched.
      half: pairs of a head.

    Returns:
      Two of shape (B, T, half), float32.
    """
    own = jnp.asarray(rates(rope, half), jnp.float32)
    if rope.kind == "dynamic":
        beyond = jnp.maximum(jnp.max(positions) + 1, rope.original_length).astype(jnp.float32)
        ratio = rope.factor * beyond / rope.original_length - (rope.factor - 1)
        # theta · ratio^(D/(D-2)) in the place of theta.
        powers = -jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1)
        own = own * jnp.broadcast_to(ratio, (half,)) ** powers
    shape = (*positions.shape, half)
    wide = jax.lax.broadcast_in_dim(positions.astype(jnp.float32), shape, (0, 1))
    angles = wide * jax.lax.broadcast_in_dim(own, shape, (2,))
    factor = length_factor(rope)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the heads' vectors: x (B, T, ..., D), cos and sin (B or 1, T, D/2)."""
    first, second = jnp.split(x, 2, axis=-1)
    batch, length, half = cos.shape
    between = (1,) * (x.ndim - 3)
    cos, sin = (
        jnp.broadcast_to(t.reshape(batch, length, *between, half), first.shape).astype(x.dtype)
        for t in (cos, sin)
    )
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


_NUMBERS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_length",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}
"""Hugging Face's names of the parameters, and ours."""


def from_huggingface(entry: Mapping[str, Any] | None, theta: float, max_length: int) -> Rope:
    """A `rope_scaling` or `rope_parameters` of a config.json.

    Args:
      entry: either spelling, with "rope_type" or "type"; None for none.
      theta: the config's `rope_theta`, where the entry has none of its own.
      max_length: the config's `max_position_embeddings`.

    Raises:
      ValueError: a type or a parameter that is not known, by name.
    """
    entry = dict(entry or {})
    kind = entry.pop("rope_type", None) or entry.pop("type", None) or "default"
    entry.pop("type", None)
    theta = float(entry.pop("rope_theta", None) or theta)
    if entry.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("rope: partial_rotary_factor below 1 is not supported.")
    given = {name: value for name, value in entry.items() if value is not None}
    unknown = sorted(given.keys() - _NUMBERS.keys())
    if kind in KINDS and unknown:
        raise ValueError(
            f"rope: type {kind!r} has parameters that are not known: {', '.join(unknown)}."
        )
    values = {_NUMBERS[name]: value for name, value in given.items() if name in _NUMBERS}
    if kind not in ("default", "linear"):
        values.setdefault("original_length", max_length)
    if kind == "dynamic":  # as transformers does it, whatever else is said
        values["original_length"] = max_length
    if kind == "yarn" and values.get("original_length"):  # as DeepSeek's configs leave it out
        values.setdefault("factor", max_length / values["original_length"])
    if kind in KINDS[1:] and "factor" not in values:
        raise ValueError(f"rope: type {kind!r} has no factor.")
    return Rope(theta=theta, kind=kind, **values)


_WRITTEN = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"
    ),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
}  # fmt: skip
"""What is always written of a kind: readers ask for some of it. Other parameters where they are
set."""


def to_huggingface(rope: Rope) -> dict[str, Any] | None:
    """The `rope_scaling` that `from_huggingface` reads as this rope; None for the default."""
    if rope.kind == "default":
        return None
    found: dict[str, Any] = {"rope_type": rope.kind}
    plain = Rope()
    for theirs, ours in _NUMBERS.items():
        value = getattr(rope, ours)
        is_set = value != getattr(plain, ours) and theirs != "original_max_position_embeddings"
        if is_set or theirs in _WRITTEN[rope.kind]:
            found[theirs] = value
    return found

"""What a GGUF file's metadata says of the model: its `Config`, and what its tensors are called.

One table of architectures; what is not known is refused by name, never guessed.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxoffload.finetune.model import Config
from jaxoffload.finetune.rope import Rope, rates

Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Architecture:
    """A `general.architecture`.

    Attributes:
      family: Hugging Face's name of it.
      fixed: fields of `Config` that all its models have.
      modules: its names of a layer's modules, where they are not as in `_MODULES`.
    """

    family: str
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama"),  # Mistral, too
    "qwen2": Architecture("qwen2", {"has_qkv_bias": True}),
    "qwen3": Architecture("qwen3", {"has_qk_norm": True}),
    "gemma3": Architecture(
        "gemma3_text",
        {
            "has_qk_norm": True,
            "has_sandwich_norms": True,
            "norm_adds_one": True,
            "activation": "gelu_tanh",
        },
        {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
}

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BIASES = {
    "has_qkv_bias": "blk.0.attn_q.bias",
    "has_out_bias": "blk.0.attn_output.bias",
    "has_mlp_bias": "blk.0.ffn_gate.bias",
}
_GEMMA_27B = 62
"""Layers of the one Gemma 3 whose scores are scaled otherwise, which files do not say."""


def name_of(architecture: str, name: str) -> str:
    """Hugging Face's name of a tensor; its own where it is not known."""
    if name in _OUTER:
        return _OUTER[name]
    known = {**_MODULES, **ARCHITECTURES[architecture].modules}
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in known:
        return f"model.layers.{parts[1]}.{known[parts[2]]}.{parts[3]}"
    return name


def architecture_of(where: str, fields: Fields) -> str:
    """The `general.architecture`.

    Raises:
      ValueError: it is not known, by name.
    """
    kind = fields.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{where} has the architecture {kind!r}; known are {', '.join(ARCHITECTURES)}. Open "
            "the model's Hugging Face folder instead."
        )
    return kind


def config_of(
    where: str,
    fields: Fields,
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: np.ndarray | None,
) -> Config:
    """The shape of the model, all but its dtype.

    Args:
      where: the file, for messages.
      shapes: of its tensors, as it stores them: the innermost axis first.
      rope_factors: (D/2,) what the rates of the rope are divided by, where the file has them.

    Raises:
      ValueError: a number is missing, or asks for what is not supported; by name.
    """
    kind = architecture_of(where, fields)
    known = ARCHITECTURES[kind]

    def value(name: str, default: Any = None) -> Any:
        found = fields.get(f"{kind}.{name}", default)
        if not isinstance(found, int | float) or not 0 < found < math.inf:
            raise ValueError(
                f"{where} does not say {kind}.{name}, a number above 0, but {found!r}. "
                "Check that it was downloaded whole."
            )
        return found

    width, heads = value("embedding_length"), value("attention.head_count")
    head_width = value("attention.key_length", width // heads)
    if fields.get(f"{kind}.rope.dimension_count", head_width) != head_width:
        raise ValueError(f"{where} rotates a part of each head, which is not supported.")
    if fields.get(f"{kind}.final_logit_softcapping"):
        raise ValueError(f"{where} has soft-capped logits, which are not supported.")
    count, length = value("block_count"), value("context_length", 2048)
    more: dict[str, Any] = {ours: name in shapes for ours, name in _BIASES.items()}
    more |= known.fixed
    if known.family == "gemma3_text":
        score_width = width // heads if count == _GEMMA_27B else head_width
        more |= {
            "embedding_scale": width**0.5,
            "query_scale": score_width**-0.5,
            "window": fields.get(f"{kind}.attention.sliding_window") or None,
            "sliding": _sliding(where, kind, fields, count),
            "sliding_rope": Rope(value("rope.freq_base_swa", 10_000.0)),
        }
    return Config(
        vocab_size=shapes.get("token_embd.weight", (0, 0))[1],
        width=width,
        num_layers=count,
        num_heads=heads,
        num_kv_heads=value("attention.head_count_kv", heads),
        ffn_width=value("feed_forward_length"),
        rope=_rope(where, kind, fields, length, head_width // 2, rope_factors),
        norm_eps=round(value("attention.layer_norm_rms_epsilon"), 12),  # was a float32
        head_width=head_width,
        max_length=length,
        is_tied="output.weight" not in shapes,
        family=known.family,
        **more,
    )


def _sliding(where: str, kind: str, fields: Fields, count: int) -> tuple[bool, ...]:
    """Which layers slide: all but each sixth, or as the file says, by a period or one by one."""
    name = f"{kind}.attention.sliding_window_pattern"
    pattern = fields.get(name, 6)
    if isinstance(pattern, int) and pattern >= 0:  # 0: all of them
        return tuple(pattern == 0 or bool((i + 1) % pattern) for i in range(count))
    if isinstance(pattern, list) and len(pattern) == count:
        return tuple(map(bool, pattern))
    raise ValueError(
        f"{where} says {name} = {pattern!r}; it must be a period, or a list of {count} switches. "
        "Check that it was downloaded whole."
    )


def _rope(
    where: str, kind: str, fields: Fields, length: int, half: int, factors: np.ndarray | None
) -> Rope:
    def value(name: str, default: Any) -> Any:
        return fields.get(f"{kind}.rope.{name}", default)

    theta, scaling = value("freq_base", 10_000.0), value("scaling.type", "linear")
    factor = value("scaling.factor", value("scale_linear", 0.0)) or 1.0
    if scaling not in ("none", "linear", "yarn"):
        raise ValueError(
            f"{where} has the rope scaling {scaling!r}; known are none, linear and yarn."
        )
    plain = {
        "attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0,
        "yarn_log_multiplier": 0.0,
    }  # fmt: skip
    for name, default in plain.items():
        if value(f"scaling.{name}", default) != default:
            raise ValueError(
                f"{where} says {kind}.rope.scaling.{name} = {value(f'scaling.{name}', None)}; "
                f"only {default} is supported. Open the model's Hugging Face folder instead."
            )
    if scaling == "yarn":
        found = Rope(
            theta, "yarn", factor, int(value("scaling.original_context_length", 0) or length),
            beta_fast=value("scaling.yarn_beta_fast", 32.0),
            beta_slow=value("scaling.yarn_beta_slow", 1.0),
        )  # fmt: skip
    else:
        is_plain = scaling == "none" or factor == 1.0
        found = Rope(theta) if is_plain else Rope(theta, "linear", factor)
    if factors is None:
        return found
    if found.kind != "default":
        raise ValueError(
            f"{where} has both rope_freqs.weight and the rope scaling {scaling!r}, which are not "
            "supported together. Open the model's Hugging Face folder instead."
        )
    if factors.shape != (half,):
        raise ValueError(
            f"{where} has a rope_freqs.weight of shape {list(factors.shape)}; its heads ask for "
            f"[{half}]. Check that it was downloaded whole."
        )
    return _llama3(where, theta, np.asarray(factors, np.float64))


def _llama3(where: str, theta: float, factors: np.ndarray) -> Rope:
    """Llama 3's rope, of which files have the result only: what each rate is divided by.

    Llama 3's two thresholds are 1 and 4 turns; the original length follows from any factor between
    the smallest and the largest, and where there is none it is taken to be a power of 2.
    """
    factor = float(factors.max())
    if np.allclose(factors, 1.0, rtol=1e-6):
        return Rope(theta)
    plain = rates(Rope(theta), len(factors))
    between = (factors > 1.0001) & (factors < factor * 0.9999)
    lengths = [2**k for k in range(6, 21)]
    if between.any():
        kept = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        lengths = [round(float(np.median((1 + 3 * kept) * 2 * np.pi / plain[between])))]
    for length in lengths:
        found = Rope(theta, "llama3", factor, length, 1.0, 4.0)
        if np.allclose(plain / rates(found, len(factors)), factors, rtol=1e-4):
            return found
    raise ValueError(
        f"{where} has a rope_freqs.weight that is not made as Llama 3's, of {len(factors)} factors "
        f"from {factors.min():g} to {factor:g}. Open the model's Hugging Face folder instead."
    )

"""What model families differ in, as their Hugging Face configs say it.

One table: which keys of config.json switch what in `Config`, and what a missing key means. What is
not known is refused by name, never guessed.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxoffload.finetune import rope
from jaxoffload.finetune.model import Config

Entry = Mapping[str, Any]

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""Hugging Face's names of what is known, and ours."""

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A `model_type`.

    Attributes:
      architecture: the class that writes such checkpoints.
      defaults: what a missing key of config.json means; of those that all families have, where it
        is not as in `_DEFAULTS`.
      fixed: fields of `Config` that all its models have.
      switches: keys of config.json that set a field of `Config`, as they are.
      window: (entry, with defaults) to the window and the layers that slide.
    """

    architecture: str
    defaults: Entry = dataclasses.field(default_factory=dict)
    fixed: Entry = dataclasses.field(default_factory=dict)
    switches: tuple[tuple[str, str], ...] = ()
    window: Callable[[Entry], tuple[int | None, tuple[bool, ...]]] = lambda entry: (None, ())


def _always(entry: Entry) -> tuple[int | None, tuple[bool, ...]]:
    """Mistral: every layer, if there is a window."""
    return entry["sliding_window"], ()


def _late(entry: Entry) -> tuple[int | None, tuple[bool, ...]]:
    """Qwen: where it is switched on, in the layers that are named, else from one of them on."""
    if not entry["use_sliding_window"] or entry["sliding_window"] is None:
        return None, ()
    first = entry["max_window_layers"]
    plain = [i >= first for i in range(entry["num_hidden_layers"])]
    return entry["sliding_window"], _named_layers(entry, plain)


def _pattern(entry: Entry) -> tuple[int | None, tuple[bool, ...]]:
    """Gemma 3: five layers slide, the sixth sees everything."""
    every = entry["sliding_window_pattern"]
    plain = [bool((i + 1) % every) for i in range(entry["num_hidden_layers"])]
    return entry["sliding_window"], _named_layers(entry, plain)


def _named_layers(entry: Entry, plain: list[bool]) -> tuple[bool, ...]:
    names = entry.get("layer_types")
    if names is None:
        return tuple(plain)
    unknown = sorted(set(names) - {FULL, SLIDING})
    if unknown:
        raise ValueError(f"layer_types has {unknown[0]!r}; known are {FULL!r} and {SLIDING!r}")
    return tuple(name == SLIDING for name in names)


_ATTENTION_BIAS = (("attention_bias", "has_qkv_bias"), ("attention_bias", "has_out_bias"))
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES: Mapping[str, Family] = {
    # LLaMA 1 to 3, SmolLM 1 and 2.
    "llama": Family(
        "LlamaForCausalLM",
        defaults={"attention_bias": False, "mlp_bias": False},
        switches=(*_ATTENTION_BIAS, ("mlp_bias", "has_mlp_bias")),
    ),
    "mistral": Family(
        "MistralForCausalLM",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
        window=_always,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        defaults=_QWEN_WINDOW | {"num_key_value_heads": 32},
        fixed={"has_qkv_bias": True},
        window=_late,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        defaults=_QWEN_WINDOW
        | {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
        fixed={"has_qk_norm": True},
        switches=_ATTENTION_BIAS,
        window=_late,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 4,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "query_pre_attn_scalar": 256,
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "attention_bias": False,
        },
        fixed={"has_qk_norm": True, "has_sandwich_norms": True, "norm_adds_one": True},
        switches=_ATTENTION_BIAS,
        window=_pattern,
    ),
}

_DEFAULTS: Entry = {
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_REFUSED = {
    "quantization_config": "weights that are quantized already; open the original ones, and pass "
    "quantize='nf4' or 'int8'",
    "final_logit_softcapping": "soft-capped logits",
    "attn_logit_softcapping": "soft-capped scores",
    "use_bidirectional_attention": "attention to later tokens",
}
"""Keys that, where they are set, ask for what is not done here."""


def from_huggingface(entry: Entry, dtype: str = "float32") -> Config:
    """What a config.json says.

    Args:
      dtype: of the weights and the activations.

    Raises:
      ValueError: a family, a rope or a switch that is not known, or a number that is missing; by
        name.
    """
    try:
        return _config(entry, dtype)
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"a value is not of the kind that its key asks for: {error}") from error


def _config(entry: Entry, dtype: str) -> Config:
    kind = entry.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type {kind!r} is not known; known are {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    architectures = entry.get("architectures") or [family.architecture]
    if family.architecture not in architectures:
        raise ValueError(
            f"architectures is {architectures}; of {kind!r} only {family.architecture} is known"
        )
    for key, what in _REFUSED.items():
        if entry.get(key):
            raise ValueError(f"{key} asks for {what}; that is not supported")
    given = {key: value for key, value in entry.items() if value is not None}
    if "sliding_window" in entry and entry["sliding_window"] is None:
        given["sliding_window"] = None
    full = {**_DEFAULTS, **family.defaults, **given}
    full.setdefault("num_key_value_heads", full.get("num_attention_heads"))
    _check(full)
    is_gemma = kind == "gemma3_text"
    name = full.get("hidden_activation" if is_gemma else "hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise ValueError(
            f"the activation {name!r} is not known; known are {', '.join(ACTIVATIONS)}"
        )
    window, sliding = family.window(full)
    one, other = _ropes(full, is_gemma)
    return Config(
        vocab_size=full["vocab_size"],
        width=full["hidden_size"],
        num_layers=full["num_hidden_layers"],
        num_heads=full["num_attention_heads"],
        num_kv_heads=full["num_key_value_heads"],
        ffn_width=full["intermediate_size"],
        rope=one,
        sliding_rope=other,
        norm_eps=full["rms_norm_eps"],
        dtype=dtype,
        head_width=full["head_dim"] or 0,
        max_length=full["max_position_embeddings"],
        is_tied=full["tie_word_embeddings"],
        activation=ACTIVATIONS[name],
        embedding_scale=full["hidden_size"] ** 0.5 if is_gemma else 1.0,
        query_scale=full["query_pre_attn_scalar"] ** -0.5 if is_gemma else 0.0,
        window=window,
        sliding=sliding,
        family=kind,
        **{ours: full[theirs] for theirs, ours in family.switches},
        **family.fixed,
    )


_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip
_OPTIONAL_COUNTS = ("head_dim", "sliding_window", "max_window_layers", "sliding_window_pattern")
_AMOUNTS = ("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar")
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
_TABLES = ("rope_scaling", "rope_parameters")


def _check(full: Entry) -> None:
    """Raises ValueError for a value that cannot be what its key says."""
    least = {"max_window_layers": 0}
    for key in (*_COUNTS, *_OPTIONAL_COUNTS):
        value = full.get(key)
        if value is None and key in _OPTIONAL_COUNTS:
            continue
        if type(value) is not int or value < least.get(key, 1):
            raise ValueError(f"{key} is {value!r}; it must be a whole number above 0")
    for key in _AMOUNTS:
        value = full.get(key, 1.0)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"{key} is {value!r}; it must be a number above 0")
    for key in _SWITCHES:
        if type(full.get(key, False)) is not bool:
            raise ValueError(f"{key} is {full[key]!r}; it must be true or false")
    for key in _TABLES:
        if not isinstance(full.get(key, {}), Mapping):
            raise ValueError(f"{key} is {full[key]!r}; it must be an object")


def _ropes(full: Entry, has_two: bool) -> tuple[rope.Rope, rope.Rope | None]:
    """The rope, and that of sliding layers; `rope_parameters` is the newer spelling."""
    theta, length = full["rope_theta"], full["max_position_embeddings"]
    entry = full.get("rope_scaling") or full.get("rope_parameters") or {}
    if "original_max_position_embeddings" in full:
        entry = {
            **entry,
            "original_max_position_embeddings": full["original_max_position_embeddings"],
        }
    if not has_two:
        return rope.from_huggingface(entry, theta, length), None
    local = full["rope_local_base_freq"]
    if {FULL, SLIDING} & entry.keys():
        one, other = (entry.get(name) for name in (FULL, SLIDING))
    else:
        one, other = entry, None
    return rope.from_huggingface(one, theta, length), rope.from_huggingface(other, local, length)


def to_huggingface(config: Config) -> dict[str, Any]:
    """A config.json that `from_huggingface` reads as this config.

    Raises:
      ValueError: the config has what its family has not.
    """
    if config.family not in FAMILIES:
        raise ValueError(
            f"Config: family={config.family!r} is not known; known are {', '.join(FAMILIES)}."
        )
    family = FAMILIES[config.family]
    is_gemma = config.family == "gemma3_text"
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    found: dict[str, Any] = {
        "model_type": config.family,
        "architectures": [family.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.ffn_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": config.is_tied,
        "hidden_activation" if is_gemma else "hidden_act": names[config.activation],
        "rope_theta": config.rope.theta,
        "rope_scaling": rope.to_huggingface(config.rope),
        "torch_dtype": config.dtype,
    }
    found |= {theirs: getattr(config, ours) for theirs, ours in family.switches}
    if "sliding_window" in family.defaults:
        found["sliding_window"] = config.window
    if config.sliding:
        found["layer_types"] = [SLIDING if each else FULL for each in config.sliding]
    if "use_sliding_window" in family.defaults:
        found["use_sliding_window"] = config.window is not None
    if is_gemma:
        found["query_pre_attn_scalar"] = round(config.query_scale**-2)
        found["rope_local_base_freq"] = (config.sliding_rope or config.rope).theta
    again = from_huggingface(found, config.dtype)
    odd = [
        f.name
        for f in dataclasses.fields(config)
        if getattr(again, f.name) != getattr(config, f.name)
    ]
    if odd:
        raise ValueError(
            f"Config: a {config.family} model cannot have {odd[0]}={getattr(config, odd[0])!r}. "
            "Name another family."
        )
    return found

"""Opens GGUF files, the format of llama.cpp: weights in packed blocks, a tokenizer, a template.

Files of the architecture "llama" hold the rows of the query and key matrices in another order, for
rotary embeddings of neighbouring elements; they are put back into Hugging Face's.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxoffload import _native
from jaxoffload.errors import DiskError
from jaxoffload.finetune import gguf_tokenizer, tokenizer, weights
from jaxoffload.finetune.model import Config
from jaxoffload.finetune.quantize import FORMATS
from jaxoffload.finetune.rope import Rope
from jaxoffload.finetune.weights import Model, Stored
from jaxoffload.runtime.arrays import DiskArray

ARCHITECTURES: Mapping[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"has_qkv_bias": True},
    "qwen3": {"has_qk_norm": True},
}
"""Those that are known, and what they have that LLaMA has not."""
PERMUTED = ("llama",)

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
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


def open_model(
    file: str | os.PathLike[str],
    *,
    dtype: Any = None,
    tier: str = "host",
    quantize: str | None = None,
) -> Model:
    """Opens a GGUF file.

    Args:
      dtype: of the activations, and of what packed blocks stand for; None: float32, or what the
        embedding is stored as.
      tier: "host": in host memory; "device"; "disk": matrices stay in the file, but for
        those of queries and keys, whose rows are in another order there.
      quantize: None: blocks of Q4_0, Q4_1 and Q8_0 stay packed, other types are unpacked; "none":
        all are unpacked; "int8" or "nf4": the layers' matrices are packed anew.

    Raises:
      DiskError: the file cannot be read. ValueError: it is no GGUF file, is cut short, or holds an
      architecture, a rope or a tokenizer that is not known, by name. ImportError: the package gguf
      is not installed.
    """
    what, path = "gguf.open_model", os.fspath(file)
    weights.check_options(what, dtype, tier, quantize)
    library = _library()
    handle, reader, fields = _open(library, what, path)
    config = _config(what, path, fields, reader.tensors)
    found = {
        _name_of(tensor.name): _stored(library, config, path, handle, tensor, fields)
        for tensor in reader.tensors
    }
    table = found.get("model.embed_tokens.weight")
    if dtype is None:
        dtype = table.dtype if table is not None and not table.kind else np.float32
    config = dataclasses.replace(config, dtype=np.dtype(dtype).name)
    found = weights.check_names(what, path, config, found)
    words = gguf_tokenizer.from_fields(fields, path)
    tokenizer.check_vocabulary(what, words, config.vocab_size)
    params = weights.assemble(what, config, found, tier=tier, quantize_as=quantize)
    return Model(config, params, words, path)


def _open(library: Any, what: str, path: str) -> tuple[Any, Any, dict[str, Any]]:
    """A handle to read tensors with, the package's reader of the rest, and the metadata."""
    try:
        handle = _native.DiskFile(path)
    except OSError as error:
        raise DiskError(error.errno, f"{what}: {error.strerror}") from error
    try:
        reader = library.GGUFReader(path)
        return handle, reader, {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, OverflowError, TypeError) as error:
        raise ValueError(
            f"{what}: {path} is not a whole GGUF file: {error}. Check that it was downloaded whole."
        ) from error


def _config(what: str, path: str, fields: Mapping[str, Any], tensors: Iterable[Any]) -> Config:
    kind = fields.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{what}: {path} has the architecture {kind!r}; known are "
            f"{', '.join(ARCHITECTURES)}. Open the model's Hugging Face folder instead."
        )
    shapes = {tensor.name: tuple(map(int, tensor.shape)) for tensor in tensors}

    def value(name: str, default: Any = None) -> Any:
        found = fields.get(f"{kind}.{name}", default)
        if not isinstance(found, int | float) or not 0 < found < math.inf:
            raise ValueError(
                f"{what}: {path} does not say {kind}.{name}, a number above 0, but {found!r}. "
                "Check that it was downloaded whole."
            )
        return found

    width, heads = value("embedding_length"), value("attention.head_count")
    head_width = value("attention.key_length", width // heads)
    if fields.get(f"{kind}.rope.dimension_count", head_width) != head_width:
        raise ValueError(f"{what}: {path} rotates a part of each head, which is not supported.")
    return Config(
        vocab_size=shapes.get("token_embd.weight", (0, 0))[1],
        width=width,
        num_layers=value("block_count"),
        num_heads=heads,
        num_kv_heads=value("attention.head_count_kv", heads),
        ffn_width=value("feed_forward_length"),
        rope=_rope(what, path, kind, fields),
        norm_eps=round(value("attention.layer_norm_rms_epsilon"), 12),  # was a float32
        head_width=head_width,
        max_length=value("context_length", 2048),
        is_tied="output.weight" not in shapes,
        family=kind,
        **ARCHITECTURES[kind],
    )


def _rope(what: str, path: str, kind: str, fields: Mapping[str, Any]) -> Rope:
    def value(name: str, default: Any) -> Any:
        return fields.get(f"{kind}.rope.{name}", default)

    theta, scaling = value("freq_base", 10_000.0), value("scaling.type", "none")
    if scaling == "none":
        return Rope(theta)
    factor = value("scaling.factor", 1.0)
    if scaling == "linear":
        return Rope(theta, "linear", factor)
    if scaling == "yarn":
        original = value("scaling.original_context_length", 0)
        return Rope(theta, "yarn", factor, original)
    raise ValueError(
        f"{what}: {path} has the rope scaling {scaling!r}; known are none, linear and yarn."
    )


def _name_of(name: str) -> str:
    """Hugging Face's name of a tensor; its own where it is not known."""
    if name in _OUTER:
        return _OUTER[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _INNER:
        return f"model.layers.{parts[1]}.{_INNER[parts[2]]}.{parts[3]}"
    return name


def _stored(
    library: Any, config: Config, path: str, handle: Any, tensor: Any, fields: Mapping[str, Any]
) -> Stored:
    kind = tensor.tensor_type.name.lower()
    plain = {"f32": np.float32, "f16": np.float16, "bf16": jnp.bfloat16, "f64": np.float64}
    logical = tuple(int(n) for n in reversed(tensor.shape))
    source = handle.range(int(tensor.data_offset), int(tensor.n_bytes))
    rows = _rows_of(config, tensor.name)
    if kind in plain:
        shape, dtype, kind = logical, np.dtype(plain[kind]), ""
    elif kind in FORMATS:
        shape, dtype = tuple(map(int, tensor.data.shape)), np.dtype(np.uint8)
    else:
        decode = _decoder(library, tensor, source)
        return Stored(
            logical, np.dtype(np.float32), "", _reordered(decode, logical, rows), None, path
        )
    array = DiskArray(shape, dtype, source, (path,)) if rows is None else None
    return Stored(shape, dtype, kind, _reordered(source.read_into, shape, rows), array, path)


def _rows_of(config: Config, name: str) -> np.ndarray | None:
    """Which row of a tensor is which of Hugging Face's; None where they are the same."""
    counts = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    heads = next((n for part, n in counts.items() if part in name.split(".")), 0)
    if config.family not in PERMUTED or not heads:
        return None
    count = heads * config.head_width
    return np.arange(count).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


Read = Callable[[np.ndarray], None]


def _reordered(read: Read, shape: tuple[int, ...], rows: np.ndarray | None) -> Read:
    if rows is None or shape[0] != len(rows):  # a wrong shape is told of when it is compared
        return read

    def read_rows(words: np.ndarray) -> None:
        found = np.empty_like(words)
        read(found)
        words.reshape(len(rows), -1)[:] = found.reshape(len(rows), -1)[rows]

    return read_rows


def _decoder(library: Any, tensor: Any, source: Any) -> Read:
    """Reads a tensor of a type that only the package gguf can unpack, as float32."""

    def read(words: np.ndarray) -> None:
        packed = np.empty(tensor.data.shape, tensor.data.dtype)
        source.read_into(packed.reshape(-1).view(np.uint8))
        found = library.quants.dequantize(packed, tensor.tensor_type)
        words.view(np.float32)[:] = found.reshape(-1)

    return read


def _library() -> Any:
    tokenizer.optional("gguf.quants", "GGUF files need the package gguf")
    return tokenizer.optional("gguf", "GGUF files need the package gguf")

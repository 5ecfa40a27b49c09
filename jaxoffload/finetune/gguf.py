"""Opens GGUF files, the format of llama.cpp: weights in packed blocks, a tokenizer, a template.

Files of the architecture "llama" hold the rows of the query and key matrices in another order, for
rotary embeddings of neighbouring elements; they are put back into Hugging Face's. Those of Gemma
hold norms as what they scale by; 1 is taken off again.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxoffload import _native
from jaxoffload.errors import DiskError
from jaxoffload.finetune import gguf_config, gguf_tokenizer, tokenizer, weights
from jaxoffload.finetune.model import Config
from jaxoffload.finetune.quantize import FORMATS
from jaxoffload.finetune.weights import Model, Stored
from jaxoffload.runtime.arrays import DiskArray

ROPE_FACTORS = "rope_freqs.weight"
PERMUTED = ("llama",)
"""Families whose files have the rows of queries and keys in another order."""


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
      tier: "host": in host memory; "device"; "disk": weights stay in the file, but for those
        that are stored otherwise there: LLaMA's matrices of queries and keys, Gemma's norms.
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
    kind = gguf_config.architecture_of(f"{what}: {path}", fields)
    found = {
        gguf_config.name_of(kind, tensor.name): _stored(library, config, path, handle, tensor)
        for tensor in reader.tensors
        if tensor.name != ROPE_FACTORS
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
    shapes, factors = {}, None
    for tensor in tensors:
        shapes[tensor.name] = tuple(map(int, tensor.shape))
        if tensor.name == ROPE_FACTORS:
            factors = np.asarray(tensor.data).reshape(-1)
    return gguf_config.config_of(f"{what}: {path}", fields, shapes, factors)


def _stored(library: Any, config: Config, path: str, handle: Any, tensor: Any) -> Stored:
    kind = tensor.tensor_type.name.lower()
    plain = {"f32": np.float32, "f16": np.float16, "bf16": jnp.bfloat16, "f64": np.float64}
    logical = tuple(int(n) for n in reversed(tensor.shape))
    source = handle.range(int(tensor.data_offset), int(tensor.n_bytes))
    rows = _rows_of(config, tensor.name)
    if kind in plain:
        shape, dtype, kind = logical, np.dtype(plain[kind]), ""
        if config.norm_adds_one and tensor.name.endswith("norm.weight"):
            return Stored(shape, dtype, "", _less_one(source.read_into, dtype), None, path)
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


def _less_one(read: Read, dtype: np.dtype) -> Read:
    def read_less(words: np.ndarray) -> None:
        read(words)
        words.view(dtype)[:] -= 1

    return read_less


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

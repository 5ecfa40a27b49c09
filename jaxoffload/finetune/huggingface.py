"""Hugging Face folders in and out: config.json, safetensors in shards, a tokenizer.

Nothing is downloaded. Tensors are read straight into their layer's slice of one allocation, or stay
in the file.
"""

import dataclasses
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxoffload.errors import DiskError
from jaxoffload.finetune import families, model, safetensors, tokenizer, weights
from jaxoffload.finetune.atomic import UNFINISHED, disk_errors, sync_folder, write_json
from jaxoffload.finetune.model import Config, Params
from jaxoffload.finetune.quantize import Quantized
from jaxoffload.finetune.tokenizer import Tokenizer
from jaxoffload.finetune.weights import Model, Stored
from jaxoffload.runtime.arrays import DiskArray
from jaxoffload.runtime.checkpoint_file import open_safetensors

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def open_model(
    folder: str | os.PathLike[str],
    *,
    dtype: Any = None,
    tier: str = "host",
    quantize: str | None = None,
) -> Model:
    """Opens a folder as `save_pretrained` of transformers writes it.

    Args:
      dtype: of weights and activations; None: what the embedding is stored as.
      tier: "host": layers stacked in host memory; "device": JAX's arrays; "disk": weights stay in
        the files, layers one by one, and are read when they are used.
      quantize: "int8" or "nf4" packs the layers' matrices while they are read; None or "none" does
        not.

    Raises:
      DiskError: a file is missing or cannot be read. ValueError: a file is damaged, cut short, or
      holds what is not understood: an architecture, a rope, a tensor, a shape; by name.
      ImportError: there is a tokenizer.json and the package tokenizers is not installed.
    """
    what, path = "huggingface.open_model", os.fspath(folder)
    weights.check_options(what, dtype, tier, quantize)
    entry = _read_json(what, os.path.join(path, "config.json"))
    arrays = _open_shards(what, path)
    if dtype is None:
        table = arrays.get("model.embed_tokens.weight")
        dtype = table[0].dtype if table else np.float32
    try:
        config = families.from_huggingface(entry, np.dtype(dtype).name)
    except ValueError as error:
        raise ValueError(
            f"{what}: {os.path.join(path, 'config.json')}: {str(error).rstrip('.')}."
        ) from error
    stored = {name: _stored(what, array, file) for name, (array, file) in arrays.items()}
    stored = weights.check_names(what, path, config, stored)
    words = tokenizer.from_folder(path)
    tokenizer.check_vocabulary(what, words, config.vocab_size)
    params = weights.assemble(what, config, stored, tier=tier, quantize_as=quantize)
    return Model(config, params, words, path)


def _read_json(what: str, path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except OSError as error:
        raise DiskError(
            error.errno,
            f"{what}: {path}: {error.strerror}. Pass a folder that has it, as save_pretrained "
            "of transformers writes it.",
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{what}: {path} is not JSON: {error}. Check that it was downloaded whole."
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{what}: {path} holds a {type(found).__name__}, not an object.")
    return found


def _open_shards(what: str, path: str) -> dict[str, tuple[DiskArray, str]]:
    """Every tensor with the file that it is in."""
    index = os.path.join(path, _INDEX)
    names = set(os.listdir(path))
    if _INDEX not in names:
        if _SINGLE not in names:
            raise DiskError(
                2,
                f"{what}: {path} has neither {_SINGLE} nor {_INDEX}. Other formats (.bin, .pth) "
                "are not read; save the model as safetensors.",
            )
        file = os.path.join(path, _SINGLE)
        return {name: (array, file) for name, array in open_safetensors(file).items()}
    table = _read_json(what, index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(x, str) for x in table.values()):
        raise ValueError(f"{what}: {index} has no weight_map of tensors to files.")
    shards = set(table.values())
    if any(os.path.basename(shard) != shard for shard in shards):
        odd = min(shard for shard in shards if os.path.basename(shard) != shard)
        raise ValueError(f"{what}: {index} names {odd!r}, which is outside of the folder.")
    for shard in sorted(shards - names):
        raise DiskError(
            2, f"{what}: {path} lacks {shard}, which {_INDEX} names. Download it again."
        )
    for shard in sorted(n for n in names - shards if _SHARD.fullmatch(n)):
        raise ValueError(
            f"{what}: {path} has {shard}, which {_INDEX} does not name. It is from another "
            "checkpoint, or the index is: remove one of them."
        )
    found: dict[str, tuple[DiskArray, str]] = {}
    for shard in sorted(shards):
        file = os.path.join(path, shard)
        for name, array in open_safetensors(file).items():
            if table.get(name) != shard:
                raise ValueError(
                    f"{what}: {file} has the tensor {name!r}, which {_INDEX} puts in "
                    f"{table.get(name)!r}. They are from different checkpoints."
                )
            found[name] = array, file
    for name, shard in table.items():
        if name not in found:
            raise ValueError(
                f"{what}: {os.path.join(path, shard)} lacks the tensor {name!r}, which {_INDEX} "
                "puts there. They are from different checkpoints."
            )
    return found


def _stored(what: str, array: DiskArray, file: str) -> Stored:
    def read(words: np.ndarray) -> None:
        try:
            if words.size:
                array.source.read_into(words)
        except OSError as error:
            raise DiskError(error.errno, f"{what}: {file}: {error.strerror}") from error

    return Stored(array.shape, array.dtype, "", read, array, file)


@dataclasses.dataclass(frozen=True, slots=True)
class _Unpacked:
    """A packed matrix, or one of a stack, that becomes plain when it is written."""

    packed: Quantized
    index: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.packed.shape if self.index is None else self.packed.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        return self.packed.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        parts = self.packed.packed, self.packed.scales
        if self.index is not None:
            parts = tuple(None if x is None else x[self.index] for x in parts)
        packed, scales = (None if x is None else np.asarray(x) for x in parts)
        plain = Quantized(packed, scales, self.packed.kind, self.dtype.name).dequantize()
        return np.asarray(plain, dtype)


def save_model(
    folder: str | os.PathLike[str],
    config: Config,
    params: Params,
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a folder that `open_model`, and transformers' `from_pretrained`, can open.

    The folder is there whole or not at all. Arrays in a lower tier are read layer by layer, packed
    ones become plain.

    Args:
      folder: a new one, or an empty one.
      params: stacked or in a tuple of layers; adapters merged (`lora.merge`).
      tokenizer: written beside, with its chat template.
      max_shard_bytes: of tensors in a file; a tensor that is larger has a file of its own.

    Raises:
      ValueError: the folder has something in it; the weights do not belong to the config, or have
      adapters. DiskError: it cannot be written.
    """
    what, path = "huggingface.save_model", os.path.abspath(os.fspath(folder))
    if max_shard_bytes < 1:
        raise ValueError(f"{what}: max_shard_bytes={max_shard_bytes} is below 1. Pass 5 * 10**9.")
    if os.path.isdir(path) and os.listdir(path):
        raise ValueError(f"{what}: folder={path!r} has something in it. Name a new one.")
    entry = families.to_huggingface(config)
    tensors = _tensors(what, config, params)
    shards: list[dict[str, Any]] = [{}]
    room, total = max_shard_bytes, 0
    for name, tensor in tensors.items():
        size = math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize
        if size > room and shards[-1]:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = tensor
        room, total = room - size, total + size
    parent, last = os.path.split(path)
    beside = os.path.join(parent, f"{UNFINISHED}{secrets.token_hex(4)}-{last}")
    with disk_errors(f"{what}: {path}"):
        os.makedirs(beside)
        try:
            table = {}
            for i, shard in enumerate(shards):
                file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
                file = _SINGLE if len(shards) == 1 else file
                safetensors.save(os.path.join(beside, file), shard)
                table |= dict.fromkeys(shard, file)
            if len(shards) > 1:
                index = {"metadata": {"total_size": total}, "weight_map": table}
                write_json(os.path.join(beside, _INDEX), index)
            if tokenizer is not None:
                tokenizer.save(beside)
                entry |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
            write_json(os.path.join(beside, "config.json"), entry)
            os.rename(beside, path)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        sync_folder(parent)


def _tensors(what: str, config: Config, params: Params) -> dict[str, Any]:
    """Every tensor by its name in a checkpoint."""
    wanted = model.outer_shapes(config)
    found = {name: _leaf(what, params, name) for name in wanted}
    stack = params["model"]["layers"]
    for i in range(config.num_layers):
        for name, shape in model.layer_shapes(config).items():
            full = f"model.layers.{i}.{name}"
            wanted[full] = shape
            if isinstance(stack, tuple | list):
                found[full] = _leaf(what, stack[i], name)
                continue
            whole = _leaf(what, stack, name, is_stack=True)
            if tuple(whole.shape) != (config.num_layers, *shape):
                raise ValueError(
                    f"{what}: {name} of all layers is {list(whole.shape)}, and the config asks for "
                    f"{[config.num_layers, *shape]}. Pass the config that belongs to these weights."
                )
            is_packed = isinstance(whole, Quantized)
            found[full] = _Unpacked(whole, i) if is_packed else safetensors.Row(whole, i)
    for name, shape in wanted.items():
        if tuple(found[name].shape) != shape:
            raise ValueError(
                f"{what}: {name} is {list(found[name].shape)}, and the config asks for "
                f"{list(shape)}. Pass the config that belongs to these weights."
            )
    return found


def _leaf(what: str, tree: Any, name: str, is_stack: bool = False) -> Any:
    for part in name.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            raise ValueError(
                f"{what}: params has no {name!r}. Pass the config that belongs to these weights."
            )
        tree = tree[part]
    if isinstance(tree, Quantized):
        return tree if is_stack else _Unpacked(tree, None)
    if hasattr(tree, "lora_A"):
        raise ValueError(f"{what}: {name} has an adapter. Pass lora.merge(...) of the weights.")
    return tree if hasattr(tree, "dtype") else jnp.asarray(tree)

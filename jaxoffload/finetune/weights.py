"""From a checkpoint's tensors to a model's tree of weights, in one of three tiers.

A checkpoint is a table of `Stored` tensors under Hugging Face's names. Layers are stacked in one
allocation into whose slices each tensor is read; on disk they stay where they are, one by one.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoffload.finetune import model, quantize
from jaxoffload.finetune.model import Config, Params
from jaxoffload.finetune.quantize import FORMATS, Quantized
from jaxoffload.runtime.arrays import TierArray, empty_host_array

TIERS = ("host", "disk", "device")


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A model that was opened.

    Attributes:
      config: its shape.
      params: its weights, see model.py.
      tokenizer: a `tokenizer.Tokenizer`, or None where the folder has none.
      folder: the folder, or the file, that it is from.
    """

    config: Config
    params: Params
    tokenizer: Any
    folder: str


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint.

    Attributes:
      shape, dtype: of its elements as they are stored; packed blocks are uint8 (out, bytes).
      kind: how blocks are packed, a name in `quantize.FORMATS`; "" for plain elements.
      read: reads its bytes into an array of as many uint8.
      array: it, where it is on disk; None where it cannot be used there as it is.
      file: which it is in, for messages.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    kind: str
    read: Callable[[np.ndarray], None]
    array: TierArray | None
    file: str

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Of the tensor that it stands for."""
        form = FORMATS[self.kind] if self.kind else None
        if form is None:
            return self.shape
        return (*self.shape[:-1], self.shape[-1] // form.bytes * form.block)

    def values(self) -> np.ndarray:
        """Its elements; packed ones as float32."""
        out = np.empty(self.shape, self.dtype)
        self.read(out.reshape(-1).view(np.uint8))
        if not self.kind:
            return out
        return np.asarray(Quantized(out, None, self.kind, "float32").dequantize())


def check_options(what: str, dtype: Any, tier: str, quantize_as: str | None) -> None:
    """Raises ValueError for options of `open_model` that are not, or do not go together."""
    if tier not in TIERS:
        raise ValueError(f"{what}: tier={tier!r} is not known. Pass one of {', '.join(TIERS)}.")
    known = (None, "none", *quantize.MADE)
    if quantize_as not in known:
        raise ValueError(
            f"{what}: quantize={quantize_as!r} is not known. Pass one of "
            f"{', '.join(map(str, known))}."
        )
    if dtype is not None and not jnp.issubdtype(np.dtype(dtype), jnp.floating):
        raise ValueError(f"{what}: dtype={dtype!r} is no floating dtype. Pass 'bfloat16'.")
    if tier == "disk" and quantize_as is not None:
        raise ValueError(
            f"{what}: quantize={quantize_as!r} makes new weights, and tier='disk' opens those of "
            "the file where they are. Pass tier='host', or quantize=None."
        )


def assemble(
    what: str,
    config: Config,
    stored: Mapping[str, Stored],
    *,
    tier: str,
    quantize_as: str | None,
) -> Params:
    """The tree of weights of a checkpoint whose names `check_names` has checked.

    Plain elements become `config.dtype`, on their way into the allocation.

    Args:
      what: for messages, "huggingface.open_model".
      tier: "host": stacked layers in host memory; "device": JAX's arrays; "disk": layers one by
        one, where they are in the file.
      quantize_as: "int8" or "nf4" packs the layers' matrices; "none" unpacks packed ones; None
        leaves them as the file has them, unless it packs some layers otherwise than others.

    Raises:
      ValueError: elements on disk are of another dtype, or matrices cannot be packed. MemoryError.
    """
    outer, inner = model.outer_shapes(config), model.layer_shapes(config)
    if tier == "disk":
        leaves = {name: _in_place(what, config, name, part) for name, part in stored.items()}
        params = model.nested({name: leaves[name] for name in outer})
        params["model"]["layers"] = tuple(
            model.nested({name: leaves[f"model.layers.{i}.{name}"] for name in inner})
            for i in range(config.num_layers)
        )
        return params
    plain = "none" if quantize_as == "none" else None
    params = model.nested(
        {name: _read(config, name, [stored[name]], tier, plain, ()) for name in outer}
    )
    stacks = {}
    for name, shape in inner.items():
        parts = [stored[f"model.layers.{i}.{name}"] for i in range(config.num_layers)]
        form = quantize_as if len(shape) == 2 else None
        stacks[name] = _read(config, name, parts, tier, form, (len(parts),))
    params["model"]["layers"] = model.nested(stacks)
    return params


def _read(
    config: Config,
    name: str,
    parts: list[Stored],
    tier: str,
    form: str | None,
    lead: tuple[int, ...],
) -> Any:
    """One leaf of the tree: tensors of one shape, read into one allocation."""
    first, dtype = parts[0], np.dtype(config.dtype)
    if form in quantize.MADE:
        packed = [quantize.quantize(part.values().astype(dtype), form, name=name) for part in parts]
        return _stacked_nodes(packed, tier)
    is_packed = form is None and bool(first.kind) and {p.kind for p in parts} == {first.kind}
    shape, want = (first.shape, first.dtype) if is_packed else (first.logical_shape, dtype)
    whole = _allocate((*lead, *shape), want, tier)
    for row, part in zip(_words(whole).reshape(len(parts), -1), parts, strict=True):
        if part.dtype == want and part.shape == shape:
            part.read(row)
        else:
            row.view(want)[:] = part.values().reshape(-1)
    whole = jnp.asarray(whole) if tier == "device" else whole
    return Quantized(whole, None, first.kind, dtype.name) if is_packed else whole


def check_names(
    what: str, where: str, config: Config, stored: Mapping[str, Stored]
) -> dict[str, Stored]:
    """The tensors that a config asks for, each of its shape.

    Raises:
      ValueError: one is missing, has another shape, or is not known; by name.
    """
    wanted = dict(model.outer_shapes(config))
    for i in range(config.num_layers):
        for name, shape in model.layer_shapes(config).items():
            wanted[f"model.layers.{i}.{name}"] = shape
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise ValueError(
            f"{what}: {where} has no tensor {missing[0]!r}{_and_more(missing)}, which a "
            f"{config.family} model of {config.num_layers} layers needs. Check that it was "
            "downloaded whole, with the config that belongs to it."
        )
    extra = [name for name in stored if name not in wanted and not _is_known_extra(config, name)]
    if extra:
        raise ValueError(
            f"{what}: {stored[extra[0]].file} has a tensor {extra[0]!r}{_and_more(extra)}, which a "
            f"{config.family} model of {config.num_layers} layers does not know. Check that its "
            "config belongs to it; another architecture is not supported under this name."
        )
    for name, shape in wanted.items():
        found = stored[name]
        if found.logical_shape != shape:
            raise ValueError(
                f"{what}: {name} in {found.file} is {list(found.logical_shape)}, and the config "
                f"asks for {list(shape)}. Check that config and weights belong together."
            )
        if not (found.kind or jnp.issubdtype(found.dtype, jnp.floating)):
            raise ValueError(
                f"{what}: {name} in {found.file} is {found.dtype.name}, no floating dtype. "
                "Quantized checkpoints of this kind are not supported; open the original one."
            )
    return {name: stored[name] for name in wanted}


def _is_known_extra(config: Config, name: str) -> bool:
    """What files hold beside the weights: tables of RoPE, and a tied matrix a second time."""
    return name.endswith("rotary_emb.inv_freq") or (config.is_tied and name == "lm_head.weight")


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _in_place(what: str, config: Config, name: str, part: Stored) -> Any:
    # Norms are computed in float32 anyhow, and may be of another dtype than the activations.
    if not part.kind and len(part.shape) == 2 and part.dtype != np.dtype(config.dtype):
        raise ValueError(
            f"{what}: {name} is {part.dtype.name} in {part.file}, and tier='disk' opens it as it "
            f"is, not as dtype={config.dtype}. Pass dtype=None, or tier='host'."
        )
    leaf: Any = part.array
    if leaf is None:
        leaf = _allocate(part.shape, part.dtype, "host")
        part.read(_words(leaf))
    return Quantized(leaf, None, part.kind, config.dtype) if part.kind else leaf


def _allocate(shape: tuple[int, ...], dtype: np.dtype, tier: str) -> Any:
    return np.empty(shape, dtype) if tier == "device" else empty_host_array(shape, dtype)


def _words(whole: Any) -> np.ndarray:
    if isinstance(whole, np.ndarray):
        return whole.reshape(-1).view(np.uint8)
    return np.asarray(whole.buffer)[: whole.nbytes]


def _stacked_nodes(parts: list[Quantized], tier: str) -> Quantized:
    def stack(*leaves: np.ndarray) -> Any:
        whole = _allocate((len(leaves), *leaves[0].shape), leaves[0].dtype, tier)
        words = _words(whole).reshape(len(leaves), -1)
        for row, leaf in zip(words, leaves, strict=True):
            row[:] = leaf.reshape(-1).view(np.uint8)
        return jnp.asarray(whole) if tier == "device" else whole

    return jax.tree.map(stack, *parts)

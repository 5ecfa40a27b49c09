"""Adapters as PEFT keeps them: `adapter_model.safetensors` and `adapter_config.json` in a folder.

PEFT names the matrices of every layer by themselves; here they are stacked or in a tuple, as in
`params`. Nothing is transposed on the way.
"""

import json
import os
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxoffload.errors import DiskError
from jaxoffload.finetune import lora, safetensors
from jaxoffload.finetune.atomic import disk_errors, write_json
from jaxoffload.finetune.lora import Adapters, LoraConfig, Params
from jaxoffload.runtime.checkpoint_file import open_safetensors

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_STACK = "layers"
"""The module whose children are stacked along the leading axis."""

# What each setting may be; others change what the file's numbers mean.
_DONE: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "use_dora": (False,), "lora_bias": (False,),
    "use_qalora": (False,), "rank_pattern": ({},), "alpha_pattern": ({},),
    "layers_to_transform": (), "layers_pattern": (), "layer_replication": (),
    "modules_to_save": ([],), "target_parameters": ([],), "trainable_token_indices": ([], {}),
    "alora_invocation_tokens": ([],), "arrow_config": (), "use_bdlora": (), "megatron_config": (),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}  # fmt: skip


def save_adapters(
    folder: str | os.PathLike[str],
    adapters: Mapping[str, Mapping[str, Any]],
    lora_config: LoraConfig,
    base_model: str | None = None,
) -> None:
    """Writes a folder that PEFT's `PeftModel.from_pretrained` reads.

    The settings are written first, so that weights are never without the rank and scale that they
    need. Each file is there whole or not at all.

    Args:
      folder: made if it is not there.
      base_model: name or path of the model that the adapters are for.

    Raises:
      ValueError: matrices have leading axes that are no layers. DiskError: the folder cannot be
      written to.
    """
    tensors: dict[str, Any] = {}
    for path, pair in adapters.items():
        for name in ("lora_A", "lora_B"):
            matrix = pair[name]
            if matrix.ndim == 2:
                tensors[f"{_PREFIX}{path}.{name}.weight"] = matrix
                continue
            if matrix.ndim != 3 or _STACK not in path.split("."):
                raise ValueError(
                    f"peft.save_adapters: {name} of {path} is {list(matrix.shape)}, which PEFT has "
                    f"no place for. Only matrices stacked under {_STACK!r} may have three axes."
                )
            for i in range(matrix.shape[0]):
                key = f"{_PREFIX}{_of_layer(path, i)}.{name}.weight"
                tensors[key] = safetensors.Row(matrix, i)
    targets: Any = lora_config.target_modules
    if isinstance(targets, str):  # written for our paths, which have no layer numbers
        targets = {key.removeprefix(_PREFIX).rpartition(".lora_")[0] for key in tensors}
    with disk_errors(f"peft.save_adapters: folder={os.fspath(folder)!r}"):
        os.makedirs(folder, exist_ok=True)
    write_json(
        os.path.join(folder, CONFIG),
        {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model,
            "r": lora_config.rank, "lora_alpha": _whole(lora_config.alpha),
            "lora_dropout": lora_config.dropout, "use_rslora": lora_config.use_rslora,
            "fan_in_fan_out": lora_config.fan_in_fan_out, "target_modules": sorted(targets),
            "bias": "none", "modules_to_save": None, "use_dora": False, "rank_pattern": {},
            "alpha_pattern": {}, "layers_to_transform": None, "layers_pattern": None,
            "init_lora_weights": True, "inference_mode": True,
        },
    )  # fmt: skip
    safetensors.save(os.path.join(folder, WEIGHTS), tensors)


def load_adapters(folder: str | os.PathLike[str], params: Params) -> tuple[Adapters, LoraConfig]:
    """Reads adapters that PEFT, or `save_adapters`, wrote for this model.

    Args:
      params: of the model, for its paths and shapes; a `jax.ShapeDtypeStruct` will do.

    Returns:
      Adapters in the layout of `params`, float32, and what they were trained with.

    Raises:
      DiskError: a file is missing or cannot be read. ValueError: a setting is not supported, or
      the tensors are not those of this model and these settings; names the first that is not.
    """
    where = f"peft.load_adapters: {os.fspath(folder)!r}"
    settings = _read_settings(os.path.join(folder, CONFIG), where)
    path = os.path.join(folder, WEIGHTS)
    if not os.path.exists(path) and os.path.exists(os.path.join(folder, "adapter_model.bin")):
        raise ValueError(
            f"{where} has adapter_model.bin, a pickle, which could run code. Save it with PEFT's "
            "safe_serialization=True."
        )
    tensors = dict(open_safetensors(path))
    matrices = lora.matrices_of(params)
    found = {_stacked_path(_module_of(key, where), matrices) for key in tensors}
    unknown = sorted(found - matrices.keys())
    if unknown:
        raise ValueError(
            f"{where} adapts {unknown[0]!r}, which the model does not have. Pass the params of "
            f"{settings.get('base_model_name_or_path') or 'the model that it was trained on'}."
        )
    targets = settings.get("target_modules")
    named = isinstance(targets, list) and not settings.get("exclude_modules")
    try:
        lora_config = LoraConfig(
            int(settings.get("r", 8)),
            float(settings.get("lora_alpha", 8)),
            bool(settings.get("use_rslora")),
            float(settings.get("lora_dropout", 0.0)),
            tuple(sorted({_named_here(t, matrices) for t in targets} if named else found)),
            bool(settings.get("fan_in_fan_out")),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {CONFIG}: {error}") from error
    if named:
        found |= lora.find_targets(params, lora_config).keys()
    adapters: Adapters = {}
    for each in sorted(found):
        adapters[each] = _gather(each, matrices[each], tensors, lora_config, where)
    if tensors:
        raise ValueError(f"{where} has {min(tensors)!r}, which belongs to no layer of the model.")
    return adapters, lora_config


def _read_settings(path: str, where: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            settings = json.load(file)
    except OSError as error:
        raise DiskError(
            error.errno, f"{where}: {CONFIG}: {error.strerror}. Pass a folder that PEFT saved."
        ) from error
    except ValueError as error:
        raise ValueError(f"{where}: {CONFIG} is not JSON: {error}. Copy it again.") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{where}: {CONFIG} is not an object. Copy it again.")
    for name, value in settings.items():
        if name in _DONE and value is not None and value not in _DONE[name]:
            raise ValueError(
                f"{where}: {CONFIG} has {name}={value!r}, which is not supported. Merge the "
                "adapter into its model with PEFT (merge_and_unload) and open the merged model."
            )
    return settings


def _module_of(key: str, where: str) -> str:
    found = re.fullmatch(re.escape(_PREFIX) + r"(.+)\.lora_[AB]\.weight", key)
    if found is None:
        raise ValueError(
            f"{where} has the tensor {key!r}, which is not supported: only "
            f"{_PREFIX}*.lora_A.weight and lora_B.weight are."
        )
    return found[1]


def _gather(
    path: str, matrix: Any, tensors: dict[str, Any], lora_config: LoraConfig, where: str
) -> dict[str, Any]:
    """Takes one matrix's tensors out of `tensors`."""
    *lead, _, _ = matrix.shape
    pair = {}
    for name, shape in lora.shapes_of(matrix, lora_config).items():
        layers = [_of_layer(path, i) for i in range(lead[0])] if lead else [path]
        rows = []
        for module in layers:
            key = f"{_PREFIX}{module}.{name}.weight"
            if key not in tensors:
                raise ValueError(
                    f"{where} has no tensor {key!r}, although others of its kind are there or "
                    "target_modules names it. Copy the file again, or check that it was trained "
                    "on this model."
                )
            row = tensors.pop(key)
            if tuple(row.shape) != shape[-2:]:
                raise ValueError(
                    f"{where}: {key!r} is {list(row.shape)}, must be {list(shape[-2:])} for "
                    f"r={lora_config.rank} and a matrix {list(matrix.shape[-2:])}. Check r in "
                    f"{CONFIG}, and that it was trained on this model."
                )
            rows.append(np.asarray(row).astype(np.float32))
        pair[name] = jnp.asarray(np.stack(rows) if lead else rows[0])
    return pair


def _of_layer(path: str, index: int) -> str:
    """Path of one layer's matrix in a stack."""
    before, found, after = path.rpartition(f"{_STACK}.")
    return f"{before}{found}{index}.{after}"


def _without_index(path: str) -> str:
    return re.sub(rf"(^|\.){_STACK}\.\d+(?=\.|$)", rf"\1{_STACK}", path)


def _named_here(target: str, matrices: Mapping[str, Any]) -> str:
    known = any(path == target or path.endswith(f".{target}") for path in matrices)
    return target if known else _without_index(target)


def _stacked_path(path: str, matrices: Mapping[str, Any]) -> str:
    """The name in params of a matrix that the file names by its layer."""
    return path if path in matrices else _without_index(path)


def _whole(x: float) -> int | float:
    return int(x) if float(x).is_integer() else x

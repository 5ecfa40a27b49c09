"""LoRA (Hu et al. 2021): a frozen matrix W is used as W + scale · B A; A and B are trained.

For any pytree of matrices. `init` makes adapters for the matrices that are named, `attach` puts a
`LoraMatrix` in the place of each, and a model that writes `x @ w.T` needs no other change. W + B A
is never made while training; `merge` makes it for export. Names and meanings are PEFT's. A is
(rank, in) and B is (out, rank), behind the leading axes that W has.
"""

import dataclasses
import math
import re
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = Any
"""A pytree whose leaves are arrays or stand for matrices."""
Adapters = dict[str, dict[str, jax.Array]]
"""Path of a matrix, without a trailing "weight", to its "lora_A" and "lora_B"."""

_LEAF_NAMES = ("weight", "kernel", "w")
"""What libraries call the matrix of a module: a target names the module."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoraConfig:
    """Rank, scale and place of the adapters; PEFT's names, meanings and defaults.

    Attributes:
      rank: of the update B A; PEFT's `r`.
      alpha: the update counts alpha / rank times; PEFT's `lora_alpha`.
      use_rslora: it counts alpha / sqrt(rank) times instead.
      dropout: share of the update's inputs that are left out while training.
      target_modules: last names of module paths, as "q_proj" or "mlp.up_proj", or one regular
        expression for whole paths, as r"model\\.layers\\..*_proj".
      fan_in_fan_out: matrices are (in, out), and the model writes `x @ w`.

    Raises:
      ValueError: a number is out of its range, or there is no target.
    """

    rank: int = 8
    alpha: float = 8.0
    use_rslora: bool = False
    dropout: float = 0.0
    target_modules: tuple[str, ...] | str = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    )  # fmt: skip
    fan_in_fan_out: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"LoraConfig: rank={self.rank} is below 1. Pass 8, for example.")
        if not math.isfinite(self.alpha):
            raise ValueError(f"LoraConfig: alpha={self.alpha} is not finite. Pass a number.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(
                f"LoraConfig: dropout={self.dropout} is not in [0, 1). Pass 0.0 for none."
            )
        if not self.target_modules:
            raise ValueError('LoraConfig: target_modules is empty. Name modules, as ("q_proj",).')
        if isinstance(self.target_modules, str):
            try:
                re.compile(self.target_modules)
            except re.error as error:
                raise ValueError(
                    f"LoraConfig: target_modules={self.target_modules!r} is no regular expression "
                    f"({error}). Pass a tuple to name modules one by one."
                ) from error

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    def targets(self, path: str) -> bool:
        """Whether a module's path is named."""
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, path) is not None
        return any(path == t or path.endswith(f".{t}") for t in self.target_modules)


@jax.tree_util.register_pytree_node_class
class LoraMatrix:
    """Stands for base + scale · B A in a pytree of weights; made by `attach`.

    A registered pytree node, so that `lax.scan` slices it, `jax.grad` reaches A and B, and
    `jo.offload` takes its parts as arguments. The product `x @ m` works; the matrix is never made.

    Attributes:
      base: (..., out, in), or (..., in, out) where `flipped`; an array or a node of its own.
      lora_A: (..., rank, in). lora_B: (..., out, rank).
      key: of the dropout, one for each leading index, or None for no dropout.
      scale, dropout: numbers.
      flipped: whether it stands for (base's orientation of) the transposed matrix, (in, out).
    """

    __array_ufunc__ = None  # `array @ m` of a NumPy array is ours

    def __init__(
        self, base: Any, lora_A: Any, lora_B: Any, key: Any, scale: float, dropout: float,
        flipped: bool,
    ):  # fmt: skip
        self.base, self.lora_A, self.lora_B, self.key = base, lora_A, lora_B, key
        self.scale, self.dropout, self.flipped = scale, dropout, flipped

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        parts = self.base, self.lora_A, self.lora_B, self.key
        return parts, (self.scale, self.dropout, self.flipped)

    @classmethod
    def tree_unflatten(cls, kept: tuple[Any, ...], parts: Any) -> "LoraMatrix":
        return cls(*parts, *kept)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.base.shape)

    @property
    def ndim(self) -> int:
        return len(self.base.shape)

    @property
    def dtype(self) -> Any:
        return self.base.dtype

    @property
    def T(self) -> "LoraMatrix":
        """The transposed matrix: the last two axes change places."""
        kept = self.scale, self.dropout, not self.flipped
        return LoraMatrix(_transposed(self.base), self.lora_A, self.lora_B, self.key, *kept)

    def __rmatmul__(self, x: Any) -> jax.Array:
        """`x @ m`; the update is added in the wider of the adapters' and the product's dtypes."""
        whole = x @ self.base
        first, second = self.lora_B, self.lora_A
        if self.flipped:  # x holds the inputs
            first, second = _transposed(self.lora_A), _transposed(self.lora_B)
            x = self._dropped(x)
        wide = jnp.promote_types(x.dtype, first.dtype)
        low = (x.astype(wide) @ first.astype(wide)) @ second.astype(wide)
        return (whole + low * jnp.asarray(self.scale, low.dtype)).astype(whole.dtype)

    def __repr__(self) -> str:
        return f"LoraMatrix({self.base!r}, rank {self.lora_A.shape[-2]}, scale {self.scale:g})"

    def _dropped(self, x: jax.Array) -> jax.Array:
        if self.key is None or not self.dropout:
            return x
        kept = jax.random.bernoulli(self.key, 1.0 - self.dropout, x.shape)
        return jnp.where(kept, x / jnp.asarray(1.0 - self.dropout, x.dtype), jnp.zeros_like(x))


def init(params: Params, lora_config: LoraConfig, key: jax.Array) -> Adapters:
    """Adapters that change nothing yet: A as PEFT draws it (uniform within 1/sqrt(in)), B zero.

    Args:
      params: matrices (..., out, in), of which only paths and shapes are looked at. Layers that
        are stacked and layers in a tuple get the same numbers.
      key: decides A, together with the path.

    Returns:
      {path: {"lora_A": (..., rank, in), "lora_B": (..., out, rank)}}, float32.

    Raises:
      ValueError: a target is nowhere in `params`, or is not a matrix.
    """
    adapters = {}
    for path, leaf in find_targets(params, lora_config).items():
        lead, fan_in, fan_out = _sizes(leaf, lora_config)
        keys, bound = _keys(key, path, lead), 1.0 / math.sqrt(fan_in)
        size = (lora_config.rank, fan_in)
        rows = [jax.random.uniform(k, size, jnp.float32, -bound, bound) for k in keys.reshape(-1)]
        adapters[path] = {
            "lora_A": jnp.stack(rows).reshape(*lead, *size),
            "lora_B": jnp.zeros((*lead, fan_out, lora_config.rank), jnp.float32),
        }
    return adapters


def attach(
    params: Params,
    adapters: Mapping[str, Mapping[str, Any]],
    lora_config: LoraConfig,
    key: jax.Array | None = None,
) -> Params:
    """`params` with a `LoraMatrix` in the place of every matrix that has an adapter.

    Args:
      key: of this step's dropout; without one nothing is left out, as when a model is judged.

    Raises:
      ValueError: an adapter has no matrix in `params`, or not the shape that belongs to it.
    """
    key = key if lora_config.dropout else None

    def join(path: str, leaf: Any, pair: Mapping[str, Any]) -> LoraMatrix:
        own = None if key is None else _keys(key, path, tuple(leaf.shape[:-2]))
        kept = lora_config.scale, lora_config.dropout, lora_config.fan_in_fan_out
        return LoraMatrix(leaf, pair["lora_A"], pair["lora_B"], own, *kept)

    return _map_adapted("attach", join, params, adapters, lora_config)


def merge(params: Params, adapters: Mapping[str, Any], lora_config: LoraConfig) -> Params:
    """The weights with the updates added in, for use without LoRA.

    Added in float32 or wider, then rounded to each matrix's own dtype. Quantized matrices become
    plain ones. Arrays in a lower tier are worked on row by row and become NumPy arrays.

    Raises:
      ValueError: as `attach`.
    """
    return _map_adapted("merge", _adder(lora_config, 1.0), params, adapters, lora_config)


def unmerge(params: Params, adapters: Mapping[str, Any], lora_config: LoraConfig) -> Params:
    """Takes back what `merge` added, but for a rounding of each weight.

    Raises:
      ValueError: as `attach`.
    """
    return _map_adapted("unmerge", _adder(lora_config, -1.0), params, adapters, lora_config)


def _adder(lora_config: LoraConfig, sign: float) -> Any:
    scale = sign * lora_config.scale

    def add(path: str, leaf: Any, pair: Mapping[str, Any]) -> Any:
        del path
        if hasattr(leaf, "dequantize"):
            leaf = leaf.dequantize()
        if isinstance(leaf, jax.Array):
            return _added(leaf, pair["lora_A"], pair["lora_B"], scale, lora_config)
        done = np.empty(leaf.shape, leaf.dtype)
        for i in np.ndindex(leaf.shape[:1] if len(leaf.shape) > 2 else ()):
            row = jnp.asarray(leaf[i[0]] if i else np.asarray(leaf))
            done[i] = _added(row, pair["lora_A"][i], pair["lora_B"][i], scale, lora_config)
        return done

    return add


def _added(matrix: Any, a: Any, b: Any, scale: float, lora_config: LoraConfig) -> jax.Array:
    wide = jnp.promote_types(matrix.dtype, a.dtype)
    update = jnp.matmul(b.astype(wide), a.astype(wide), precision="highest")
    if lora_config.fan_in_fan_out:
        update = _transposed(update)
    return (matrix.astype(wide) + update * jnp.asarray(scale, wide)).astype(matrix.dtype)


def _transposed(x: Any) -> Any:
    return jnp.swapaxes(x, -1, -2) if isinstance(x, jax.Array | np.ndarray) else x.T


def _keys(key: jax.Array, path: str, lead: tuple[int, ...]) -> jax.Array:
    """One key for each leading index of a matrix; the same where indices are part of the path."""
    words = path.split(".")
    name = ".".join(word for word in words if not word.isdigit())
    keys = jax.random.fold_in(key, zlib.crc32(name.encode()))
    for word in filter(str.isdigit, words):
        keys = jax.random.fold_in(keys, int(word))
    for size in lead:
        inner = jax.vmap(jax.random.fold_in, (None, 0))
        for _ in keys.shape:
            inner = jax.vmap(inner, (0, None))
        keys = inner(keys, jnp.arange(size, dtype=jnp.uint32))
    return keys


def _is_leaf(x: Any) -> bool:
    """Arrays of every tier, and nodes that stand for a matrix."""
    return hasattr(x, "shape")


def _path_of(keys: tuple[Any, ...]) -> str:
    """As "model.layers.self_attn.q_proj"; the last "weight" is left out."""
    words = []
    for key in keys:
        found = [getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)]
        words.append(str(found[0] if found else key))
    return ".".join(words[:-1] if words[-1:] == ["weight"] and len(words) > 1 else words)


def matrices_of(params: Params) -> dict[str, Any]:
    """The matrices of a pytree, by path; leading axes are those of stacked layers."""
    found = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_leaf):
        path = _path_of(keys)
        last = path.rpartition(".")[2]
        # A norm's weights, stacked over layers, have two axes as a matrix has.
        vector = "norm" in last or last in ("bias", "embed_tokens")
        if len(getattr(leaf, "shape", ())) >= 2 and not vector:
            found[path] = leaf
    return found


def find_targets(params: Params, lora_config: LoraConfig) -> dict[str, Any]:
    """The matrices that a config names, by path.

    Raises:
      ValueError: a target names none.
    """
    matrices = matrices_of(params)
    listed = lora_config.target_modules
    found: dict[str, Any] = {}
    for target in (listed,) if isinstance(listed, str) else listed:
        one = LoraConfig(target_modules=listed if isinstance(listed, str) else (target,))
        own = {path: x for path, x in matrices.items() if any(map(one.targets, _names_of(path)))}
        if not own:
            raise ValueError(
                f"lora: target_modules has {target!r}, which names no matrix of params. Name some "
                f"of: {', '.join(sorted(matrices)[:20])}"
            )
        found |= own
    return found


def shapes_of(matrix: Any, lora_config: LoraConfig) -> dict[str, tuple[int, ...]]:
    """What "lora_A" and "lora_B" of a matrix must be."""
    lead, fan_in, fan_out = _sizes(matrix, lora_config)
    return {
        "lora_A": (*lead, lora_config.rank, fan_in),
        "lora_B": (*lead, fan_out, lora_config.rank),
    }


def _names_of(path: str) -> tuple[str, ...]:
    """How a target may name a matrix: by its path, or by its module's."""
    module, _, last = path.rpartition(".")
    return (path, module) if last in _LEAF_NAMES and module else (path,)


def _sizes(leaf: Any, lora_config: LoraConfig) -> tuple[tuple[int, ...], int, int]:
    """Leading axes, inputs and outputs of a matrix."""
    *lead, fan_out, fan_in = leaf.shape
    if lora_config.fan_in_fan_out:
        fan_out, fan_in = fan_in, fan_out
    return tuple(lead), fan_in, fan_out


def _map_adapted(
    what: str, change: Any, params: Params, adapters: Mapping[str, Any], lora_config: LoraConfig
) -> Params:
    """Changes the leaves that have an adapter, each checked against the shapes it must have."""
    left = set(adapters)

    def visit(keys: Any, leaf: Any) -> Any:
        path = _path_of(keys)
        if path not in adapters:
            return leaf
        left.discard(path)
        for name, shape in shapes_of(leaf, lora_config).items():
            have = adapters[path].get(name)
            if have is None or tuple(have.shape) != shape:
                raise ValueError(
                    f"lora.{what}: {name} of {path} is "
                    f"{'missing' if have is None else list(have.shape)}, must be {list(shape)} for "
                    f"rank={lora_config.rank} and a matrix {list(leaf.shape)}. Pass the adapters "
                    "and the lora_config that were made for these params."
                )
        return change(path, leaf, adapters[path])

    done = jax.tree_util.tree_map_with_path(visit, params, is_leaf=_is_leaf)
    if left:
        raise ValueError(
            f"lora.{what}: params has no matrix {min(left)!r}, which adapters name. Pass the "
            "params that the adapters were made for."
        )
    return done

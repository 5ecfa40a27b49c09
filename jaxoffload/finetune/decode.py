"""Continues sequences of tokens, several at a time, with keys and values in a cache that grows.

Shapes: B sequences, T tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoffload.finetune import kv_cache, model
from jaxoffload.finetune.kv_cache import KVCache, Past, Recent
from jaxoffload.finetune.model import Config, Params
from jaxoffload.finetune.sampling import Sampling, choose, make_sampling
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.options import parse_disk
from jaxoffload.runtime.run import Run
from jaxoffload.search.whole import WholeRun
from jaxoffload.transform.offload import offload
from jaxoffload.transform.offloaded import Offloaded

_PREFILL = 1024
"""Tokens of a prompt that one step takes at most: more, and activations would be larger than what
moves."""
_LEAST_PREFILL = 32
"""Prompts are padded to it and its doubles, so that few programs take every prompt."""
_RECENT_SHARE = 16
"""What a step adds to may have one part in so many of the bytes of the weights."""

Step = Callable[..., tuple[jax.Array, Recent]]
Prompts = Sequence[int] | Sequence[Sequence[int]] | np.ndarray


def next_token(
    config: Config,
    params: Params,
    tokens: jax.Array,
    past: Past,
    recent: Recent,
    sampling: Sampling,
) -> tuple[jax.Array, Recent]:
    """The token after some that follow those in a cache.

    Args:
      tokens: (B, T) int32.

    Returns:
      (B, 1) int32, and what is recent with the new keys and values in it.
    """
    logits, recent = model.forward_cached(config, params, tokens, past, recent)
    return choose(logits, sampling, past.length + recent.length)[:, None], recent


DONATED = (3,)
"""Arguments of a step whose memory its results may take, the config not counted."""


@functools.lru_cache(maxsize=8)
def _jitted(config: Config) -> Step:
    return jax.jit(functools.partial(next_token, config), donate_argnums=DONATED)


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """What limits the tokens a second: what comes up for each step by the slowest link.

    Attributes:
      bytes: that cannot stay on the device.
      bytes_per_second: of the link, by the machine's model.
      link: "link" or "disk".
    """

    bytes: int
    bytes_per_second: float
    link: str

    @property
    def seconds(self) -> float:
        """Of a step at least."""
        return self.bytes / self.bytes_per_second


class Decoder:
    """Continues texts with one model. What it has planned and compiled serves later texts.

    Args:
      config, params: the model; adapters attached or merged.
      device_memory: budget of a step, as `offload` takes it. Without it, and without `transform`,
        steps are `jax.jit`'s, and weights in a lower tier are brought to the device.
      disk: a folder, or several, to hold the keys and values of older tokens; otherwise they are in
        host memory where a step is offloaded.
      transform: what makes a fast function of the step in place of `device_memory`: for one
        `lambda step: jo.offload(step, device_memory="1GiB", donate_argnums=decode.DONATED)`.

    Attributes:
      step: the fast function.
    """

    def __init__(
        self,
        config: Config,
        params: Params,
        *,
        device_memory: int | float | str | None = None,
        disk: Any = None,
        transform: Callable[[Step], Step] | None = None,
    ):
        self._config, self._params = config, params
        self._disk = () if disk is None else parse_disk(disk, "disk")
        step = functools.partial(next_token, config)
        self.step: Step
        if transform is not None:
            self.step = transform(step)
        elif device_memory is not None:
            self.step = offload(step, device_memory=device_memory, donate_argnums=DONATED)
        else:
            self.step = _jitted(config)
            self._params = jax.tree.map(_on_device, params)
        # Kernels of a jitted step read the device's arrays only.
        self._tier = "device"
        if isinstance(self.step, Offloaded):
            self._tier = "disk" if self._disk else "host"
        elif self._disk:
            raise ValueError(
                f"Decoder: disk={disk!r} is for offloaded steps. Pass device_memory, too."
            )

    def generate(self, prompts: Prompts, max_tokens: int, **options: Any) -> Any:
        """Continues a prompt, or several.

        Args:
          prompts, max_tokens, options: see `stream`.

        Returns:
          The new tokens, a list; of several prompts a list for each. A token of `stop` that ended a
          text is in it.
        """
        count, is_one = len(prompts), _is_one(prompts)
        found: list[list[int]] = [[] for _ in range(1 if is_one else count)]
        for tokens in self.stream(prompts, max_tokens, **options):
            for text, token in zip(found, [tokens] if is_one else tokens, strict=True):
                if token is not None:
                    text.append(token)
        return found[0] if is_one else found

    def stream(
        self,
        prompts: Prompts,
        max_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[int] = (),
    ) -> Iterator[Any]:
        """Continues a prompt, or several, one token after another.

        Args:
          prompts: token ids, at least one; or several of such, of any lengths.
          max_tokens: new tokens at most, of each.
          temperature: 0: the likeliest token each time; else tokens are drawn.
          top_p: tokens are drawn from the likeliest which have this probability together.
          stop: tokens after which a text ends.

        Yields:
          A token; of several prompts a list, None where a text has ended.

        Raises:
          ValueError: a prompt is empty, or has tokens that the model does not know; an option is
            not legal.
        """
        is_one = _is_one(prompts)
        texts = [_checked(self._config, each) for each in ([prompts] if is_one else prompts)]
        sampling = make_sampling(len(texts), temperature, top_p, seed)
        if max_tokens < 1 or not texts:
            return
        has_ended = [False] * len(texts)
        for found in self._steps(texts, max_tokens, sampling):
            tokens = [None if ended else int(t) for t, ended in zip(found, has_ended, strict=True)]
            yield tokens[0] if is_one else tokens
            has_ended = [
                ended or token in stop for token, ended in zip(tokens, has_ended, strict=True)
            ]
            if all(has_ended):
                return

    @property
    def last_run(self) -> Run | WholeRun | None:
        """Of the last step, where steps are offloaded."""
        return self.step.last_run if isinstance(self.step, Offloaded) else None

    def bound(self) -> Bound | None:
        """What limits the speed of steps like the last, once two were made; None where nothing
        moves, or the last did not run within a plan."""
        run = self.last_run
        if not isinstance(run, Run) or run.machine is None:
            return None
        links = {
            "link": (run.machine.to_device, Kind.RELOAD),
            "disk": (run.machine.disk_read, Kind.LOAD),
        }
        bounds = [
            Bound(run.memgraph.moved_bytes(kind), link.bytes_per_second, name)
            for name, (link, kind) in links.items()
        ]
        slowest = max(bounds, key=lambda bound: bound.seconds)
        return slowest if slowest.bytes else None

    def _steps(
        self, texts: Sequence[np.ndarray], count: int, sampling: Sampling
    ) -> Iterator[np.ndarray]:
        """(B,) tokens, one after another."""
        padded = self._padded(max(map(len, texts)))
        tokens = np.zeros((len(texts), padded), np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[padded - len(text) :] = text
        cache = self._new_cache([padded - len(text) for text in texts])

        def step(given: Any) -> Any:
            cache.reserve(given.shape[1])
            token, cache.recent = self.step(self._params, given, cache.past, cache.recent, sampling)
            return token

        most = padded if self._config.rope.kind == "dynamic" else _PREFILL
        first = padded % most or most
        token = step(jnp.asarray(tokens[:, :first]))
        for start in range(first, padded, most):
            token = step(jnp.asarray(tokens[:, start : start + most]))
        while True:
            count -= 1
            # What is still being computed is not waited for before the next step follows it: the
            # end of a text is seen one step late.
            ahead = step(token) if count and not token.is_ready() else None
            yield np.asarray(token)[:, 0]
            if not count:
                return
            token = step(token) if ahead is None else ahead

    def _padded(self, length: int) -> int:
        """To which length prompts are padded: few steps take each."""
        # The rates of dynamic ropes follow the last position of a step, which must take all.
        if self._config.rope.kind != "dynamic" and length > _PREFILL:
            rest = length % _PREFILL
            return length - rest + (self._padded(rest) if rest else 0)
        return max(_LEAST_PREFILL, 1 << (length - 1).bit_length())

    def _new_cache(self, starts: Sequence[int]) -> KVCache:
        config = self._config
        shape = config.num_layers, len(starts), config.num_kv_heads, config.head_width
        a_token = 2 * np.prod(shape) * np.dtype(config.dtype).itemsize
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(self._params))
        room = kv_cache.TOKENS
        while room > kv_cache.LEAST_TOKENS and room * a_token * _RECENT_SHARE > weights:
            room //= 2
        return KVCache(
            shape, config.dtype, np.asarray(starts), self._tier, disk=self._disk, room=room
        )


def generate(
    config: Config,
    params: Params,
    prompts: Prompts,
    max_tokens: int,
    *,
    transform: Callable[[Step], Step] | None = None,
    **options: Any,
) -> Any:
    """Continues prompts with one model, once; see `Decoder`."""
    return Decoder(config, params, transform=transform).generate(prompts, max_tokens, **options)


def _on_device(leaf: Any) -> jax.Array:
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(np.asarray(leaf))


def _is_one(prompts: Any) -> bool:
    """Whether it is one prompt, not several."""
    return (
        np.ndim(prompts) == 1
        if isinstance(prompts, np.ndarray)
        else not (len(prompts) and np.ndim(prompts[0]))
    )


def _checked(config: Config, prompt: Any) -> np.ndarray:
    found = np.asarray(prompt, np.int32)
    if found.ndim != 1 or not found.size:
        raise ValueError(
            f"generate: a prompt has the shape {list(found.shape)}; pass a list of token ids, at "
            "least one, or several of such."
        )
    if found.min() < 0 or found.max() >= config.vocab_size:
        raise ValueError(
            f"generate: a prompt has tokens {found.min()} to {found.max()}, and the model knows 0 "
            f"to {config.vocab_size - 1}. Use the model's own tokenizer."
        )
    return found

"""A fine-tuning from a model, examples and settings, to adapters or weights in a folder.

`prepare` opens and checks everything and makes the offloaded step; `Session.run` takes the steps,
writes checkpoints, judges by held-out rows, and stops where it can go on later.
"""

import dataclasses
import hashlib
import math
import os
import signal
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoffload.finetune import data, huggingface, lora, parallel, peft, train
from jaxoffload.finetune.checkpoint import CheckpointError, Checkpoints
from jaxoffload.finetune.devices import Devices
from jaxoffload.finetune.lora import LoraConfig
from jaxoffload.finetune.parallel import Processes
from jaxoffload.finetune.train import Recipe
from jaxoffload.finetune.weights import Model
from jaxoffload.runtime.arrays import HostArray
from jaxoffload.runtime.put import disk_put, host_put
from jaxoffload.transform.offload import offload
from jaxoffload.transform.offloaded import Offloaded

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How a session trains.

    Attributes:
      lora_config: of the adapters; None trains all weights.
      recipe: how weights are changed.
      batch: rows a step, of all processes and devices together; length: tokens a row.
      seed: of adapters, order and dropout.
      device_memory, host_memory, disk, memory: as of `jaxoffload.offload`; the first is of each
        device.
      tier: "host" or "disk", where weights that are all trained wait, and their optimizer state.
      log_every, eval_every, save_every: in steps; 0 for at the end only.
      keep: checkpoints that are kept.
      max_eval_rows: held-out rows that are judged by.
      processes: those that train together; they have joined.
      devices: those of each process that take a step together.
    """

    lora_config: LoraConfig | None
    recipe: Recipe
    batch: int = 4
    length: int = 512
    seed: int = 0
    device_memory: Any = "auto"
    host_memory: Any = None
    disk: str | None = None
    tier: str = "host"
    log_every: int = 1
    eval_every: int = 0
    save_every: int = 100
    keep: int = 2
    max_eval_rows: int = 64
    memory: Any = None
    processes: Processes = Processes()
    devices: Devices = Devices()


class Stopped(Exception):
    """Training was asked to stop and has written a checkpoint, from which it can go on."""


@dataclasses.dataclass(slots=True)
class Session:
    """Everything that a training needs, ready.

    Attributes:
      step, loss: offloaded; as `train.make_step` and `train.make_loss` give them. Of several
        processes the first is as of `train.make_gradients`.
      trainer: the state.
      packed, held_out: the rows; held_out is None where there are none to judge by.
      about: what is trained, for checkpoints.
    """

    model: Model
    settings: Settings
    step: Offloaded
    loss: Offloaded
    trainer: train.Trainer
    packed: data.Packed
    held_out: data.Packed | None
    about: dict[str, Any]

    def arguments(self) -> tuple[Any, ...]:
        """Of the next step of the trainer, in its order."""
        state, done = self.trainer, self.trainer.num_done
        settings = self.settings
        batch = data.batch_at(self.packed, settings.batch, settings.seed, done)
        if settings.processes.count == 1:
            batch = settings.devices.rows(batch)
        key = train.dropout_key(settings.lora_config, settings.seed, done)
        return state.frozen, state.trained, state.opt_state, batch, key

    def evaluate(self) -> float:
        """Mean loss of the held-out rows, in nats a token."""
        assert self.held_out is not None
        rows = self.settings.batch // self.settings.processes.count  # as many as a step's
        batches = map(self.settings.devices.rows, data.in_order(self.held_out, rows))
        return train.evaluate(self.loss, self.trainer.trained, self.trainer.frozen, batches)

    def resume(self, checkpoints: Checkpoints) -> bool:
        """Takes the newest checkpoint's state; False where there is none.

        Raises:
          CheckpointError: it is of another training, or all are damaged.
        """
        state = self.trainer.trained, self.trainer.opt_state
        found = checkpoints.load(state, self.about)
        if found is None:
            return False
        step, (trained, opt_state) = found
        for old in jax.tree.leaves(state):
            old.delete()
        self.trainer.trained, self.trainer.opt_state = _placed((trained, opt_state), self.settings)
        self.trainer.num_done = step
        return True

    def save(self, checkpoints: Checkpoints) -> None:
        """Writes a checkpoint of the steps so far; of several processes the first one does."""
        if not self.settings.processes.is_first:
            return
        state = self.trainer.trained, self.trainer.opt_state
        checkpoints.save(self.trainer.num_done, state, self.about)

    def run(self, checkpoints: Checkpoints, say: Say) -> list[float]:
        """Takes the steps that are left; the losses of those that this call took.

        The first Ctrl-C, or SIGTERM, ends the step that is running, writes a checkpoint and stops;
        the second one stops at once. Of several processes one is enough to stop all, after a step.

        Raises:
          Stopped: on Ctrl-C. TrainingError: see there. DiskError: a checkpoint could not be
          written.
        """
        settings, trainer = self.settings, self.trainer
        is_alone = settings.processes.count == 1
        if not is_alone:
            settings.processes.check_same(self.about, trainer.num_done)
        last = settings.recipe.num_steps
        losses: list[float] = []
        recent: list[train.Progress] = []
        with _Signals() as signals:
            while trainer.num_done < last:
                *_, batch, key = self.arguments()
                more = {} if is_alone else {"wants_stop": signals.caught}
                done = trainer.advance(batch, key, **more)
                losses.append(done.loss)
                # The first step compiles; rates are those of the others.
                recent = [done] if len(losses) <= 2 else [*recent[-19:], done]
                step = trainer.num_done
                if step == last or settings.log_every and step % settings.log_every == 0:
                    say(self._line(done, recent))
                if signals.caught if is_alone else done.wants_stop:
                    self.save(checkpoints)
                    raise Stopped(f"stopped after step {step} of {last}, which is saved")
                if step < last and settings.save_every and step % settings.save_every == 0:
                    self.save(checkpoints)
                if settings.eval_every and step % settings.eval_every == 0 and step < last:
                    self.say_evaluation(say)
            self.save(checkpoints)
        return losses

    def say_evaluation(self, say: Say) -> float | None:
        """Judges by the held-out rows, where there are any, and says so; of several processes the
        first one does."""
        if self.held_out is None or not self.settings.processes.is_first:
            return None
        value = self.evaluate()
        say(
            f"step {self.trainer.num_done}: held-out loss {value:.4f}, perplexity "
            f"{math.exp(min(value, 700.0)):.3f}"
        )
        return value

    def export(self, folder: str) -> None:
        """Writes what was trained: adapters as PEFT keeps them, or the model to `folder`/model.

        Raises:
          DiskError: the folder cannot be written to.
        """
        if not self.settings.processes.is_first:
            return
        lora_config = self.settings.lora_config
        if lora_config is not None:
            base = os.path.abspath(self.model.folder)
            peft.save_adapters(folder, self.trainer.trained, lora_config, base)
            return
        config, words = self.model.config, self.model.tokenizer
        path = os.path.join(folder, "model")
        huggingface.save_model(path, config, self.trainer.trained, words)

    def _line(self, done: train.Progress, recent: list[train.Progress]) -> str:
        step, last = self.trainer.num_done, self.settings.recipe.num_steps
        seconds = sum(x.seconds for x in recent)
        rate = sum(x.num_tokens for x in recent) / seconds
        left = seconds / len(recent) * (last - step)
        return (
            f"step {step:>{len(str(last))}}/{last}  loss {done.loss:.4f}  gradient "
            f"{done.grad_norm:.3g}  rate {float(self.settings.recipe.rate(step - 1)):.2e}  "
            f"{rate:.0f} tokens/s  {_clock(left)} left"
        )


def prepare(
    model: Model,
    examples: list[data.Example],
    held_out: list[data.Example],
    settings: Settings,
) -> Session:
    """Packs the examples and makes the state and the step, which is not planned yet.

    Raises:
      ValueError: settings, examples and model do not go together; says how.
    """
    packed = data.pack(examples, settings.length, settings.seed)
    judged = data.pack(held_out, settings.length, settings.seed) if held_out else None
    if judged is not None and len(judged) > settings.max_eval_rows:
        judged = judged.first(settings.max_eval_rows)
    lora_config, recipe = settings.lora_config, settings.recipe
    check(settings)
    settings.devices.check(settings.memory)
    if settings.length > model.config.max_length:
        raise ValueError(
            f"length={settings.length} is more than the model's {model.config.max_length} tokens. "
            "Pass less."
        )
    if settings.tier == "disk" and lora_config is None and settings.disk is None:
        raise ValueError(
            'tier="disk" needs a folder for weights and optimizer state. Pass disk="/scratch".'
        )
    weights = _digest(model.params)  # some are not to be used any more after this
    frozen, trained = model.params, None
    if lora_config is None:
        frozen, trained = None, model.params
        if any(jnp.issubdtype(x.dtype, jnp.integer) for x in jax.tree.leaves(trained)):
            raise ValueError(
                "all weights are to be trained, and some are packed in blocks, which cannot be. "
                'Open the model with quantize="none".'
            )
        trained = _placed(trained, settings)
    else:
        trained = lora.init(frozen, lora_config, jax.random.key(settings.seed))
    shapes = jax.eval_shape(recipe.optimizer().init, _shapes(trained))
    opt_state = _placed(shapes, settings)  # AdamW begins with zeros
    options: dict[str, Any] = {
        "device_memory": settings.device_memory, "host_memory": settings.host_memory,
        "disk": settings.disk, "memory": settings.memory,
        # One cut for good: a run that is resumed gives the same bits.
        "policy": "once",
    }  # fmt: skip
    processes = settings.processes
    loss = train.make_loss(model.config, lora_config)
    about = {
        "model": dataclasses.asdict(model.config), "weights": weights,
        "lora": None if lora_config is None else dataclasses.asdict(lora_config),
        "recipe": dataclasses.asdict(recipe),
        "batch": settings.batch, "length": settings.length, "seed": settings.seed,
        "device_memory": str(settings.memory or settings.device_memory),
        "examples": packed.digest(),
    }  # fmt: skip
    if processes.count == 1:
        step = train.make_step(model.config, lora_config, recipe)
        advance = fast_step = offload(step, donate_argnums=(1, 2), **options)
    else:
        fast_step = offload(train.make_gradients(model.config, lora_config, recipe), **options)
        advance = parallel.make_step(processes, settings.devices, recipe, fast_step)
    trainer = train.Trainer(advance, frozen, trained, opt_state)
    fast_loss = offload(loss, **options)
    return Session(model, settings, fast_step, fast_loss, trainer, packed, judged, about)


def check(settings: Settings) -> None:
    """Checks what does not ask for devices, before processes have joined.

    Raises:
      ValueError: settings do not go together; says how.
    """
    processes, accumulate = settings.processes, settings.recipe.accumulate
    processes.check(settings.lora_config is not None)
    shares = {"processes": processes.count, "devices": settings.devices.count}
    product = accumulate * math.prod(shares.values())
    if settings.batch % product:
        several = "".join(f" times {name}={n}" for name, n in shares.items() if n > 1)
        raise ValueError(
            f"accumulate={accumulate}{several} does not divide batch={settings.batch}. Pass a "
            f"multiple of {product} as batch."
        )


def open_checkpoints(folder: str, settings: Settings, resume: bool, say: Say) -> Checkpoints:
    """The checkpoints of an output folder.

    Raises:
      CheckpointError: there are some, and training is not to be resumed; or they are in use.
    """
    is_first = settings.processes.is_first
    found = Checkpoints(os.path.join(folder, "checkpoints"), settings.keep, say, not is_first)
    if is_first and found.steps() and not resume:
        found.close()
        raise CheckpointError(
            f"{found.folder} has a checkpoint of step {found.steps()[-1]}. Pass --resume to go on "
            "from it, or another --out."
        )
    return found


def _digest(params: Any) -> str:
    """Tells models of one shape apart: by a row of each array, for all of it may take minutes."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        row = np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf
        while row.ndim > 1:
            row = row[-1]
        found.update(np.asarray(row).tobytes())
    return found.hexdigest()


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _placed(tree: Any, settings: Settings) -> Any:
    """Trained state where it belongs: adapters on the devices, weights below them. Shapes stand for
    zeros; arrays in host memory are not to be used any more."""
    if settings.lora_config is not None:
        return settings.devices.everywhere(jax.tree.map(_on_device, tree))

    def put(leaf: Any, sharding: Any) -> Any:
        if settings.tier == "disk":
            assert settings.disk is not None
            return disk_put(leaf, settings.disk, sharding)
        if sharding is None and isinstance(leaf, HostArray):
            return leaf
        found = host_put(leaf, sharding)
        if isinstance(leaf, HostArray):
            leaf.delete()  # not all of them twice
        return found

    return settings.devices.divided(tree, put)


def _on_device(leaf: Any) -> jax.Array:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.zeros(leaf.shape, leaf.dtype)
    return jnp.array(np.asarray(leaf))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


class _Signals:
    """Ctrl-C and SIGTERM: the first is noted, the second acts as ever."""

    def __init__(self) -> None:
        self.caught = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        except ValueError:
            pass  # not the main thread, which alone gets signals
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        self.caught = True
        self.__exit__()
        self._before.clear()

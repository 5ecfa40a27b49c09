"""`jaxoffload generate`: a model continues a text within a device memory budget."""

import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from jaxoffload.command.base import UsageError, new_flags, print_json, progress
from jaxoffload.finetune import generate, models
from jaxoffload.finetune.weights import Model
from jaxoffload.graphs.memgraph import Kind
from jaxoffload.options import format_bytes
from jaxoffload.report.subjects import format_seconds
from jaxoffload.runtime.run import Run
from jaxoffload.transform.offload import offload
from jaxoffload.transform.offloaded import Offloaded

USAGE = """
usage: jaxoffload generate --model=MODEL --prompt=TEXT [--device_memory=6GiB] [--max_tokens=64]

Continues a text within the budget, token by token. What the budget has room for of the weights
stays on the device; the rest comes over the link for each token, and bounds their number a second.
MODEL is a Hugging Face folder or a GGUF file. With --chat the text is a question to a chat model.

  jaxoffload generate --model=llama --chat --prompt="Why is the sky blue?" --device_memory=6GiB

Exit code: 0 done, 1 it does not fit, 2 the command was not understood.
"""
FLAGS = new_flags()
flags.DEFINE_string("model", None, "A Hugging Face folder or a GGUF file.", flag_values=FLAGS)
flags.DEFINE_string("prompt", None, "The text; - reads it from standard input.", flag_values=FLAGS)
flags.DEFINE_bool("chat", False, "It is a question to a chat model.", flag_values=FLAGS)
flags.DEFINE_string("device_memory", "auto", "Budget, as 6GiB; auto: what is free.",
                    flag_values=FLAGS)  # fmt: skip
flags.DEFINE_integer("max_tokens", 64, "New tokens at most.", 1, flag_values=FLAGS)
flags.DEFINE_float("temperature", 0.0, "0: the likeliest token.", 0.0, flag_values=FLAGS)
flags.DEFINE_integer("seed", 0, "Of what is drawn.", flag_values=FLAGS)
flags.DEFINE_string("dtype", None, "Of activations and plain weights, as bfloat16.",
                    flag_values=FLAGS)  # fmt: skip
flags.DEFINE_enum("quantize", None, ["none", "int8", "nf4"], "Pack the matrices; none: unpack "
                  "them; by default they stay as they are.", flag_values=FLAGS)  # fmt: skip
flags.DEFINE_enum("tier", "host", ["host", "disk"], "Where the weights wait.", flag_values=FLAGS)


def main(arguments: Sequence[str]) -> int:
    """Writes the text as it comes."""
    for name in ("model", "prompt"):
        if getattr(FLAGS, name) is None:
            raise UsageError(f"--{name} is missing.")
    if len(arguments) > 0:
        raise UsageError(f"not understood: {' '.join(arguments)}. Put the text into quotes.")
    with progress("opening the model"):
        try:
            model = models.open_model(
                FLAGS.model, dtype=FLAGS.dtype, tier=FLAGS.tier, quantize=FLAGS.quantize
            )
        except (ValueError, ImportError) as error:
            raise UsageError(str(error)) from error
    words = model.tokenizer
    if words is None:
        raise UsageError(f"--model={FLAGS.model} has no tokenizer. Pass one with tokenizer.json.")
    text = sys.stdin.read() if FLAGS.prompt == "-" else FLAGS.prompt
    prompt, made = words.encode(_asked(words, text)), []

    def within(step: Any) -> Any:
        made.append(offload(step, device_memory=FLAGS.device_memory, donate_argnums=(2, 3)))
        return made[0]

    found, times = _written(model, prompt, within, made)
    _tell(model, made[0], words.decode(found, skip_special_tokens=True), found, times)
    return 0


def _asked(words: Any, text: str) -> str:
    if not FLAGS.chat:
        return text
    messages = [{"role": "user", "content": text}]
    return words.apply_chat_template(messages, add_generation_prompt=True)


def _written(
    model: Model, prompt: Sequence[int], within: Any, made: Sequence[Offloaded]
) -> tuple[list[int], list[float]]:
    """The tokens, written as text as they come, and the seconds of each; those of the first two,
    which plan and compile, together."""
    words, found, times, shown = model.tokenizer, [], [], 0
    stream = generate.stream(
        model.config,
        model.params,
        prompt,
        FLAGS.max_tokens,
        temperature=FLAGS.temperature,
        seed=FLAGS.seed,
        stop=words.stop_ids,
        transform=within,
    )
    start = time.perf_counter()
    with progress("planning and compiling"):
        found += [token for _, token in zip(range(2), stream, strict=False)]
    if not FLAGS.json and (bound := _bound(made[0])):
        print(bound, file=sys.stderr, flush=True)
    while True:
        now = time.perf_counter()
        times.append(now - start)
        text, start = words.decode(found, skip_special_tokens=True), now
        # Bytes of a character may come in several tokens.
        if not FLAGS.json and not text.endswith("\ufffd"):
            print(text[shown:], end="", flush=True)
            shown = len(text)
        token = next(stream, None)
        if token is None:
            return found, times
        found.append(token)


def _bound(step: Offloaded) -> str:
    """What the link lets through at best, by the plan and the machine's model; "" where nothing
    moves from token to token."""
    run = step.last_run
    if not isinstance(run, Run) or run.machine is None:
        return ""
    links, moved = (run.machine.to_device, run.machine.disk_read), (Kind.RELOAD, Kind.LOAD)
    found = []
    for name, link, kind in zip(("link", "disk"), links, moved, strict=True):
        if count := run.memgraph.moved_bytes(kind):
            rate = link.bytes_per_second
            found.append((count / rate, f"{format_bytes(count)} at {rate / 1e9:.3g} GB/s ({name})"))
    if not found:
        return ""
    seconds, what = max(found)
    return f"A token moves {what}: at most {1 / seconds:.3g} tokens a second"


def _tell(model: Model, step: Offloaded, text: str, found: list[int], times: list[float]) -> None:
    """How long tokens took, and what bounds that."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    steady, run = sorted(times[1:]), step.last_run
    seconds = steady[len(steady) // 2] if steady else None
    moved = run.bytes_reloaded + run.bytes_loaded if run is not None else 0
    if FLAGS.json:
        print_json(
            {
                "text": text,
                "tokens": found,
                "seconds_a_token": seconds,
                "first_seconds": times[0],
                "weights_bytes": weights,
                "moved_bytes": moved,
            }
        )
        return
    print()
    took = "" if seconds is None else f", {format_seconds(seconds)} each"
    first = "the first two" if len(found) > 1 else "it"
    print(f"{len(found)} tokens{took}; {first} after {format_seconds(times[0])}", file=sys.stderr)
    if isinstance(run, Run):
        print(
            f"A token moves {format_bytes(moved)}; the weights have {format_bytes(weights)}: "
            "more device memory moves less",
            file=sys.stderr,
        )

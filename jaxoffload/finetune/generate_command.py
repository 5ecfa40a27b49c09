"""`jaxoffload generate`: a model continues texts within a device memory budget."""

import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from jaxoffload.command.base import UsageError, new_flags, print_json, progress
from jaxoffload.finetune import generate, models
from jaxoffload.finetune.decode import Decoder
from jaxoffload.finetune.weights import Model
from jaxoffload.options import format_bytes
from jaxoffload.report.subjects import format_seconds
from jaxoffload.runtime.run import Run

USAGE = """
usage: jaxoffload generate --model=MODEL --prompt=TEXT [--device_memory=6GiB] [--max_tokens=64]

Continues a text within the budget, token by token. What the budget has room for of the weights
stays on the device; the rest comes over the link for each token, and bounds their number a second.
Several texts (--prompt more than once) are continued at the price of one.
MODEL is a Hugging Face folder or a GGUF file. With --chat the text is a question to a chat model.

  jaxoffload generate --model=llama --chat --prompt="Why is the sky blue?" --device_memory=6GiB

Exit code: 0 done, 1 it does not fit, 2 the command was not understood.
"""
FLAGS = new_flags()
flags.DEFINE_string("model", None, "A Hugging Face folder or a GGUF file.", flag_values=FLAGS)
flags.DEFINE_multi_string("prompt", None, "The text; - reads it from standard input.",
                          flag_values=FLAGS)  # fmt: skip
flags.DEFINE_bool("chat", False, "It is a question to a chat model.", flag_values=FLAGS)
flags.DEFINE_string("device_memory", "auto", "Budget, as 6GiB; auto: what is free.",
                    flag_values=FLAGS)  # fmt: skip
flags.DEFINE_string("disk", None, "A folder for keys and values of older tokens; without it they "
                    "are in host memory.", flag_values=FLAGS)  # fmt: skip
flags.DEFINE_integer("max_tokens", 64, "New tokens at most.", 1, flag_values=FLAGS)
flags.DEFINE_float("temperature", 0.0, "0: the likeliest token.", 0.0, flag_values=FLAGS)
flags.DEFINE_float("top_p", 1.0, "Draw from the likeliest, which have this probability together.",
                   0.0, 1.0, flag_values=FLAGS)  # fmt: skip
flags.DEFINE_multi_string("stop", [], "A text ends before it.", flag_values=FLAGS)
flags.DEFINE_integer("seed", 0, "Of what is drawn.", flag_values=FLAGS)
flags.DEFINE_string("dtype", None, "Of activations and plain weights, as bfloat16.",
                    flag_values=FLAGS)  # fmt: skip
flags.DEFINE_enum("quantize", None, ["none", "int8", "nf4"], "Pack the matrices; none: unpack "
                  "them; by default they stay as they are.", flag_values=FLAGS)  # fmt: skip
flags.DEFINE_enum("tier", "host", ["host", "disk"], "Where the weights wait.", flag_values=FLAGS)


def main(arguments: Sequence[str]) -> int:
    """Writes the text as it comes; of several each when all are done."""
    for name in ("model", "prompt"):
        if not getattr(FLAGS, name):
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
    if model.tokenizer is None:
        raise UsageError(f"--model={FLAGS.model} has no tokenizer. Pass one with tokenizer.json.")
    decoder = Decoder(
        model.config, model.params, device_memory=FLAGS.device_memory, disk=FLAGS.disk
    )
    texts, times = _written(model, decoder, [_asked(model.tokenizer, p) for p in FLAGS.prompt])
    _tell(model, decoder, texts, times)
    return 0


def _asked(words: Any, text: str) -> str:
    text = sys.stdin.read() if text == "-" else text
    if not FLAGS.chat:
        return text
    messages = [{"role": "user", "content": text}]
    return words.apply_chat_template(messages, add_generation_prompt=True)


def _written(
    model: Model, decoder: Decoder, prompts: Sequence[str]
) -> tuple[list[generate.Text], list[float]]:
    """The texts, one as it comes, and the seconds of each step; those of the first two, which plan
    and compile, together."""
    texts, times = [generate.Text(model.tokenizer, FLAGS.stop) for _ in prompts], []
    is_shown = len(prompts) == 1 and not FLAGS.json
    steps = generate.steps(
        texts, decoder, prompts, FLAGS.max_tokens,
        temperature=FLAGS.temperature, top_p=FLAGS.top_p, seed=FLAGS.seed,
    )  # fmt: skip
    start = time.perf_counter()
    with progress("planning and compiling"):
        for _ in zip(range(2), steps, strict=False):
            pass
    if not FLAGS.json and (bound := decoder.bound()):
        print(
            f"A token moves {format_bytes(bound.bytes)} at {bound.bytes_per_second / 1e9:.3g} GB/s "
            f"({bound.link}): at most {len(prompts) / bound.seconds:.3g} tokens a second",
            file=sys.stderr,
            flush=True,
        )
    while True:
        now = time.perf_counter()
        times.append(now - start)
        if is_shown:
            print(texts[0].piece(), end="", flush=True)
        start = time.perf_counter()
        if next(steps, None) is None:
            break
    if is_shown:
        print(texts[0].piece(is_last=True))
    elif not FLAGS.json:
        for prompt, text in zip(FLAGS.prompt, texts, strict=True):
            print(f"{prompt}\n{text.whole()}\n")
    return texts, times


def _tell(
    model: Model, decoder: Decoder, texts: Sequence[generate.Text], times: list[float]
) -> None:
    """How long steps took, and what bounds that."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    steady, run = sorted(times[1:]), decoder.last_run
    seconds = steady[len(steady) // 2] if steady else None
    moved = run.bytes_reloaded + run.bytes_loaded if run is not None else 0
    if FLAGS.json:
        print_json(
            {
                "texts": [text.whole() for text in texts],
                "tokens": [text.tokens for text in texts],
                "seconds_a_step": seconds,
                "first_seconds": times[0],
                "weights_bytes": weights,
                "moved_bytes": moved,
            }
        )
        return
    count = sum(len(text.tokens) for text in texts)
    took = "" if seconds is None else f", {format_seconds(seconds)} each"
    if len(texts) > 1 and seconds is not None:
        took = f", {format_seconds(seconds)} for one of each text"
    first = "the first two" if max(len(text.tokens) for text in texts) > 1 else "the first"
    print(f"{count} tokens{took}; {first} after {format_seconds(times[0])}", file=sys.stderr)
    if isinstance(run, Run):
        print(
            f"A token moves {format_bytes(moved)}; the weights have {format_bytes(weights)}: "
            "more device memory moves less",
            file=sys.stderr,
        )

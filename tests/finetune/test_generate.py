"""Decoding with a cache against computing the whole text again for every token."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.finetune import generate, model
from jaxoffload.finetune.rope import Rope
from jaxoffload.finetune.weights import Model
from tests.finetune.test_model import OTHERS, TINY, as_tuple, random_params

PROMPT = [3, 1, 4, 1, 5]
CONFIGS = {
    "everything else": OTHERS["everything else"],
    "dynamic": dataclasses.replace(TINY, rope=Rope(1e4, "dynamic", 2.0, 4)),
}


def without_a_cache(config, params, count):
    run = jax.jit(model.forward, static_argnums=0)
    tokens = list(PROMPT)
    for _ in range(count):
        padded = np.zeros((1, len(PROMPT) + count), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(np.argmax(run(config, params, padded)[0, len(tokens) - 1])))
    return tokens[len(PROMPT) :]


def test_greedy_tokens_are_those_of_the_whole_text():
    config = CONFIGS["everything else"]
    params = random_params(config)
    got = generate.generate(config, params, PROMPT, 40)
    assert got == without_a_cache(config, params, 40) and len(set(got)) > 3


def test_greedy_tokens_of_layers_one_by_one_and_below_the_device():
    params = random_params(TINY)
    got = generate.generate(TINY, jo.host_put(params), PROMPT, 9)
    assert got == without_a_cache(TINY, params, 9)
    assert generate.generate(TINY, as_tuple(params), PROMPT, 9) == got


def test_prompts_of_dynamic_ropes_are_not_padded():
    """Padding would count as a longer text, whose rates are others."""
    config = CONFIGS["dynamic"]
    params = random_params(config)
    last = jax.jit(model.forward, static_argnums=0)(config, params, np.array([PROMPT]))[0, -1]
    assert generate.generate(config, params, PROMPT, 1) == [int(np.argmax(last))]
    padded = np.array([PROMPT + [0] * 27])
    other = jax.jit(model.forward, static_argnums=0)(config, params, padded)[0, len(PROMPT) - 1]
    assert np.abs(other - last).max() > 1e-3


def test_one_program_takes_every_token():
    params = random_params(TINY)
    shapes = []

    def counted(step):
        def traced(params, tokens, *rest):
            shapes.append(tokens.shape)
            return step(params, tokens, *rest)

        return jax.jit(traced)

    generate.generate(TINY, params, PROMPT, 12, transform=counted)
    assert shapes == [(1, 32), (1, 1)]


def test_drawn_tokens_follow_the_seed_and_the_temperature():
    params = random_params(TINY)
    draws = [
        generate.generate(TINY, params, PROMPT, 12, temperature=1.0, seed=s) for s in (0, 0, 1)
    ]
    assert draws[0] == draws[1] != draws[2]
    cold = generate.generate(TINY, params, PROMPT, 12, temperature=1e-4, seed=3)
    assert cold == generate.generate(TINY, params, PROMPT, 12)


def test_it_stops_after_a_token_and_at_the_end():
    params = random_params(TINY)
    whole = generate.generate(TINY, params, PROMPT, 12)
    stop = whole[4]
    assert (
        generate.generate(TINY, params, PROMPT, 12, stop=[stop]) == whole[: whole.index(stop) + 1]
    )
    assert generate.generate(TINY, params, PROMPT, 0) == []


def test_within_a_part_of_the_memory_the_tokens_are_the_same():
    params = random_params(TINY)
    steps = []

    def offloaded(step):
        steps.append(jo.offload(step, device_memory="60KiB", cut="always"))
        return steps[0]

    got = generate.generate(TINY, jo.host_put(params), PROMPT, 4, transform=offloaded)
    assert got == generate.generate(TINY, params, PROMPT, 4)
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    assert steps[0].last_run.peak_device_bytes <= 60 * 1024 < size


@pytest.mark.parametrize(
    "prompt, match", [([], "at least one"), ([[1]], "shape"), ([1, 64], "tokens 1 to 64.*0 to 63")]
)
def test_prompts_that_make_no_sense_are_refused(prompt, match):
    with pytest.raises(ValueError, match=match):
        generate.generate(TINY, random_params(TINY), prompt, 3)


def test_an_answer_needs_a_tokenizer():
    opened = Model(TINY, random_params(TINY), None, "/models/x")
    with pytest.raises(ValueError, match="/models/x has no tokenizer"):
        generate.answer(opened, [{"role": "user", "content": "Hi"}])

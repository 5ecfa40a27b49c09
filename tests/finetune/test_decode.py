"""Decoding with a cache that grows against computing the whole text again for every token."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jaxoffload as jo
from jaxoffload.finetune import decode, kv_cache, model
from jaxoffload.finetune.rope import Rope
from jaxoffload.finetune.sampling import make_sampling
from tests.finetune.test_model import OTHERS, TINY, as_tuple, random_params

PROMPT = [3, 1, 4, 1, 5]
CONFIGS = {
    "everything else": OTHERS["everything else"],
    "dynamic": dataclasses.replace(TINY, rope=Rope(1e4, "dynamic", 2.0, 4)),
}
WIDE = model.Config(64, 128, 3, 4, 2, 192)
LONG = np.random.default_rng(3).integers(0, 64, 75).tolist()


def without_a_cache(config, params, count, prompt=PROMPT):
    run = jax.jit(model.forward, static_argnums=0)
    tokens = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, len(prompt) + count), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(np.argmax(run(config, params, padded)[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks are joined after 64 tokens; parts of prompts have 64, and are several blocks."""
    monkeypatch.setattr(kv_cache, "TOKENS", 32)
    monkeypatch.setattr(kv_cache, "_BLOCKS", 2)
    monkeypatch.setattr(decode, "_PREFILL", 64)


def test_greedy_tokens_are_those_of_the_whole_text():
    config = CONFIGS["everything else"]
    params = random_params(config)
    got = decode.generate(config, params, PROMPT, 80)
    assert got == without_a_cache(config, params, 80) and len(set(got)) > 3


def test_a_prompt_and_what_follows_may_be_together():
    config = dataclasses.replace(CONFIGS["everything else"], ffn_width=1024)
    params = random_params(config)
    steps = []
    got = decode.generate(config, params, PROMPT, 40, transform=counted(steps))
    assert got == without_a_cache(config, params, 40) and len(set(got)) > 3
    assert steps == [((1, 32), 0), ((1, 1), 0)]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("prompt", [PROMPT, LONG[:32], LONG[:33], LONG], ids=len)
def test_blocks_are_joined_and_prompts_come_in_parts(small_blocks, prompt):
    config = CONFIGS["everything else"]
    params = random_params(config)
    got = decode.generate(config, params, prompt, 70)
    assert got == without_a_cache(config, params, 70, prompt) and len(set(got)) > 3


def test_greedy_tokens_of_layers_one_by_one_and_below_the_device(small_blocks):
    params = random_params(TINY)
    got = decode.generate(TINY, jo.host_put(params), PROMPT, 70)
    assert got == without_a_cache(TINY, params, 70)
    assert decode.generate(TINY, as_tuple(params), PROMPT, 70) == got


@pytest.mark.parametrize("name", ["everything else", "dynamic"])
def test_several_texts_are_those_of_each_by_itself(small_blocks, name):
    config = CONFIGS[name]
    params = random_params(config)
    prompts = [PROMPT, LONG[:1], LONG[:40]] if name != "dynamic" else [PROMPT, LONG[:5]]
    want = [decode.generate(config, params, prompt, 40) for prompt in prompts]
    assert decode.generate(config, params, prompts, 40) == want
    stop = want[1][3]
    short = [text[: text.index(stop) + 1] if stop in text else text for text in want]
    assert decode.generate(config, params, prompts, 40, stop=[stop]) == short
    assert len({len(text) for text in short}) > 1


def test_the_last_token_of_a_dynamic_rope_decides_its_rates():
    """Padding would count as a longer text, whose rates are others, if it came behind."""
    config = CONFIGS["dynamic"]
    params = random_params(config)
    last = jax.jit(model.forward, static_argnums=0)(config, params, np.array([PROMPT]))[0, -1]
    assert decode.generate(config, params, PROMPT, 1) == [int(np.argmax(last))]
    padded = np.array([PROMPT + [0] * 27])
    other = jax.jit(model.forward, static_argnums=0)(config, params, padded)[0, len(PROMPT) - 1]
    assert np.abs(other - last).max() > 1e-3


def counted(steps):
    """Makes a function of a step that notes the shape of its tokens and how many are in blocks."""

    def traced(step):
        def call(params, tokens, past, *rest):
            steps.append((tokens.shape, sum(keys.shape[2] for keys, _ in past.blocks)))
            return step(params, tokens, past, *rest)

        return jax.jit(call)

    return traced


def test_few_programs_take_every_token(small_blocks):
    shapes = []
    decode.generate(TINY, random_params(TINY), PROMPT, 130, transform=counted(shapes))
    assert shapes == [((1, 32), 0), *(((1, 1), 32 * n) for n in (1, 2, 4, 8))]


def test_a_step_adds_to_few_bytes_where_weights_are_small():
    few, many = [], []
    decode.generate(TINY, random_params(TINY), PROMPT, 40, transform=counted(few))
    wide = dataclasses.replace(WIDE, ffn_width=1024)
    decode.generate(wide, random_params(wide), PROMPT, 40, transform=counted(many))
    assert few == [((1, 32), 0), ((1, 1), 32), ((1, 1), 64)]
    assert many == [((1, 32), 0), ((1, 1), 0)]


def test_drawn_tokens_follow_the_seed_and_the_temperature():
    params = random_params(TINY)
    draws = [decode.generate(TINY, params, PROMPT, 12, temperature=1.0, seed=s) for s in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    cold = decode.generate(TINY, params, PROMPT, 12, temperature=1e-4, seed=3)
    assert cold == decode.generate(TINY, params, PROMPT, 12)
    certain = decode.generate(TINY, params, PROMPT, 12, temperature=1.0, top_p=1e-6, seed=3)
    assert certain == cold
    both = decode.generate(TINY, params, [PROMPT, PROMPT], 12, temperature=1.0)
    assert both[0] != both[1]


def test_it_stops_after_a_token_and_at_the_end():
    params = random_params(TINY)
    whole = decode.generate(TINY, params, PROMPT, 12)
    stop = whole[4]
    assert decode.generate(TINY, params, PROMPT, 12, stop=[stop]) == whole[: whole.index(stop) + 1]
    assert decode.generate(TINY, params, PROMPT, 0) == []


class Late:
    """A token that is still being computed, or not."""

    def __init__(self, value, ready):
        self._value, self._ready = value, ready

    def is_ready(self):
        return self._ready

    def __array__(self, dtype=None, copy=None):
        return np.full((1, 1), self._value, np.int32)

    shape = (1, 1)


@pytest.mark.parametrize("ready", [False, True])
def test_the_end_is_seen_one_step_late_where_steps_are_not_waited_for(ready):
    calls = []

    def fake(step):
        def call(params, tokens, past, recent, sampling):
            calls.append(np.asarray(tokens))
            return Late(len(calls), ready), recent

        return call

    found = decode.generate(TINY, random_params(TINY), PROMPT, 10, stop=[3], transform=fake)
    assert found == [1, 2, 3]
    assert len(calls) == (3 if ready else 4)
    calls.clear()
    assert decode.generate(TINY, random_params(TINY), PROMPT, 2, transform=fake) == [1, 2]
    assert len(calls) == 2


@pytest.mark.drawn(1)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_within_a_part_of_the_memory_the_tokens_are_the_same(tier, small_blocks, tmp_path):
    params = random_params(WIDE)
    prompts = [PROMPT, LONG[:40]]
    want = decode.generate(WIDE, params, prompts, 40)
    decoder = decode.Decoder(
        WIDE,
        jo.host_put(params),
        device_memory="700KiB",
        disk=str(tmp_path) if tier == "disk" else None,
    )
    assert decoder.generate(prompts, 40) == want
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    run = decoder.last_run
    assert run.peak_device_bytes <= 700 * 1024 < size
    assert (run.bytes_loaded > 0) == (tier == "disk")
    bound = decoder.bound()
    assert bound.link == "link" and bound.bytes == run.bytes_reloaded
    assert bound.seconds == bound.bytes / run.machine.to_device.bytes_per_second
    # What was planned serves the next text.
    assert decoder.generate(prompts, 3) == [text[:3] for text in want]


def test_tokens_are_drawn_as_without_a_budget():
    params = random_params(WIDE)
    options = {"temperature": 0.8, "top_p": 0.9, "seed": 5}
    want = decode.generate(WIDE, params, [PROMPT, LONG], 6, **options)
    decoder = decode.Decoder(WIDE, jo.host_put(params), device_memory="900KiB")
    assert decoder.generate([PROMPT, LONG], 6, **options) == want


@pytest.mark.parametrize(
    "prompt, match",
    [
        ([], "at least one"),
        ([[[1]]], "shape"),
        ([[1], []], "at least one"),
        ([1, 64], "tokens 1 to 64.*0 to 63"),
    ],
)
def test_prompts_that_make_no_sense_are_refused(prompt, match):
    with pytest.raises(ValueError, match=match):
        decode.generate(TINY, random_params(TINY), prompt, 3)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        decode.generate(TINY, random_params(TINY), PROMPT, 3, **options)


def test_a_cache_on_disk_is_for_offloaded_steps(tmp_path):
    with pytest.raises(ValueError, match="device_memory"):
        decode.Decoder(TINY, random_params(TINY), disk=str(tmp_path))


def test_a_step_needs_room_for_one_block_not_for_a_layer_of_the_cache():
    source, count, batch = np.random.default_rng(0), 8, 4
    cache = kv_cache.KVCache((3, batch, 2, 32), "float32", np.zeros(batch, np.int32), "host")
    block = (3, batch, 256, 2, 32)
    keys, values = source.standard_normal((2, count, *block)).astype(np.float32)
    past = kv_cache.Past(tuple(zip(keys, values, strict=True)), np.int32(2000), cache.past.starts)
    tokens = np.ones((batch, 1), np.int32)
    sampling = make_sampling(batch, 0.0, 1.0, 0)
    step = functools.partial(decode.next_token, WIDE)
    params = random_params(WIDE)
    recent = jax.tree.map(np.asarray, cache.recent)
    want, _ = jax.jit(step)(params, tokens, past, recent, sampling)
    lower = jo.host_put((params, past.blocks))
    offloaded = jo.offload(step, device_memory="1MiB", donate_argnums=decode.DONATED)
    given = dataclasses.replace(past, blocks=lower[1])
    got, _ = offloaded(lower[0], tokens, given, cache.recent, sampling)
    assert np.array_equal(got, want)
    a_layer = sum(x.nbytes for pair in past.blocks for x in pair) // 3
    assert offloaded.last_run.peak_device_bytes <= 2**20 < a_layer / 3

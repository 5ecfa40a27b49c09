"""Examples, packing and order, with a tokenizer of one token a character."""

import dataclasses
import json

import numpy as np
import pytest

from jaxoffload.finetune import data, stdlib


class Characters:
    """Every character is a token; a chat is "<user>text|<assistant>text|"."""

    eos_id = 0

    def encode(self, text):
        return [ord(x) for x in text]

    def apply_chat_template(self, messages, add_generation_prompt=False):
        text = "".join(f"<{m['role']}>{m['content']}|" for m in messages)
        return text + "<assistant>" * add_generation_prompt


class Forgetful(Characters):
    """Leaves out what the assistant said before, as some templates do with its thoughts."""

    def apply_chat_template(self, messages, add_generation_prompt=False):
        last = [m for m in messages if m["role"] != "assistant" or m is messages[-1]]
        return super().apply_chat_template(last, add_generation_prompt)


class Thoughtful(Characters):
    """Asks for thoughts that are not kept in the answer."""

    def apply_chat_template(self, messages, add_generation_prompt=False):
        text = super().apply_chat_template(messages, add_generation_prompt)
        return text + "<think>" * add_generation_prompt


CHAT = Characters()


def said(role, content):
    return {"role": role, "content": content}


def counted(example):
    return "".join(chr(t) for t, c in zip(example.tokens, example.counts, strict=True) if c)


def whole(example):
    return "".join(map(chr, example.tokens))


def test_only_what_the_assistant_says_counts():
    messages = [said("system", "s"), said("user", "a?"), said("assistant", "b"),
                said("user", "c?"), said("assistant", "d"), said("user", "unanswered")]  # fmt: skip
    example = data.of_messages(messages, CHAT)
    assert whole(example) == "<system>s|<user>a?|<assistant>b|<user>c?|<assistant>d|"
    assert counted(example) == "b|d|"
    completion = data.of_completion("a?", "bc", CHAT)
    assert whole(completion) == "a?bc\0" and counted(completion) == "bc\0"
    assert counted(data.of_text("abc", CHAT)) == "abc\0"


def write(path, *lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


def test_files_are_read_in_order_each_in_its_form(tmp_path):
    lines = write(
        tmp_path / "a.jsonl",
        {"messages": [said("user", "q"), said("assistant", "é")], "id": 3},
        "",
        {"prompt": "p", "completion": "c"},
        {"text": "t"},
    )
    text = write(tmp_path / "b.txt", "plain text")
    examples = data.read([lines, text], CHAT)
    assert list(map(counted, examples)) == ["é|", "c\0", "t\0", "plain text\0"]
    assert [x.source for x in examples[:3]] == [f"{lines}:{i}" for i in (1, 3, 4)]
    assert [x.whole for x in examples] == [True, True, False, False]


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "is not JSON"),
        ("[1]", "but list"),
        ({"message": []}, r"but \['message'\]"),
        ({"messages": []}, "must be a list of messages"),
        ({"messages": [{"role": "user"}]}, 'no "role" and "content"'),
        ({"messages": [said("user", ["parts"])]}, "must be text"),
        ({"messages": [said("user", "q")]}, 'no message has the role "assistant"'),
        ({"prompt": 3, "completion": "c"}, '"prompt" must be text'),
        ({"prompt": "p", "completion": ""}, '"completion" is empty'),
        ({"text": None}, '"text" must be text'),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, words):
    path = write(tmp_path / "a.jsonl", {"text": "fine"}, line)
    with pytest.raises(ValueError, match=f"a.jsonl:2: .*{words}"):
        data.read([path], CHAT)


def test_files_that_are_no_text_or_empty_are_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n\xff")
    with pytest.raises(ValueError, match="a.txt:3: is not UTF-8"):
        data.read([tmp_path / "a.txt"], CHAT)
    with pytest.raises(ValueError, match="b.jsonl: has no example"):
        data.read([write(tmp_path / "b.jsonl", "")], CHAT)
    with pytest.raises(FileNotFoundError, match="c.txt"):
        data.read([tmp_path / "c.txt"], CHAT)


def test_a_template_that_rewrites_what_was_said_is_refused():
    messages = [said("user", "a"), said("assistant", "b"), said("user", "c"),
                said("assistant", "d")]  # fmt: skip
    with pytest.raises(ValueError, match="x:1: the chat template writes .* when message 4"):
        data.of_messages(messages, Forgetful(), "x:1")
    with pytest.raises(ValueError, match="x:1: the chat template writes .* when message 2"):
        data.of_messages(messages[:2], Thoughtful(), "x:1")


def examples_of(*sizes, whole=True):
    """Examples whose tokens tell where they come from: 1000 times the example, plus the place."""
    return [
        data.Example(
            1000 * (i + 1) + np.arange(n, dtype=np.int32), np.arange(n) >= min(2, n - 1), whole
        )
        for i, n in enumerate(sizes)
    ]


def test_every_example_is_a_segment_with_its_own_targets_and_weights():
    sizes = np.random.default_rng(0).integers(3, 20, 50).tolist()
    packed = data.pack(examples_of(*sizes), 24, seed=1)
    seen = []
    for tokens, targets, weights, segments in zip(*packed.arrays().values(), strict=True):
        for segment in range(1, segments.max() + 1):
            own = np.flatnonzero(segments == segment)
            assert (np.diff(own) == 1).all()  # one piece
            i, size = tokens[own[0]] // 1000 - 1, len(own) + 1
            want = 1000 * (i + 1) + np.arange(size)
            np.testing.assert_array_equal(tokens[own], want[:-1])
            np.testing.assert_array_equal(targets[own], want[1:])
            np.testing.assert_array_equal(weights[own], np.arange(1, size) >= 2)
            assert size == sizes[i]
            seen.append(int(i))
        assert not weights[segments == 0].any()
    assert sorted(seen) == list(range(50)) and packed.num_examples == 50
    assert (packed.segments > 0).mean() > 0.9  # packing fills the rows
    assert packed.num_truncated == packed.num_dropped == 0
    assert len(data.pack(examples_of(6, 5, 4), 12, seed=1)) == 1  # to the last token


def test_too_long_examples_lose_their_ends_and_say_so():
    packed = data.pack(examples_of(30, 5), 8, seed=0)
    assert packed.num_truncated == 1 and packed.num_lost_tokens == 30 - 9
    row = packed.tokens[(packed.tokens == 1000).any(axis=1)][0]
    np.testing.assert_array_equal(row, 1000 + np.arange(8))
    assert "1 were too long and lost 21 tokens" in packed.report()
    silent = data.Example(np.arange(30, dtype=np.int32), np.arange(30) > 20)
    assert data.pack([silent, *examples_of(5)], 8, seed=0).num_dropped == 1
    with pytest.raises(ValueError, match="no token of 1 examples counts within length=8"):
        data.pack([silent], 8, seed=0)
    with pytest.raises(ValueError, match="length=1"):
        data.pack(examples_of(5), 1, seed=0)


@pytest.mark.parametrize("size", [2, 9, 10, 17, 18, 33])
def test_a_long_text_is_cut_without_loss(size):
    text = data.Example(np.arange(size, dtype=np.int32), np.ones(size, bool), whole=False)
    packed = data.pack([text], 8, seed=0)
    targets = packed.targets[packed.weights > 0]
    np.testing.assert_array_equal(np.sort(targets), np.arange(1, size))
    assert packed.num_truncated == packed.num_lost_tokens == packed.num_dropped == 0


def test_steps_are_a_function_of_seed_and_step_and_take_every_row_before_any_again():
    packed = data.pack(examples_of(*[6] * 14), 5, seed=0)
    assert len(packed) == 14

    def taken(steps, seed=3):
        batches = [data.batch_at(packed, 4, seed, step) for step in steps]
        return np.concatenate([b["tokens"][:, 0] // 1000 for b in batches])

    order = taken(range(7))  # two turns of 14 rows, the border within step 3
    assert sorted(order[:14]) == sorted(order[14:]) == list(range(1, 15))
    assert order[:14].tolist() != order[14:].tolist()
    np.testing.assert_array_equal(taken([5]), order[20:24])
    assert taken(range(7), seed=4).tolist() != order.tolist()
    few = data.pack(examples_of(6, 6), 5, seed=0)
    assert data.batch_at(few, 5, 0, 0)["tokens"].shape == (5, 5)


def test_other_data_has_another_digest():
    one, same = (data.pack(examples_of(6, 7, 8), 10, seed=0) for _ in range(2))
    assert one.digest() == same.digest()
    assert one.digest() != data.pack(examples_of(6, 7, 9), 10, seed=0).digest()
    turned = {name: array.reshape(-1, 5) for name, array in same.arrays().items()}
    assert dataclasses.replace(same, **turned).digest() != same.digest()
    one.weights[0, 3] = 1 - one.weights[0, 3]
    assert one.digest() != same.digest()


def test_judging_goes_through_all_rows_once_and_fills_the_last_batch_with_nothing():
    packed = data.pack(examples_of(*[6] * 5), 5, seed=0)
    batches = list(data.in_order(packed, 2))
    assert [b["tokens"].shape for b in batches] == [(2, 5)] * 3
    assert sum(b["weights"].sum() for b in batches) == packed.weights.sum()
    assert not batches[-1]["weights"][1].any() and not batches[-1]["segments"][1].any()


def test_held_out_examples_are_a_seeded_share_and_never_all():
    examples = examples_of(*[6] * 40)
    seen, held = data.split(examples, 0.1, seed=0)
    assert len(held) == 4 and len(seen) == 36
    assert {id(x) for x in seen} | {id(x) for x in held} == {id(x) for x in examples}
    assert [id(x) for x in data.split(examples, 0.1, seed=0)[1]] == [id(x) for x in held]
    assert len(data.split(examples, 0.001, seed=0)[1]) == 1
    assert data.split(examples, 0.0, seed=0)[1] == []
    with pytest.raises(ValueError, match="of 1 examples 1 would be held out"):
        data.split(examples[:1], 0.1, seed=0)
    with pytest.raises(ValueError, match="share=1.0"):
        data.split(examples, 1.0, seed=0)


def test_pairs_of_the_standard_library_are_functions_without_their_docstrings():
    pairs = stdlib.pairs(300)
    assert len(pairs) == 300 and pairs == stdlib.pairs(300)
    for pair in pairs:
        question, answer = (m["content"] for m in pair.messages)
        assert answer and f'"""{answer.splitlines()[0]}' not in question
        assert "def " in question and question.count("```") == 2
    seen, held = stdlib.split(pairs)
    assert seen and held and not {p.module for p in seen} & {p.module for p in held}

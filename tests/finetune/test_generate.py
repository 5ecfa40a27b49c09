"""Texts as their tokens come: whole, in pieces, up to what ends them."""

import pytest

from jaxoffload.finetune import decode, generate, models
from jaxoffload.finetune.weights import Model
from tests.finetune.test_model import TINY, random_params
from tests.finetune.tiny import CONFIG, make_folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = make_folder(tmp_path_factory.mktemp("tiny"))
    return models.open_model(path / "model")


class Letters:
    """A tokenizer: a byte each."""

    stop_ids = (0,)

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens, skip_special_tokens):
        assert skip_special_tokens
        return bytes(t for t in tokens if t).decode(errors="replace")


def pieces(text, stop, is_last=True):
    found, made = [], generate.Text(Letters(), stop)
    for token in text.encode():
        made.add(token)
        found.append(made.piece())
    return [*found, made.piece(is_last=is_last)], made


def test_a_character_of_several_bytes_comes_whole():
    found, made = pieces("aé√b", ())
    assert found == ["a", "", "é", "", "", "√", "b", ""]
    assert made.whole() == "aé√b" and not made.has_ended
    cut = generate.Text(Letters(), ())
    for token in "aé".encode()[:2]:
        cut.add(token)
    assert (cut.piece(), cut.piece(is_last=True)) == ("", "a\ufffd")


def test_what_may_be_the_beginning_of_the_end_is_held_back():
    found, made = pieces("a<b<end>c", ["<end>", "zz"])
    assert "".join(found) == "a<b" == made.whole() and made.has_ended
    assert found[:4] == ["a", "", "<b", ""]
    found, made = pieces("a<en", ["<end>"])
    assert found == ["a", "", "", "", "<en"] and not made.has_ended


def test_the_first_of_several_ends_counts():
    assert pieces("xaby", ["by", "a"])[1].whole() == "x"


@pytest.mark.parametrize("stop", ["end", [""], [3]])
def test_ends_that_are_none_are_refused(stop, tiny):
    with pytest.raises(ValueError, match="stop="):
        models.generate(tiny, "ab", 3, stop=stop)


def test_texts_are_those_of_their_tokens(tiny):
    words = tiny.tokenizer
    prompts = ["ab ba", "b"]
    tokens = decode.generate(
        CONFIG, tiny.params, [words.encode(p) for p in prompts], 9, stop=words.stop_ids
    )
    want = [words.decode(each, skip_special_tokens=True) for each in tokens]
    assert models.generate(tiny, prompts, 9) == want
    assert models.generate(tiny, prompts[0], 9) == want[0]
    assert models.generate(tiny, prompts, 9, device_memory="96KiB") == want
    assert "".join(models.stream(tiny, prompts[0], 9)) == want[0]
    decoder = decode.Decoder(CONFIG, tiny.params, device_memory="96KiB")
    found = list(models.stream(tiny, prompts[0], 9, decoder=decoder))
    assert "".join(found) == want[0] and len(found) > 1
    assert decoder.last_run.peak_device_bytes <= 96 * 1024


def test_texts_end_before_what_ends_them(tiny):
    want = models.generate(tiny, ["ab ba", "b"], 12)
    stop = want[0][3:5]
    ended = [text.partition(stop)[0] for text in want]
    assert models.generate(tiny, ["ab ba", "b"], 12, stop=[stop]) == ended
    assert "".join(models.stream(tiny, "ab ba", 12, stop=[stop])) == ended[0]


def test_other_weights_may_answer(tiny):
    other = random_params(CONFIG, 5)
    question = [{"role": "user", "content": "Hi"}]
    prompt = tiny.tokenizer.apply_chat_template(question, add_generation_prompt=True)
    want = models.generate(Model(CONFIG, other, tiny.tokenizer, ""), prompt, 8)
    assert models.answer(tiny, question, 8, params=other) == want
    assert models.answer(tiny, question, 8) != want


def test_an_answer_needs_a_tokenizer():
    opened = Model(TINY, random_params(TINY), None, "/models/x")
    for ask in (
        lambda: models.answer(opened, [{"role": "user", "content": "Hi"}]),
        lambda: models.generate(opened, "Hi"),
        lambda: next(models.stream(opened, "Hi")),
    ):
        with pytest.raises(ValueError, match="/models/x has no tokenizer"):
            ask()


def test_no_prompts_have_no_texts(tiny):
    assert models.generate(tiny, []) == []

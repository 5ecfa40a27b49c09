"""`jaxoffload generate`, as one would call it."""

import json
import re

import pytest

from jaxoffload.command import table
from jaxoffload.finetune import decode, models
from tests.finetune.tiny import make_folder


@pytest.fixture
def folder(tmp_path):
    made = make_folder(tmp_path)
    return made if made is not None else tmp_path


def call(capsys, *words):
    code = table.run(["generate", *words])
    out, err = capsys.readouterr()
    return code, out, err


def wanted(model, text, count):
    prompt = model.tokenizer.encode(text)
    found = decode.generate(
        model.config, model.params, prompt, count, stop=model.tokenizer.stop_ids
    )
    return found, model.tokenizer.decode(found, skip_special_tokens=True)


@pytest.mark.drawn(1)
@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_text_is_that_without_a_budget(folder, tier, capsys):
    path = str(model_path(folder))
    model = models.open_model(path)
    tokens, text = wanted(model, "ab ba", 6)
    words = (f"--model={path}", "--prompt=ab ba", "--max-tokens=6", f"--tier={tier}")
    code, out, _ = call(capsys, *words, "--device-memory=1MiB", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["tokens"] == [tokens]
    assert found["texts"] == [text]
    code, out, err = call(capsys, *words, "--device-memory=1MiB")
    assert code == 0
    assert out == text + "\n"
    assert f"{len(tokens)} tokens" in err
    # Told before it is so: what moves, by what link.
    code, out, err = call(capsys, *words, "--device-memory=96KiB")
    assert (code, out) == (0, text + "\n")
    assert re.search(
        r"A token moves .*B at .* GB/s \((link|disk)\): at most .* tokens a second", err
    )


@pytest.mark.filterwarnings("ignore::jaxoffload.OffloadWarning")
def test_several_texts_each_up_to_its_end(folder, tmp_path, capsys):
    path = str(model_path(folder))
    model = models.open_model(path)
    texts = [wanted(model, text, 6)[1] for text in ("ab ba", "b")]
    stop = texts[0][2]
    ended = [text.partition(stop)[0] for text in texts]
    words = (f"--model={path}", "--prompt=ab ba", "--prompt=b", "--max-tokens=6")
    words += (f"--stop={stop}", f"--disk={tmp_path}", "--device-memory=96KiB")
    code, out, err = call(capsys, *words)
    assert (code, out) == (0, f"ab ba\n{ended[0]}\n\nb\n{ended[1]}\n\n")
    assert "for one of each text" in err
    drawn = [
        call(capsys, *words[:4], "--temperature=2", "--top-p=0.9", f"--seed={seed}", "--json")[1]
        for seed in (0, 0, 1)
    ]
    found = [json.loads(out)["tokens"] for out in drawn]
    assert found[0] == found[1] != found[2]


def model_path(folder):
    config = next(folder.rglob("config.json"))
    return config.parent


@pytest.mark.parametrize(
    ("words", "text", "status"),
    [
        ((), "--model is missing", 2),
        (("--model={}",), "--prompt is missing", 2),
        (("--model={}", "--prompt=ab", "more"), "not understood: more", 2),
        (("--model={}/nothing", "--prompt=ab"), "there is no", 1),
        (("--model={}", "--prompt=ab", "--device-memory=1KiB"), "below the smallest feasible", 1),
        (("--model={}", "--prompt=ab", "--max-tokens=0"), "max_tokens", 2),
        (("--model={}", "--prompt=ab", "--top-p=1.5"), "top_p", 2),
    ],
)
def test_what_cannot_be_is_refused(words, text, status, folder, capsys):
    words = [word.format(model_path(folder)) for word in words]
    code, out, err = call(capsys, *words)
    assert (code, out) == (status, "")
    assert text in err

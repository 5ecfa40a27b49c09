"""Tokenizers of folders, in and out, and chat templates in their sandbox."""

import json

import pytest

from jaxoffload.finetune import tokenizer
from jaxoffload.finetune.tokenizer import Tokenizer

library = pytest.importorskip("tokenizers", reason="pip install 'jaxoffload[finetune]'")
pytest.importorskip("jinja2", reason="pip install 'jaxoffload[finetune]'")

TEMPLATE = """{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('no role ' + message['role']) }}
    {%- endif %}
    {{- bos_token + message['role'] + ': ' + message['content'] | trim + eos_token }}
    {%- if loop.index == 3 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{% endif %}"""


@pytest.fixture
def words():
    vocabulary = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4, "Ġ": 5}
    backend = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = library.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return Tokenizer(backend, bos_id=0, eos_id=1, chat_template=TEMPLATE)


MESSAGES = [{"role": "user", "content": " ab "}, {"role": "assistant", "content": "b"}]


def test_special_tokens_are_added_when_asked_for(words):
    assert words.encode("ab a") == [4, 5, 2]
    assert words.encode("ab a", add_special_tokens=True) == [0, 4, 5, 2]
    assert words.encode("<s>ab</s>") == [0, 4, 1]
    assert words.decode([0, 4, 5, 2, 1]) == "<s>ab a</s>"
    assert words.decode([0, 4, 5, 2, 1], skip_special_tokens=True) == "ab a"
    assert words.vocab_size == 6


def test_templates_see_messages_and_special_tokens(words):
    assert words.apply_chat_template(MESSAGES) == "<s>user: ab</s><s>assistant: b</s>"
    text = words.apply_chat_template(MESSAGES * 3, add_generation_prompt=True)
    assert text.count("<s>") == 3 and text.endswith("</s>assistant:")
    words.chat_template = "{{ messages | tojson }} {{ strftime_now('%Y') | length }}"
    assert words.apply_chat_template([{"role": "é"}]) == '[{"role": "é"}] 4'


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for x in range(10000000) %}{% endfor %}",
        "{% if %}",
        "{{ raise_exception('no') }}",
        "{{ messages[0]['nothing'] + 'x' }}",
    ],
)
def test_templates_reach_nothing_else(words, template):
    words.chat_template = template
    with pytest.raises(ValueError, match="the model's template refuses"):
        words.apply_chat_template(MESSAGES)
    assert len(MESSAGES) == 2


def test_messages_that_a_template_refuses_are_told_of(words):
    with pytest.raises(ValueError, match="no role tool"):
        words.apply_chat_template([{"role": "tool", "content": ""}])
    words.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        words.apply_chat_template(MESSAGES)


def test_a_folder_gives_back_what_was_saved(words, tmp_path):
    words.save(tmp_path)
    again = tokenizer.from_folder(tmp_path)
    assert (again.bos_id, again.eos_id, again.chat_template) == (0, 1, TEMPLATE)
    assert again.encode("ab<s> ba") == words.encode("ab<s> ba")
    assert tokenizer.from_folder(tmp_path / "nothing") is None


def test_the_spellings_of_tokenizer_configs_are_read(words, tmp_path):
    words.save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = tmp_path / "tokenizer_config.json"
    entry = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>"}
    for template in (
        TEMPLATE,
        [{"name": "tool", "template": ""}, {"name": "default", "template": TEMPLATE}],
    ):
        config.write_text(json.dumps(entry | {"chat_template": template}))
        again = tokenizer.from_folder(tmp_path)
        assert (again.bos_id, again.eos_id, again.chat_template) == (0, 1, TEMPLATE)
    config.write_text("[1]")
    with pytest.raises(ValueError, match="tokenizer_config.json holds a list"):
        tokenizer.from_folder(tmp_path)
    config.unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert tokenizer.from_folder(tmp_path).eos_id == 1


def test_the_end_of_a_turn_ends_an_answer(words, tmp_path):
    """Which is another token than the end of a text, and told of beside the tokenizer."""
    assert words.stop_ids == (1,)
    words.save(tmp_path)
    assert tokenizer.from_folder(tmp_path).stop_ids == (1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1]}))
    again = tokenizer.from_folder(tmp_path)
    assert again.stop_ids == (1, 3)
    again.save(tmp_path)
    assert tokenizer.from_folder(tmp_path).stop_ids == (1, 3)


def test_a_missing_package_is_named(words, monkeypatch):
    monkeypatch.setattr(tokenizer.importlib, "import_module", _missing)
    with pytest.raises(
        ImportError, match=r"need jinja2. Install it: pip install 'jaxoffload\[fine"
    ):
        words.apply_chat_template(MESSAGES)


def _missing(name):
    raise ImportError(name)

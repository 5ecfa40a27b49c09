"""A tiny model in a folder, with examples, and the command that trains it in this process."""

import json

import jax
import pytest

from jaxoffload.finetune import command, huggingface, model

tokenizers = pytest.importorskip("tokenizers", reason="pip install 'jaxoffload[finetune]'")
pytest.importorskip("jinja2", reason="pip install 'jaxoffload[finetune]'")

CONFIG = model.Config(258, 32, 2, 2, 1, 48, is_tied=True)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_folder(path):
    """A model with a byte-level tokenizer, and two files of examples."""
    huggingface.save_model(path / "model", CONFIG, model.init(CONFIG, jax.random.key(0)))
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={x: i for i, x in enumerate([*letters, "<end>"])}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(path / "model" / "tokenizer.json"))
    settings = {"eos_token": "<end>", "chat_template": TEMPLATE}
    (path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, numbers in (("chat.jsonl", range(40)), ("eval.jsonl", range(40, 44))):
        with open(path / name, "w") as file:
            for i in numbers:
                messages = [{"role": "user", "content": f"{i} and one?"},
                            {"role": "assistant", "content": str(i + 1)}]  # fmt: skip
                file.write(json.dumps({"messages": messages}) + "\n")
    return path


def flags_of(folder, *more):
    return [f"--model={folder / 'model'}", f"--data={folder / 'chat.jsonl'}", "--batch=2",
            "--length=48", "--learning-rate=0.01", "--steps=8", "--eval-share=0",
            "--target-modules=q_proj,down_proj", *more]  # fmt: skip


def run(capsys, *words):
    status = command.main([str(word) for word in words])
    found = capsys.readouterr()
    return status, found.out, found.err

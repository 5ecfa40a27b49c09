"""Text to token ids and back, and conversations to text: a model's own tokenizer and template."""

import datetime
import importlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxoffload.finetune.atomic import replaced, write_json

Message = Mapping[str, Any]
"""{"role": "user", "content": "..."}"""

REMEDY = "Install it: pip install 'jaxoffload[finetune]'."


class Tokenizer:
    """A model's tokenizer.

    Attributes:
      backend: the `tokenizers.Tokenizer` that does the work.
      bos_id, eos_id: tokens that begin and end a text, or None.
      stop_ids: tokens after which nothing is to be generated: of a chat model the end of a turn.
      chat_template: Jinja text, or None.
    """

    def __init__(
        self,
        backend: Any,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        stop_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ):
        self.backend, self.bos_id, self.eos_id = backend, bos_id, eos_id
        self.stop_ids = tuple(sorted({*stop_ids, *(() if eos_id is None else (eos_id,))}))
        self.chat_template = chat_template

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; special tokens that are written in it count as such.

        Args:
          add_special_tokens: whether those that the tokenizer puts around a text are added; a chat
            template writes its own.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text that tokens stand for."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = False
    ) -> str:
        """A conversation as the model was taught to read it.

        Args:
          messages: with "role" and "content".
          add_generation_prompt: whether the beginning of the next answer is written, too.

        Raises:
          ValueError: there is no template, or it refuses the conversation. ImportError: jinja2 is
          not installed.
        """
        if self.chat_template is None:
            raise ValueError(
                "Tokenizer.apply_chat_template: this model has no chat template. Write its prompts "
                "yourself, or set tokenizer.chat_template."
            )
        library = optional("jinja2.sandbox", "chat templates need jinja2")
        errors = optional("jinja2", "chat templates need jinja2")

        def refuse(message: str) -> None:
            raise errors.TemplateError(message)

        # As transformers sets it up: templates are written for these blanks and names.
        environment = library.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = datetime.datetime.now().strftime
        try:
            return environment.from_string(self.chat_template).render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                bos_token=self._text(self.bos_id),
                eos_token=self._text(self.eos_id),
                tools=None,
                documents=None,
            )
        except (errors.TemplateError, TypeError, KeyError, OverflowError) as error:
            raise ValueError(
                f"Tokenizer.apply_chat_template: the model's template refuses these messages: "
                f"{error}. Pass messages with the roles and order that it knows."
            ) from error

    def _text(self, token: int | None) -> str:
        return "" if token is None else self.backend.id_to_token(token)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json, its config, generation_config.json, chat_template.jinja."""
        with replaced(os.path.join(folder, "tokenizer.json")) as file:
            file.write(self.backend.to_str().encode())
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self._text(self.bos_id) or None,
            "eos_token": self._text(self.eos_id) or None,
        }
        write_json(os.path.join(folder, "tokenizer_config.json"), config)
        stops = {"bos_token_id": self.bos_id, "eos_token_id": list(self.stop_ids) or None}
        write_json(os.path.join(folder, "generation_config.json"), stops)
        if self.chat_template is not None:
            with replaced(os.path.join(folder, "chat_template.jinja")) as file:
                file.write(self.chat_template.encode())


def from_folder(folder: str | os.PathLike[str]) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder; None where it has no tokenizer.json.

    Raises:
      ValueError: a file cannot be read, by name. ImportError: tokenizers is not installed.
    """
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.exists(path):
        return None
    try:
        backend = library().Tokenizer.from_file(path)
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(
            f"tokenizer: {path} cannot be read: {error}. Check that it was downloaded whole."
        ) from error
    config = _json(os.path.join(folder, "tokenizer_config.json"))
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in template}
        template = named.get("default")
    beside = os.path.join(folder, "chat_template.jinja")
    if os.path.exists(beside):
        with open(beside, encoding="utf-8") as file:
            template = file.read()

    ids = _json(os.path.join(folder, "config.json"))

    def id_of(name: str) -> int | None:
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            return backend.token_to_id(token)
        found = ids.get(f"{name}_id")
        return found[0] if isinstance(found, list) else found

    stops = _json(os.path.join(folder, "generation_config.json")).get("eos_token_id")
    return Tokenizer(
        backend,
        bos_id=id_of("bos_token"),
        eos_id=id_of("eos_token"),
        stop_ids=stops if isinstance(stops, list) else () if stops is None else (stops,),
        chat_template=template,
    )


def check_vocabulary(what: str, tokenizer: Tokenizer | None, rows: int) -> None:
    """Raises ValueError if the tokenizer has ids that the embedding has no row for."""
    if tokenizer is not None and tokenizer.vocab_size > rows:
        raise ValueError(
            f"{what}: the tokenizer has {tokenizer.vocab_size} tokens, and the embedding only "
            f"{rows} rows. Use the tokenizer that belongs to these weights."
        )


def optional(name: str, why: str) -> Any:
    """A module of a package that only this needs.

    Raises:
      ImportError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{why}. {REMEDY}") from error


def library() -> Any:
    """The package tokenizers."""
    return optional("tokenizers", "tokenizers of models need the package tokenizers")


def _json(path: str) -> dict[str, Any]:
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}. Check that it was downloaded whole.") from (
            error
        )
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not an object.")
    return found

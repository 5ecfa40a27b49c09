"""Continues texts, and answers as a chat model does."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxoffload.finetune.decode import Decoder
from jaxoffload.finetune.model import Params
from jaxoffload.finetune.weights import Model


def generate(
    model: Model,
    prompts: str | Sequence[str],
    max_tokens: int = 64,
    *,
    device_memory: int | float | str | None = None,
    stop: Sequence[str] = (),
    params: Params | None = None,
    decoder: Decoder | None = None,
    **options: Any,
) -> Any:
    """Continues a text, or several at once.

    Args:
      max_tokens: new tokens at most, of each.
      device_memory: within which it is done, as `offload` takes it; without it by `jax.jit`, all
        weights on the device.
      stop: a text ends before the first of these, and after a token that the model ends texts with.
      params: weights in place of the model's own, as with adapters attached.
      decoder: one of this model, which keeps what it planned and compiled from call to call, in
        place of `device_memory` and `params`.
      options: `temperature`, `top_p`, `seed`, see `Decoder.stream`.

    Returns:
      The new text; a list of as many where `prompts` is one.

    Raises:
      ValueError: the model has no tokenizer; an option is not legal. PlanError: the budget is too
        small; says the smallest that can work.
    """
    words = _tokenizer("generate", model)
    several = [prompts] if isinstance(prompts, str) else list(prompts)
    texts = [Text(words, stop) for _ in several]
    if decoder is None:
        decoder = _decoder(model, params, device_memory)
    for _ in steps(texts, decoder, several, max_tokens, **options):
        pass
    found = [text.whole() for text in texts]
    return found[0] if isinstance(prompts, str) else found


def stream(
    model: Model,
    prompt: str,
    max_tokens: int = 64,
    *,
    device_memory: int | float | str | None = None,
    stop: Sequence[str] = (),
    params: Params | None = None,
    decoder: Decoder | None = None,
    **options: Any,
) -> Iterator[str]:
    """As `generate` of one text, of which it yields a piece as soon as it is certain."""
    text = Text(_tokenizer("stream", model), stop)
    if decoder is None:
        decoder = _decoder(model, params, device_memory)
    for _ in steps([text], decoder, [prompt], max_tokens, **options):
        if piece := text.piece():
            yield piece
    if piece := text.piece(is_last=True):
        yield piece


def answer(
    model: Model, messages: Sequence[dict[str, Any]], max_tokens: int = 64, **options: Any
) -> str:
    """What a chat model says next.

    Args:
      messages: the conversation so far, {"role": ..., "content": ...} each.
      options: see `generate`.

    Raises:
      ValueError: the model has no tokenizer, or no chat template.
    """
    prompt = _tokenizer("answer", model).apply_chat_template(messages, add_generation_prompt=True)
    return generate(model, prompt, max_tokens, **options)


def _tokenizer(what: str, model: Model) -> Any:
    if model.tokenizer is None:
        raise ValueError(
            f"{what}: {model.folder} has no tokenizer. Open a folder with a tokenizer.json."
        )
    return model.tokenizer


def _decoder(model: Model, params: Params | None, device_memory: Any) -> Decoder:
    params = model.params if params is None else params
    return Decoder(model.config, params, device_memory=device_memory)


class Text:
    """A text as its tokens come.

    Attributes:
      tokens: so far.
      has_ended: whether one of what ends it was found.

    Args:
      words: the tokenizer.
      stop: it ends before the first of these.
    """

    def __init__(self, words: Any, stop: Sequence[str]):
        if isinstance(stop, str) or not all(isinstance(each, str) and each for each in stop):
            raise ValueError(f"generate: stop={stop!r} is no list of texts, none of them empty.")
        self.words, self._stop = words, tuple(stop)
        self.tokens: list[int] = []
        self._text, self._shown, self.has_ended = "", 0, False

    def add(self, token: int) -> None:
        """One token more; none after the end."""
        if self.has_ended:
            return
        self.tokens.append(token)
        self._text = self.words.decode(self.tokens, skip_special_tokens=True)
        ends = [at for each in self._stop if (at := self._text.find(each)) >= 0]
        if ends:
            self._text, self.has_ended = self._text[: min(ends)], True

    def whole(self) -> str:
        """All of it."""
        return self._text

    def piece(self, is_last: bool = False) -> str:
        """What is certain and was not shown: bytes of a character may come in several tokens, and
        what ends the text in several pieces."""
        end = len(self._text)
        if not (is_last or self.has_ended):
            if self._text.endswith("\ufffd"):
                return ""
            end -= max((self._begun(each) for each in self._stop), default=0)
        piece, self._shown = self._text[self._shown : end], max(end, self._shown)
        return piece

    def _begun(self, stop: str) -> int:
        """Of how many characters the beginning of `stop` ends the text."""
        most = min(len(stop) - 1, len(self._text))
        return next((n for n in range(most, 0, -1) if self._text.endswith(stop[:n])), 0)


def steps(
    texts: Sequence[Text], decoder: Decoder, prompts: Sequence[str], max_tokens: int, **options: Any
) -> Iterator[int]:
    """Continues prompts, each in its text, until all have ended; yields the number of each step."""
    if not texts:
        return
    asked = [text.words.encode(prompt) for text, prompt in zip(texts, prompts, strict=True)]
    ends = texts[0].words.stop_ids
    made = decoder.stream(asked, max_tokens, stop=ends, **options)
    for count, tokens in enumerate(made, 1):
        for text, token in zip(texts, tokens, strict=True):
            if token is not None:
                text.add(token)
        yield count
        if all(text.has_ended for text in texts):
            return

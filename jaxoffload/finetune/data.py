"""Examples from files, packed into rows of tokens that a step can take.

A file of JSON lines has one example a line: {"messages": [{"role", "content"}, ...]},
{"prompt", "completion"} or {"text"}. Any other file is one text. The loss counts what the model is
to say: the assistant's messages, completions, texts.

Several examples share a row, each a segment of its own. Which rows a step takes is a function of
the seed and the step alone, so that training that is resumed goes on bit for bit.
"""

import bisect
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np


class Tokenizer(Protocol):
    """What is asked of a tokenizer."""

    eos_id: Any

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool = False) -> str: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """A text as tokens.

    Attributes:
      tokens: (N,) int32.
      counts: (N,) bool, whether the model is to predict this token.
      whole: whether it must stay in one piece; long texts are cut into several instead.
      source: the file and the line that it comes from, "chat.jsonl:12".
    """

    tokens: np.ndarray
    counts: np.ndarray
    whole: bool = True
    source: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """Rows of packed examples, all (N, T).

    Attributes:
      tokens, targets: int32; targets[:, i] is to follow tokens[:, i].
      weights: float32, 1 where the target counts, else 0.
      segments: int32, from 1; 0 where nothing is.
      num_examples: that are in the rows.
      num_truncated: examples that were too long and lost their ends.
      num_lost_tokens: that these ends had.
      num_dropped: examples of which nothing was left that counts.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    segments: np.ndarray
    num_examples: int
    num_truncated: int
    num_lost_tokens: int
    num_dropped: int

    def __len__(self) -> int:
        return len(self.tokens)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name, as a step takes them."""
        names = ("tokens", "targets", "weights", "segments")
        return {name: getattr(self, name) for name in names}

    def first(self, count: int) -> "Packed":
        """The first rows only."""
        return Packed(
            self.tokens[:count], self.targets[:count], self.weights[:count], self.segments[:count],
            self.num_examples, self.num_truncated, self.num_lost_tokens, self.num_dropped,
        )  # fmt: skip

    def digest(self) -> str:
        """Of everything that training sees, to know other data by."""
        found = hashlib.sha256(repr(self.tokens.shape).encode())
        for array in self.arrays().values():
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()

    def report(self) -> str:
        """What became of the examples, in a line."""
        used = float(np.mean(self.segments > 0))
        text = (
            f"{self.num_examples} examples in {len(self)} rows of {self.tokens.shape[1]} tokens, "
            f"{used:.0%} full, {self.weights.mean():.0%} count"
        )
        if self.num_truncated:
            text += (
                f"; {self.num_truncated} were too long and lost {self.num_lost_tokens} tokens at "
                "their ends"
            )
        if self.num_dropped:
            text += f"; {self.num_dropped} were dropped, for nothing in them counts"
        return text


def read(paths: Sequence[str | os.PathLike[str]], tokenizer: Tokenizer) -> list[Example]:
    """The examples of some files, in their order.

    Raises:
      ValueError: a line is not understood, or a file has no example; names file and line.
      FileNotFoundError: there is no such file.
    """
    examples: list[Example] = []
    for path in paths:
        before = len(examples)
        if os.fspath(path).endswith((".jsonl", ".json")):
            examples.extend(_read_lines(path, tokenizer))
        else:
            examples.extend(_read_text(path, tokenizer))
        if len(examples) == before:
            raise ValueError(f"{os.fspath(path)}: has no example. Leave it out, or fill it.")
    return examples


def of_messages(messages: Any, tokenizer: Tokenizer, source: str = "") -> Example:
    """A conversation; what the assistant says counts, its end mark with it.

    Each answer is encoded apart from what it follows, as it is when a model is asked to give one.

    Raises:
      ValueError: messages are malformed, none is the assistant's, or the chat template changes what
        was said before when more is said; begins with `source`.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{source}: "messages" must be a list of messages, not {messages!r:.80}.')
    for message in messages:
        is_object = isinstance(message, dict)
        if not is_object or not {"role", "content"} <= message.keys():
            raise ValueError(f'{source}: a message has no "role" and "content": {message!r:.80}.')
        if not isinstance(message["content"], str):
            raise ValueError(
                f'{source}: a message\'s "content" must be text, not {message["content"]!r:.80}.'
            )
    pieces: list[tuple[str, bool]] = []
    done = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True)
        answered = tokenizer.apply_chat_template(messages[: i + 1])
        if not asked.startswith(done) or not answered.startswith(asked):
            raise ValueError(
                f"{source}: the chat template writes the first messages otherwise when message "
                f"{i + 1} follows, so that its text cannot be told apart. Make an example of each "
                "answer, or pass prompt and completion."
            )
        pieces += [(asked[len(done) :], False), (answered[len(asked) :], True)]
        done = answered
    if not pieces:
        raise ValueError(f'{source}: no message has the role "assistant". Add an answer.')
    return _of_pieces(pieces, tokenizer, source)


def of_completion(prompt: str, completion: str, tokenizer: Tokenizer, source: str = "") -> Example:
    """A prompt and what is to follow it, which counts, the end of the text with it."""
    for name, text in (("prompt", prompt), ("completion", completion)):
        if not isinstance(text, str):
            raise ValueError(f'{source}: "{name}" must be text, not {text!r:.80}.')
    if not completion:
        raise ValueError(f'{source}: "completion" is empty. Leave the line out.')
    return _of_pieces([(prompt, False), (completion, True)], tokenizer, source, ends=True)


def of_text(text: str, tokenizer: Tokenizer, source: str = "") -> Example:
    """A text of which every token counts, and which may be cut into rows."""
    if not isinstance(text, str) or not text:
        raise ValueError(f'{source}: "text" must be text, not {text!r:.80}.')
    return dataclasses.replace(
        _of_pieces([(text, True)], tokenizer, source, ends=True), whole=False
    )


def split(examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], ...]:
    """Examples to train on, and a seeded choice of them to judge by.

    Args:
      share: of the examples to hold out, in [0, 1); at least one where it is above 0.

    Raises:
      ValueError: nothing would be left to train on.
    """
    if not 0.0 <= share < 1.0:
        raise ValueError(f"data.split: share={share} is not in [0, 1). Pass 0.05, for example.")
    count = max(1, round(share * len(examples))) if share else 0
    if count >= len(examples):
        raise ValueError(
            f"data.split: of {len(examples)} examples {count} would be held out, and none left to "
            "train on. Pass more examples, or a file of its own to judge by."
        )
    chosen = set(np.random.default_rng([seed, 1]).permutation(len(examples))[:count].tolist())
    seen = [x for i, x in enumerate(examples) if i not in chosen]
    return seen, [examples[i] for i in sorted(chosen)]


def pack(examples: Sequence[Example], length: int, seed: int) -> Packed:
    """Rows of `length` tokens.

    Examples go, long ones first, into the fullest row that has room. One that is longer than
    a row loses its end; a text is cut into rows instead, without loss.

    Raises:
      ValueError: length is below 2, or nothing is left that counts.
    """
    if length < 2:
        raise ValueError(f"data.pack: length={length} is below 2. Pass more tokens a row.")
    pieces, truncated, lost, dropped = [], 0, 0, 0
    for example in examples:
        tokens, counts = example.tokens, example.counts
        for start in range(0, 1 if example.whole else max(1, len(tokens) - 1), length):
            end = start + length + 1
            if example.whole and len(tokens) > end:
                truncated += 1
                lost += len(tokens) - end
            if counts[start + 1 : end].any():
                pieces.append((tokens[start:end], counts[start:end]))
            else:
                dropped += 1
    if not pieces:
        raise ValueError(
            f"data.pack: no token of {len(examples)} examples counts within length={length}. Pass "
            "a greater length, or examples with answers."
        )
    order = np.random.default_rng([seed, 2]).permutation(len(pieces)).tolist()
    order.sort(key=lambda i: -len(pieces[i][0]))  # long ones first fill rows best
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens that still fit, row), sorted
    for i in order:
        need = len(pieces[i][0]) - 1
        at = bisect.bisect_left(rooms, (need, 0))
        if at == len(rooms):
            rows.append([])
            room, row = length, len(rows) - 1
        else:
            room, row = rooms.pop(at)
        rows[row].append(i)
        if room > need:
            bisect.insort(rooms, (room - need, row))
    shape = (len(rows), length)
    packed = Packed(
        np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32),
        np.zeros(shape, np.int32), len(pieces), truncated, lost, dropped,
    )  # fmt: skip
    for row, members in enumerate(rows):
        at = 0
        for segment, i in enumerate(members, 1):
            tokens, counts = pieces[i]
            place = slice(at, at + len(tokens) - 1)
            packed.tokens[row, place], packed.targets[row, place] = tokens[:-1], tokens[1:]
            packed.weights[row, place] = counts[1:]
            packed.segments[row, place] = segment
            at = place.stop
    return packed


def batch_at(packed: Packed, size: int, seed: int, step: int) -> dict[str, np.ndarray]:
    """The rows of one step, (size, T) each; every row comes once before any comes again.

    The order of each turn through the rows is drawn from the seed and the turn's number.
    """
    places = np.arange(step * size, (step + 1) * size)
    turns = places // len(packed)
    orders = {
        turn: np.random.default_rng([seed, 3, turn]).permutation(len(packed))
        for turn in np.unique(turns).tolist()
    }
    chosen = np.array([orders[t][p % len(packed)] for t, p in zip(turns, places, strict=True)])
    return {name: array[chosen] for name, array in packed.arrays().items()}


def in_order(packed: Packed, size: int) -> Iterator[dict[str, np.ndarray]]:
    """All rows once, `size` at a time; the last batch is filled with rows that count nothing."""
    for start in range(0, len(packed), size):
        rows = {name: array[start : start + size] for name, array in packed.arrays().items()}
        short = size - len(rows["tokens"])
        yield {name: np.pad(array, ((0, short), (0, 0))) for name, array in rows.items()}


def _of_pieces(
    pieces: Sequence[tuple[str, bool]], tokenizer: Tokenizer, source: str, ends: bool = False
) -> Example:
    tokens: list[int] = []
    counts: list[bool] = []
    for text, is_answer in pieces:
        found = list(tokenizer.encode(text)) if text else []
        tokens += found
        counts += [is_answer] * len(found)
    if ends and tokenizer.eos_id is not None:
        tokens.append(int(tokenizer.eos_id))
        counts.append(True)
    return Example(np.array(tokens, np.int32), np.array(counts, bool), True, source)


def _read_lines(path: str | os.PathLike[str], tokenizer: Tokenizer) -> Iterator[Example]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            source = f"{os.fspath(path)}:{number}"
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{source}: is not JSON: {error}. Each line must be one JSON object."
                ) from error
            if isinstance(entry, dict) and "messages" in entry:
                yield of_messages(entry["messages"], tokenizer, source)
            elif isinstance(entry, dict) and {"prompt", "completion"} <= entry.keys():
                yield of_completion(entry["prompt"], entry["completion"], tokenizer, source)
            elif isinstance(entry, dict) and "text" in entry:
                yield of_text(entry["text"], tokenizer, source)
            else:
                keys = list(entry) if isinstance(entry, dict) else type(entry).__name__
                raise ValueError(
                    f'{source}: has neither "messages", nor "prompt" and "completion", nor "text", '
                    f"but {keys}."
                )


def _read_text(path: str | os.PathLike[str], tokenizer: Tokenizer) -> Iterator[Example]:
    with open(path, "rb") as file:
        words = file.read()
    try:
        text = words.decode()
    except UnicodeDecodeError as error:
        line = words[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{os.fspath(path)}:{line}: is not UTF-8 text. Convert it, or leave it out."
        ) from error
    if text.strip():
        yield of_text(text, tokenizer, os.fspath(path))

"""The tokenizer in a GGUF file's metadata, as one of the package tokenizers.

Two kinds: byte-level BPE ("gpt2": tokens and merges, text split beforehand by a rule that the file
only names) and SentencePiece's BPE ("llama": pieces with scores, unknown letters as bytes).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxoffload.finetune import tokenizer
from jaxoffload.finetune.tokenizer import Tokenizer

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 and Qwen 2 split text; they differ in how many digits go together."""
_LLAMA3, _QWEN2 = _WORDS.replace("DIGITS", "{1,3}"), _WORDS.replace("DIGITS", "")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA_CPP = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}")
"""How llama.cpp splits where a file does not say how."""
PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "smollm": (r"\p{N}", _GPT2),
    "gpt-2": (_GPT2,),
    "default": _LLAMA_CPP,
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
}
"""GGUF's names of the ways to split text, and the patterns, each splitting what the last left."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""GGUF's types of tokens."""
_ENDS_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>")
_SPACE = "\u2581"
"""What SentencePiece writes for a blank."""

Fields = Mapping[str, Any]


def from_fields(fields: Fields, where: str) -> Tokenizer:
    """The tokenizer that a file's metadata describes.

    Args:
      fields: the metadata, "tokenizer.ggml.tokens" among them.
      where: the file, for messages.

    Raises:
      ValueError: its kind, or its way to split text, is not known, by name; or its lists disagree.
      ImportError: tokenizers is not installed.
    """
    kind, pre = _field(fields, "model"), _field(fields, "pre", "default")
    if kind == "gpt2" and pre in PRE_TOKENIZERS:
        make, has_bos = _byte_level, _LLAMA3 in PRE_TOKENIZERS[pre]
    elif kind == "llama":
        make, has_bos = _sentencepiece, True
    else:
        raise ValueError(
            f"tokenizer: {where} has a tokenizer {kind!r} with pre-tokenizer {pre!r}; known are "
            f"'llama', and 'gpt2' with {', '.join(map(repr, PRE_TOKENIZERS))}. Open the model's "
            "Hugging Face folder instead."
        )
    tokens = list(_field(fields, "tokens", ()))
    types = list(_field(fields, "token_type", [_NORMAL] * len(tokens)))
    if len(types) != len(tokens):
        raise ValueError(
            f"tokenizer: {where} has {len(tokens)} tokens and {len(types)} types of them. Check "
            "that it was downloaded whole."
        )
    ids = {
        name: _token(fields, f"{name}_token_id", len(tokens), where)
        for name in ("bos", "eos", "eot", "eom", "unknown")
    }
    try:
        backend = make(fields, tokens, types, ids["unknown"], where)
    except ValueError:
        raise
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"tokenizer: {where}: vocabulary and merges disagree: {error}.") from error
    before = [ids["bos"]] if _field(fields, "add_bos_token", has_bos) else []
    after = [ids["eos"]] if _field(fields, "add_eos_token", False) else []
    _surround(backend, tokens, before, after)
    ends = (ids["eot"], ids["eom"], *map(backend.token_to_id, _ENDS_OF_TURN))
    return Tokenizer(
        backend,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        stop_ids=[token for token in ends if token is not None],
        chat_template=fields.get("tokenizer.chat_template"),
    )


def _field(fields: Fields, name: str, default: Any = None) -> Any:
    return fields.get(f"tokenizer.ggml.{name}", default)


def _token(fields: Fields, name: str, count: int, where: str) -> int | None:
    found = _field(fields, name)
    if found is not None and not 0 <= found < count:
        raise ValueError(
            f"tokenizer: {where} says tokenizer.ggml.{name} = {found}, and has {count} tokens. "
            "Check that it was downloaded whole."
        )
    return found


def _byte_level(
    fields: Fields, tokens: list[str], types: list[int], unknown: int | None, where: str
) -> Any:
    library = tokenizer.library()
    pre = _field(fields, "pre", "default")
    patterns = PRE_TOKENIZERS[pre]
    backend = library.Tokenizer(
        library.models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in _field(fields, "merges", ())],
            # Llama 3 has words that no order of its merges makes.
            ignore_merges=_LLAMA3 in patterns,
        )
    )
    parts = library.pre_tokenizers
    splits = [parts.Split(library.Regex(pattern), "isolated") for pattern in patterns]
    letters = parts.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = parts.Sequence([*splits, letters])
    if _QWEN2 in patterns:
        backend.normalizer = library.normalizers.NFC()
    backend.decoder = library.decoders.ByteLevel()
    _add(backend, tokens, types, is_normalized=False)
    return backend


def _sentencepiece(
    fields: Fields, tokens: list[str], types: list[int], unknown: int | None, where: str
) -> Any:
    library = tokenizer.library()
    scores = list(_field(fields, "scores", ()))
    if len(scores) != len(tokens):
        raise ValueError(
            f"tokenizer: {where} has {len(tokens)} tokens and {len(scores)} scores. Check that it "
            "was downloaded whole."
        )
    backend = library.Tokenizer(
        library.models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges(tokens, types, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = _field(fields, "add_space_prefix", True)
    make, read = library.normalizers, library.decoders
    prefix = [make.Prepend(_SPACE)] if has_prefix else []
    backend.normalizer = make.Sequence([*prefix, make.Replace(" ", _SPACE)])
    strip = [read.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = read.Sequence(
        [read.Replace(_SPACE, " "), read.ByteFallback(), read.Fuse(), *strip]
    )
    # Runs of blanks among the user's tokens are found as they are normalized; a prefix would be
    # put before each of them.
    _add(backend, tokens, types, is_normalized=not has_prefix)
    return backend


def _merges(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Pairs of pieces that make a piece: of higher scores first, as SentencePiece joins them."""
    known = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_NORMAL, _USER_DEFINED)
    }
    found = []
    for piece, i in known.items():
        for at in range(1, len(piece)):
            left, right = known.get(piece[:at]), known.get(piece[at:])
            if left is not None and right is not None:
                found.append((-scores[i], i, left, right))
    return [(tokens[left], tokens[right]) for *_, left, right in sorted(found)]


def _add(backend: Any, tokens: list[str], types: list[int], *, is_normalized: bool) -> None:
    """Makes known which tokens are found in a text before it is split."""
    make = tokenizer.library().AddedToken
    named = list(zip(tokens, types, strict=True))
    special = [t for t, kind in named if kind in (_UNKNOWN, _CONTROL)]
    backend.add_special_tokens([make(t, special=True, normalized=False) for t in special])
    other = [t for t, kind in named if kind == _USER_DEFINED]
    backend.add_tokens([make(t, special=False, normalized=is_normalized) for t in other])


def _surround(
    backend: Any, tokens: list[str], before: list[int | None], after: list[int | None]
) -> None:
    """What is put around a text where special tokens are asked for."""
    around = [[tokens[i] for i in ids if i is not None] for ids in (before, after)]
    if not any(around):
        return
    used = {token: backend.token_to_id(token) for token in (*around[0], *around[1])}
    backend.post_processor = tokenizer.library().processors.TemplateProcessing(
        single=[*around[0], "$A", *around[1]], special_tokens=list(used.items())
    )

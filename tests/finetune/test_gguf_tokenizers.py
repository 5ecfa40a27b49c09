"""Tokenizers of GGUF files against what the test itself splits and joins, letter by letter.

The pieces below are those of Llama 3's own pattern, read off a regular expression engine that knows
Unicode's classes. Vocabularies are learnt here from the texts as they are, so that they have tokens
across all borders of words: whatever is split wrongly gets other ids.
"""

import collections
import itertools
import unicodedata

import pytest

from jaxoffload.finetune import gguf_tokenizer

pytest.importorskip("tokenizers", reason="pip install 'jaxoffload[finetune]'")

PIECES = [
    ["It", "'s", " ", "123", "456", "78", " o", "'clock", ",", " THEY", "'LL", " IT", "'S", "TOO"],
    [" ", " x", " =", " ", "10", "\n\n", "\ty", "\r\n", " "],
    ["日本語", " ", "202", "4", "年", " ", "½²"],
    ["👩\u200d👩", " é", "!", " ...?\n\n", " z"],
    ["'t", "is", " ", " a", "  ", " b", " \n", " ", " c"],
]
TEXTS = ["".join(pieces) for pieces in PIECES]
SPECIAL = ["<|begin|>", "<|eot_id|>"]


def letters_of_bytes():
    """GPT-2's: printable bytes as they are, the others from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    odd = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(odd)}


LETTERS = letters_of_bytes()


def as_letters(text):
    return [LETTERS[b] for b in text.encode()]


def joined(parts, rank):
    """Neighbours joined, those of the lowest rank first and of those the leftmost."""
    parts = list(parts)
    while True:
        ranks = [rank.get(pair) for pair in itertools.pairwise(parts)]
        known = [(r, i) for i, r in enumerate(ranks) if r is not None]
        if not known:
            return parts
        _, i = min(known)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def learnt(words, count):
    """The pairs that are most often neighbours, joined one after another."""
    words, pairs = [list(word) for word in words], []
    for _ in range(count):
        seen = collections.Counter(pair for w in words for pair in itertools.pairwise(w))
        if not seen:
            break
        pairs.append(max(sorted(seen), key=seen.get))
        words = [joined(word, {pairs[-1]: 0}) for word in words]
    return pairs


PAIRS = learnt([as_letters(text) for text in TEXTS], 70)
TOKENS = list(dict.fromkeys([*LETTERS.values(), *(a + b for a, b in PAIRS)]))


def byte_level(pre, **more):
    fields = {
        "model": "gpt2", "pre": pre, "tokens": TOKENS + SPECIAL,
        "token_type": [1] * len(TOKENS) + [3, 3], "merges": [" ".join(pair) for pair in PAIRS],
        "bos_token_id": len(TOKENS), "eos_token_id": len(TOKENS) + 1, **more,
    }  # fmt: skip
    return opened(fields)


def opened(fields):
    named = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    return gguf_tokenizer.from_fields(named, "m.gguf")


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "llama-v3", "qwen2"])
def test_text_is_split_as_the_model_was_taught(pre):
    words = byte_level(pre)
    rank = {pair: i for i, pair in enumerate(PAIRS)}
    for text, pieces in zip(TEXTS, PIECES, strict=True):
        if pre == "qwen2":  # digits one by one
            numbers = [all(unicodedata.category(c)[0] == "N" for c in piece) for piece in pieces]
            pieces = [
                part
                for piece, is_number in zip(pieces, numbers, strict=True)
                for part in (piece if is_number else [piece])
            ]
        split = words.backend.pre_tokenizer.pre_tokenize_str(text)
        assert [text[first:last] for _, (first, last) in split] == pieces
        parts = [part for piece in pieces for part in joined(as_letters(piece), rank)]
        assert words.encode(text) == [TOKENS.index(part) for part in parts]
        assert words.decode(words.encode(text)) == text
        assert parts != joined(as_letters(text), rank), "the vocabulary crosses no border"


@pytest.mark.parametrize(
    "pre, pieces",
    [
        ("gpt-2", ["don", "'t", " say", " 12345", "==", "6", "\n ", " x", "  "]),
        ("smollm", ["don", "'t", " say", " ", *"12345", "==", "6", "\n ", " x", "  "]),
        # As the program llama.cpp splits where nothing is said.
        ("default", ["don", "'", "t", " say", " ", "123", "45", "==", "6", "\n ", " x", "  "]),
    ],
)
def test_older_ways_to_split(pre, pieces):
    split = byte_level(pre).backend.pre_tokenizer.pre_tokenize_str("".join(pieces))
    assert ["".join(pieces)[first:last] for _, (first, last) in split] == pieces


def test_llama3_knows_words_that_no_order_of_merges_makes():
    fields = dict(tokens=[*TOKENS, "qxz", "end"], token_type=[1] * (len(TOKENS) + 2))
    assert byte_level("llama-bpe", **fields).encode("qxz") == [len(TOKENS)]
    assert len(byte_level("qwen2", **fields).encode("qxz")) == 3


def test_qwen2_reads_letters_and_their_accents_as_one():
    words = byte_level("qwen2")
    assert words.encode("e\u0301") == words.encode("é") != byte_level("llama3").encode("e\u0301")


def test_special_tokens_begin_texts_and_end_turns():
    words = byte_level("llama-bpe")
    bos, end = len(TOKENS), len(TOKENS) + 1
    plain = words.encode("It's")
    assert words.encode("It's<|eot_id|>", add_special_tokens=True) == [bos, *plain, end]
    assert byte_level("qwen2").encode("It's", add_special_tokens=True) == plain
    off = byte_level("llama-bpe", add_bos_token=False, add_eos_token=True)
    assert off.encode("It's", add_special_tokens=True) == [*plain, end]
    assert byte_level("qwen2", eos_token_id=bos).stop_ids == (bos, end)
    plain_names = dict(tokens=[*TOKENS, "<a>", "<b>"], eos_token_id=bos)
    assert byte_level("qwen2", **plain_names).stop_ids == (bos,)
    assert byte_level("qwen2", **plain_names, eot_token_id=end).stop_ids == (bos, end)


BLANK = "\u2581"
SPM_TEXTS = [
    "It's  12 o'clock,\n\nthey say\tso", " x =  10\n", "日本 é 👩", "<unk", "a" * 37, "",
    "so they so they  so ",
]  # fmt: skip
SPM_PAIRS = learnt([BLANK + text.replace(" ", BLANK) for text in SPM_TEXTS], 40)
FIRST = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
UNKNOWN = set("👩日\n")
KNOWN = sorted({c for text in SPM_TEXTS for c in text.replace(" ", BLANK)} - UNKNOWN)
UNIONS = [a + b for a, b in SPM_PAIRS if not UNKNOWN & {*a, *b}]
PIECES_SPM = list(dict.fromkeys([*UNIONS, *KNOWN]))


def sentencepiece(**more):
    tokens = [*FIRST, *PIECES_SPM]
    fields = {
        "model": "llama", "tokens": tokens,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES_SPM),
        "scores": [0.0] * len(FIRST) + [-float(i) for i in range(len(PIECES_SPM))],
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **more,
    }  # fmt: skip
    return opened(fields)


def best_joined(text):
    """Ids of SentencePiece's way: the neighbours whose union scores highest are joined first."""
    ids = {piece: len(FIRST) + i for i, piece in enumerate(PIECES_SPM)}
    parts = list(text)
    while True:
        known = [(ids[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts))
                 if a + b in ids]  # fmt: skip
        if not known:
            break
        _, i = min(known)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    found = []
    for part in parts:
        found += [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
    return found


@pytest.mark.parametrize("has_prefix", [True, False])
def test_pieces_are_joined_by_their_scores(has_prefix):
    words = sentencepiece(**({} if has_prefix else {"add_space_prefix": False}))
    for text in SPM_TEXTS:
        marked = text.replace(" ", BLANK)
        want = best_joined(BLANK * (has_prefix and bool(text)) + marked)
        assert words.encode(text) == want
        assert words.decode(want) == text
    assert len(words.encode(SPM_TEXTS[-1])) < len(SPM_TEXTS[-1]) / 2, "nothing was joined"


def test_scores_decide_and_not_the_order_in_the_list():
    tokens = [*FIRST, "a", "b", "c", "bc", "ab"]
    types = [2, 3, 3] + [6] * 256 + [1] * 5
    for scores, want in (((-1.0, -2.0), ["a", "bc"]), ((-2.0, -1.0), ["ab", "c"])):
        words = sentencepiece(
            tokens=tokens, token_type=types, scores=[0.0] * (len(tokens) - 2) + list(scores),
            add_space_prefix=False,
        )  # fmt: skip
        assert [tokens[i] for i in words.encode("abc")] == want


def test_a_text_begins_with_its_token_and_special_ones_are_found():
    words = sentencepiece()
    plain = words.encode("they")
    assert words.encode("they", add_special_tokens=True) == [1, *plain]
    assert words.encode("<s>they</s>") == [1, *plain, 2]
    assert words.decode([1, *plain, 2], skip_special_tokens=True) == "they"
    off = sentencepiece(add_bos_token=False)
    assert off.encode("they", add_special_tokens=True) == plain


@pytest.mark.parametrize("blank", [" ", BLANK])
def test_runs_of_blanks_among_the_users_tokens_are_found(blank):
    """Gemma's: some converters write them as blanks, some as SentencePiece does."""
    tokens = [*FIRST, BLANK, "a", BLANK + "a", "\n\n", 3 * blank, "<end_of_turn>"]
    plain, a, both, lines, blanks, end = range(len(FIRST), len(tokens))
    words = sentencepiece(
        tokens=tokens, token_type=[2, 3, 3] + [6] * 256 + [1] * 3 + [4] * 3,
        scores=[0.0] * len(tokens), add_space_prefix=False,
    )  # fmt: skip
    text = "a a  a   a\n\n<end_of_turn>"
    assert words.encode(text) == [a, both, plain, both, blanks, a, lines, end]
    assert words.decode(words.encode(text)) == text
    assert words.stop_ids == (2, end)


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: byte_level("tekken"), "'gpt2' with pre-tokenizer 'tekken'; known are 'llama'"),
        (lambda: byte_level("qwen2", model="t5"), "a tokenizer 't5'"),
        (lambda: byte_level("qwen2", merges=["a never"]), "vocabulary and merges disagree"),
        (lambda: byte_level("qwen2", token_type=[1]), "tokens and 1 types of them"),
        (lambda: byte_level("qwen2", bos_token_id=9999), "bos_token_id = 9999, and has"),
        (lambda: sentencepiece(scores=[1.0, 2.0]), "tokens and 2 scores"),
    ],
)
def test_what_is_not_known_is_refused_by_name(make, match):
    with pytest.raises(ValueError, match=f"m.gguf.*{match}"):
        make()

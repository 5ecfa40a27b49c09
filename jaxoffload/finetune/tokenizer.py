"""A byte-level BPE tokenizer: 256 bytes and the merges learnt from a text.

Decoding gives back the very bytes that were encoded. Text is first split into words (with the blank
before them), so merges never cross a word and each distinct word is encoded once.
"""

import collections
import heapq
import re
from collections.abc import Callable

import numpy as np

_WORDS = re.compile(rb" ?[A-Za-z_]+| ?[0-9]+| ?[^\sA-Za-z0-9_]+|\n+[ ]*|\s+", re.DOTALL)


class Tokenizer:
    """Encodes and decodes.

    Attributes:
      merges: pairs of token ids; pair i makes token 256 + i.
    """

    def __init__(self, merges: list[tuple[int, int]]):
        self.merges = merges
        self._rank = {pair: i for i, pair in enumerate(merges)}
        self._bytes = [bytes([i]) for i in range(256)]
        for left, right in merges:
            self._bytes.append(self._bytes[left] + self._bytes[right])
        self._known: dict[bytes, list[int]] = {}

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    @classmethod
    def train(
        cls, text: bytes, vocab_size: int, progress: Callable[[int, int], None] | None = None
    ) -> "Tokenizer":
        """Learns merges: again and again the most frequent pair becomes a token.

        Args:
          text: what to learn from.
          vocab_size: tokens wanted, 256 bytes included; fewer come out of a small text.
          progress: called with (merges so far, merges wanted).

        Raises:
          ValueError: vocab_size is below 256.
        """
        if vocab_size < 256:
            raise ValueError(f"Tokenizer.train: vocab_size={vocab_size} is below 256. Pass more.")
        counts = collections.Counter(_WORDS.findall(text))
        words = [list(word) for word in counts]
        weights = list(counts.values())
        pairs: collections.Counter[tuple[int, int]] = collections.Counter()
        where: dict[tuple[int, int], set[int]] = collections.defaultdict(set)
        for i, word in enumerate(words):
            for pair in zip(word, word[1:], strict=False):
                pairs[pair] += weights[i]
                where[pair].add(i)
        heap = [(-count, pair) for pair, count in pairs.items()]
        heapq.heapify(heap)
        merges: list[tuple[int, int]] = []
        while len(merges) < vocab_size - 256 and heap:
            count, pair = heapq.heappop(heap)
            if -count != pairs[pair] or -count < 2:
                if pairs[pair] >= 2 and -count != pairs[pair]:
                    heapq.heappush(heap, (-pairs[pair], pair))
                continue
            token = 256 + len(merges)
            merges.append(pair)
            changed: collections.Counter[tuple[int, int]] = collections.Counter()
            for i in where.pop(pair):
                old, new = words[i], _merge(words[i], pair, token)
                for p in zip(old, old[1:], strict=False):
                    changed[p] -= weights[i]
                for p in zip(new, new[1:], strict=False):
                    changed[p] += weights[i]
                    where[p].add(i)
                words[i] = new
            for p, change in changed.items():
                if change:
                    pairs[p] += change
                    heapq.heappush(heap, (-pairs[p], p))
            if progress is not None and len(merges) % 64 == 0:
                progress(len(merges), vocab_size - 256)
        return cls(merges)

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids, int32."""
        tokens: list[int] = []
        for word in _WORDS.findall(text):
            found = self._known.get(word)
            if found is None:
                found = self._known[word] = self._encode_word(word)
            tokens.extend(found)
        return np.array(tokens, dtype=np.int32)

    def decode(self, tokens: np.ndarray) -> bytes:
        """The bytes that the tokens stand for."""
        return b"".join(self._bytes[t] for t in np.asarray(tokens).tolist())

    def _encode_word(self, word: bytes) -> list[int]:
        tokens = list(word)
        while len(tokens) > 1:
            ranked = [
                (self._rank[p], p) for p in zip(tokens, tokens[1:], strict=False) if p in self._rank
            ]
            if not ranked:
                break
            rank, pair = min(ranked)
            tokens = _merge(tokens, pair, 256 + rank)
        return tokens


def _merge(tokens: list[int], pair: tuple[int, int], new: int) -> list[int]:
    out, i = [], 0
    while i < len(tokens):
        if i + 1 < len(tokens) and (tokens[i], tokens[i + 1]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(tokens[i])
            i += 1
    return out

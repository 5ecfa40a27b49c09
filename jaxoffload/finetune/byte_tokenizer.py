"""A tokenizer that needs nothing learnt: a byte is a token. For models of random weights."""

from collections.abc import Iterable
from typing import Any


class ByteTokenizer:
    """Tokens 0 to 255 are bytes, 256 ends a text; messages stand under their roles' names."""

    bos_id, eos_id, stop_ids, vocab_size = None, 256, (256,), 257

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Its bytes; there are no special tokens to add."""
        del add_special_tokens
        return list(text.encode())

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of the tokens that are bytes."""
        del skip_special_tokens
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool = False) -> str:
        """Each message under its role's name."""
        text = "".join(f"{m['role']}:\n{m['content']}\n\n" for m in messages)
        return text + "assistant:\n" * add_generation_prompt

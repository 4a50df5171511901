"""Token ids to text, step by step and in whole characters.

A byte-level BPE (Qwen, Llama 3, GPT-2) is decoded by a table of the bytes per token, any other
tokenizer by its own decoder over a short window.
"""

import codecs
import json
from collections.abc import Sequence
from itertools import product
from typing import Protocol

from tandem.frontend.tokens.codec import Codec

_REPLACEMENT = "\ufffd"
_MAX_BYTES = 4  # of a character
_NUM_CONTEXT_TOKENS = 8  # of a prompt, before an answer
_MAX_CONTEXT_TOKENS = 512
_MAX_HELD_TOKENS = 12  # a character has at most 4 bytes: more tokens than this never become one


class Detokenizer(Protocol):
    """The text of one growing sequence."""

    def push(self, token_ids: list[int]) -> str:
        """Return the text that these tokens complete."""

    def flush(self) -> str:
        """Return the rest when the sequence has ended; U+FFFD for an unfinished character."""


class DetokenizerFactory:
    """Maker of the detokenizers of one model. Most leave special tokens out of the text."""

    def __init__(self, tokenizer: Codec) -> None:
        self._tokenizer = tokenizer
        is_byte_level = _is_byte_level(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.special_tokens = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        self._has_special: dict[frozenset[str], bool] = {}  # by texts
        self._table = _TokenBytes(tokenizer) if is_byte_level else None
        self._full_table = _TokenBytes(tokenizer, with_special=True) if is_byte_level else None

    def new(self, prompt: Sequence[int] = (), *, with_special: bool = False) -> Detokenizer:
        """Return a detokenizer for the tokens that follow those of `prompt`."""
        table = self._full_table if with_special else self._table
        if table is not None:
            return ByteDetokenizer(table)  # the bytes of a token are the same everywhere
        return WindowDetokenizer(self._tokenizer, prompt, with_special=with_special)

    def has_special(self, texts: frozenset[str]) -> bool:
        """Return True if one of the texts is, or has in it, a special token."""
        found = self._has_special.get(texts)
        if found is None:
            found = any(token in text for token in self.special_tokens for text in texts)
            self._has_special[texts] = found
        return found

    def token_text(self, token_id: int) -> tuple[str, list[int]]:
        """Return the text and the UTF-8 bytes of one token, of special tokens too."""
        if self._table is None:
            text = self._tokenizer.decode([token_id], skips_special=False)
            return text, list(text.encode())
        data = self._table.raw(token_id)
        return data.decode("utf-8", "replace"), list(data)

    def decode(self, token_ids: list[int]) -> str:
        """Return the whole text of some tokens."""
        detokenizer = self.new()
        return detokenizer.push(token_ids) + detokenizer.flush()


class ByteDetokenizer:
    """Detokenizer that joins the bytes of tokens and holds an unfinished character back."""

    __slots__ = ("_pending", "_table")

    def __init__(self, table: "_TokenBytes") -> None:
        self._table = table
        self._pending = b""

    def push(self, token_ids: list[int]) -> str:
        table = self._table
        if len(token_ids) == 1:
            data = table[token_ids[0]]
        else:
            data = b"".join([table[token_id] for token_id in token_ids])
        if self._pending:
            data = self._pending + data
        elif data.isascii():  # most text, in half the time of the decoder below
            return data.decode()
        text, num_consumed = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_consumed:] if num_consumed < len(data) else b""
        return text

    def flush(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class WindowDetokenizer:
    """Detokenizer that decodes a window of recent tokens and emits the text that they add.

    The window starts at tokens already emitted, those of the prompt at first, because decoders
    treat the start of a text differently: they drop a space there. `_num_emitted` counts them.
    """

    __slots__ = ("_num_emitted", "_skips_special", "_tokenizer", "_window")

    def __init__(
        self, tokenizer: Codec, prompt: Sequence[int] = (), *, with_special: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special = not with_special
        self._window, self._num_emitted = self._context_in(prompt)

    def _context_in(self, prompt: Sequence[int]) -> tuple[list[int], int]:
        """Return the last tokens of a prompt, and the number of them that are whole characters.

        More than a few tokens are taken only where those have no text, as special tokens.
        """
        num_tokens = _NUM_CONTEXT_TOKENS
        while True:
            # A character may have a token per byte, and the prompt or its end may begin within one.
            for num_before, num_after in product(range(_MAX_BYTES), repeat=2):
                end = list(prompt[-num_tokens - num_before :])
                num_whole = max(0, len(end) - num_after)
                text = self._decode(end[:num_whole])
                if text.strip() and _REPLACEMENT not in (text[0], text[-1]):
                    return end, num_whole
            if num_tokens >= min(len(prompt), _MAX_CONTEXT_TOKENS):
                end = list(prompt[-_NUM_CONTEXT_TOKENS:])
                return end, len(end)
            num_tokens *= 8

    def push(self, token_ids: list[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        num_held = len(self._window) - self._num_emitted
        return self._emit(force=num_held > _MAX_HELD_TOKENS)

    def flush(self) -> str:
        return self._emit(force=True)

    def _emit(self, force: bool) -> str:
        before = self._decode(self._window[: self._num_emitted])
        text = self._decode(self._window)
        if not force and (len(text) <= len(before) or text.endswith(_REPLACEMENT)):
            return ""
        self._window = self._window[self._num_emitted :]
        self._num_emitted = len(self._window)
        return text[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skips_special=self._skips_special)


class _TokenBytes(dict[int, bytes]):
    """Token id |-> bytes of its text, filled as tokens occur. Empty for unknown ids.

    Special tokens are empty too, unless the table is to have them.
    """

    def __init__(self, tokenizer: Codec, *, with_special: bool = False) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = {
            token_id for token_id, token in added.items() if token.special and not with_special
        }

    def __missing__(self, token_id: int) -> bytes:
        data = b"" if token_id in self._special_ids else self.raw(token_id)
        self[token_id] = data
        return data

    def raw(self, token_id: int) -> bytes:
        """Return the bytes of a token, of special tokens too."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes([_BYTE_OF[character] for character in token])
        except KeyError:  # an added token, which is not in the alphabet
            return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Return character |-> byte, for the alphabet that byte-level vocabularies have from GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _is_byte_level(tokenizer: Codec) -> bool:
    decoder = json.loads(tokenizer.decoder_state)
    if decoder is not None and decoder.get("type") == "Sequence":
        decoders = decoder["decoders"]
        decoder = decoders[0] if len(decoders) == 1 else None
    return decoder is not None and decoder.get("type") == "ByteLevel"

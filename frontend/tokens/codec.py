"""The calls of the `tokenizers` library on a client's data, each within a bound.

A call of the library on a client's data holds Python's lock to its end, and every stream of the
frontend waits, unless it is of the batch forms, which release it. So each call has a bound:

| call | a client's data | at most | its form |
|---|---|---|---|
| `encode` | a text of up to `SHORT_CHARACTERS`, if the tokenizer `is_quick` | 2 ms | `encode` |
| `encode` | any other text, up to `frontend.max_body_bytes` | | `encode_batch_fast`, in a thread |
| `encode_pair` | two texts | | `encode_batch_fast`, in a thread |
| `decode` | up to `SHORT_TOKENS`, as one step or a window has | 0.3 ms | `decode` |
| `decode` | any other tokens, up to the model's context | | `decode_batch`, in a thread |
| `id_to_token` | one token, of an answer or a prompt that fits | 1 µs | as it is |

A long text goes to `encode_batch_fast` in parts, where they have the tokens of the whole (`cuts`):
the library tokenizes them on all cores.

Lists of ids and texts are made with the lock: 35 ms for a million tokens. A panic of the library,
as of a regular expression that gives up, becomes an error of ours.
"""

from collections.abc import Callable
from typing import TypeVar

from tokenizers import AddedToken, Tokenizer

from tandem.frontend.tokens.cuts import may_be_cut, parts_of
from tandem.frontend.tokens.tokenizer_bounds import checked_longest_token, is_quick
from tandem.runtime.errors import InvalidRequestError, ModelError
from tandem.runtime.native import fault_of

T = TypeVar("T")

SHORT_CHARACTERS = 4096
SHORT_TOKENS = 1024


class Codec:
    """Text to token ids and back, by one tokenizer. Its methods have the library's names.

    `is_quick` is False for a tokenizer with a regular expression that may take long for any text.
    Raises ModelError for one whose texts or tokens have no reasonable bound.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.longest_token = checked_longest_token(tokenizer)  # characters
        self.is_quick = is_quick(tokenizer)
        self._may_be_cut = may_be_cut(tokenizer)
        self._around = _special_around(tokenizer) if self._may_be_cut else ([], [])

    def encode(self, text: str, *, adds_special: bool, param: str) -> list[int]:
        """Return the token ids of a text. Other threads run while a long one is tokenized.

        Raises InvalidRequestError for a text that the tokenizer cannot take; `param` is its field.
        """
        is_short = len(text) <= SHORT_CHARACTERS
        parts = [text] if is_short or not self._may_be_cut else parts_of(text)
        try:
            if len(parts) > 1:
                return self._joined(parts, adds_special=adds_special)
            if self.is_quick and is_short:
                encoding = self._tokenizer.encode(text, add_special_tokens=adds_special)
            else:
                [encoding] = self._tokenizer.encode_batch_fast(
                    [text], add_special_tokens=adds_special
                )
        except BaseException as error:
            raise InvalidRequestError(
                f"the model's tokenizer fails on this text: {fault_of(error)}", param=param
            ) from error
        ids: list[int] = encoding.ids
        return ids

    def _joined(self, parts: list[str], *, adds_special: bool) -> list[int]:
        """Return the token ids of the text that is cut into `parts`."""
        before, after = self._around if adds_special else ([], [])
        ids = list(before)
        for encoding in self._tokenizer.encode_batch_fast(parts, add_special_tokens=False):
            ids += encoding.ids
        return ids + after

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Return the token ids of a pair of texts, and the place where the second begins.

        Other threads run meanwhile. Raises InvalidRequestError for texts that the tokenizer cannot
        take.
        """
        try:
            [encoding] = self._tokenizer.encode_batch_fast([(first, second)])
        except BaseException as error:
            raise InvalidRequestError(
                f"the model's tokenizer fails on this text: {fault_of(error)}", param="documents"
            ) from error
        ids: list[int] = encoding.ids
        for origins in (encoding.type_ids, encoding.sequence_ids):
            if 1 in origins:
                return ids, origins.index(1)
        return ids, len(ids)

    def decode(self, token_ids: list[int], *, skips_special: bool) -> str:
        """Return the text of tokens. Other threads run while many are decoded."""
        if len(token_ids) <= SHORT_TOKENS:
            return _answered(lambda: self._tokenizer.decode(token_ids, skips_special), "decoding")
        [text] = _answered(
            lambda: self._tokenizer.decode_batch([token_ids], skips_special), "decoding"
        )
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """Return the entry of a token in the vocabulary."""
        return self._tokenizer.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Return the token with an entry."""
        return self._tokenizer.token_to_id(token)

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Return the tokens beside the vocabulary by their ids."""
        return self._tokenizer.get_added_tokens_decoder()

    @property
    def decoder_state(self) -> bytes:
        """The decoder as JSON; `null` without one."""
        decoder = self._tokenizer.decoder
        return b"null" if decoder is None else decoder.__getstate__()


def _special_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the special tokens that are added before a text, and behind it."""
    encoding = tokenizer.encode("a")
    ids: list[int] = encoding.ids
    place = encoding.special_tokens_mask.index(0)
    num_own = len(tokenizer.encode("a", add_special_tokens=False).ids)
    return ids[:place], ids[place + num_own :]


def _answered(call: Callable[[], T], what: str) -> T:
    """Return what the library does. Raises ModelError for its errors and panics."""
    try:
        return call()
    except BaseException as error:
        raise ModelError(f"{what}: {fault_of(error)}") from error

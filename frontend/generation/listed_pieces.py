"""The log probabilities of an answer's tokens, beside the text that the tokens became."""

from collections.abc import Iterator

from msgspec.structs import replace

from tandem.frontend.generation.choice_text import ChoiceText
from tandem.frontend.parsers.pieces import Content, Piece, TokenLogprob
from tandem.runtime.wire.messages import TokenDelta


class ListedPieces:
    """Gives each piece of content its tokens. Those of reasoning, calls and marks are left out."""

    def __init__(self, text: ChoiceText) -> None:
        self._text = text
        self._held: list[TokenLogprob] = []  # of tokens whose text has not come
        self._is_in_content = False

    def take(self, deltas: list[TokenDelta]) -> list[Piece]:
        """Return the pieces of deltas that have log probabilities."""
        singles = (single for delta in deltas for single in _singles(delta))
        return [piece for single in singles for piece in self._taken(single)]

    def _taken(self, delta: TokenDelta) -> list[Piece]:
        pieces = self._text.take([delta])
        token_ids, logprobs = self._text.with_logprobs(delta)
        num_taken = len(self._text.taken(delta))  # the token that ended the answer has no text
        listed = self._text.chat_logprobs(token_ids[:num_taken], logprobs[:num_taken])
        self._held += listed.content
        return list(map(self._with_tokens, pieces))

    def _with_tokens(self, piece: Piece) -> Piece:
        held, self._held = self._held, []
        was_in_content, self._is_in_content = self._is_in_content, isinstance(piece, Content)
        if not isinstance(piece, Content):
            return piece
        if not was_in_content:
            held = _last_of(held, len(piece.text.encode()))
        return Content(piece.text, tuple(held))


def _singles(delta: TokenDelta) -> Iterator[TokenDelta]:
    """Yield a delta for each token; the last has all that the delta has beside its tokens."""
    token_ids, logprobs = delta.token_ids, delta.logprobs
    last = len(token_ids) - 1
    if logprobs is None or last < 1:
        yield delta
        return
    for index in range(last):
        yield TokenDelta([token_ids[index]], logprobs=[logprobs[index]])
    yield replace(delta, token_ids=token_ids[last:], logprobs=logprobs[last:])


def _last_of(held: list[TokenLogprob], num_bytes: int) -> list[TokenLogprob]:
    """Return the last tokens, whose texts have so many bytes: those before are marks."""
    first = len(held)
    while first and num_bytes > 0:
        first -= 1
        num_bytes -= len(held[first].bytes)
    return held[first:]

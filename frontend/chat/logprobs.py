"""Log probabilities in the forms of OpenAI's chat and completions."""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import msgspec

from tandem.frontend.parsers.pieces import TokenLogprob, TopLogprob
from tandem.runtime.wire.messages import TokenLogprobs


class TokenTexts(Protocol):
    """The texts of single tokens."""

    def token_text(self, token_id: int) -> tuple[str, list[int]]:
        """Return the text of a token, and its bytes."""


class TokenNames:
    """Tokens by their ids, in the place of their texts."""

    def token_text(self, token_id: int) -> tuple[str, list[int]]:
        name = f"token_id:{token_id}"
        return name, list(name.encode())


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a chat choice."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a completion choice; offsets are in characters of the choice's text.

    The first token of a prompt has null for its log probabilities.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


def chat_logprobs(
    texts: TokenTexts, token_ids: list[int], logprobs: list[TokenLogprobs]
) -> ChatLogprobs:
    """Return the tokens of a chat choice with their log probabilities."""
    content = []
    for token_id, token in zip(token_ids, logprobs, strict=True):
        top = [TopLogprob(*_split(texts, other, value)) for other, value in token.top]
        content.append(TokenLogprob(*_split(texts, token_id, token.logprob), top))
    return ChatLogprobs(content)


def _split(texts: TokenTexts, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    text, data = texts.token_text(token_id)
    return text, finite(logprob), data


def completion_logprobs(
    texts: TokenTexts,
    token_ids: list[int],
    logprobs: Sequence[TokenLogprobs | None],
    text_offset: int,
) -> CompletionLogprobs:
    """Return the tokens of a completion choice, the first of which begins at `text_offset`."""
    tokens = [texts.token_text(token_id)[0] for token_id in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    top = [None if token is None else _by_text(texts, token.top) for token in logprobs]
    chosen = [None if token is None else finite(token.logprob) for token in logprobs]
    return CompletionLogprobs(offsets, chosen, tokens, top if any(top) else None)


def joined(first: CompletionLogprobs, *others: CompletionLogprobs) -> CompletionLogprobs:
    """Return the tokens of all, which follow one another, as one."""
    parts = (first, *others)
    tops = [part.top_logprobs or [None] * len(part.tokens) for part in parts]
    top = list(chain.from_iterable(tops))
    return CompletionLogprobs(
        list(chain.from_iterable(part.text_offset for part in parts)),
        list(chain.from_iterable(part.token_logprobs for part in parts)),
        list(chain.from_iterable(part.tokens for part in parts)),
        top if any(top) else None,
    )


def _by_text(texts: TokenTexts, top: list[tuple[int, float]]) -> dict[str, float]:
    """Return log probabilities, best first, by text; tokens of one text have that of the best."""
    by_text: dict[str, float] = {}
    for token_id, logprob in top:
        by_text.setdefault(texts.token_text(token_id)[0], finite(logprob))
    return by_text


def finite(logprob: float) -> float:
    """Return a number for JSON, which has no infinity: OpenAI writes -9999 in its place."""
    return max(logprob, -9999.0)

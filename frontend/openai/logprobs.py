"""Log probabilities in the forms of OpenAI's chat and completions."""

import msgspec

from tandem.frontend.tokens.detokenizer import DetokenizerFactory
from tandem.runtime.messages import TokenLogprobs


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A generated token of a chat choice."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a chat choice."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a completion choice; offsets are in characters of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]] | None


def chat_logprobs(
    texts: DetokenizerFactory, token_ids: list[int], logprobs: list[TokenLogprobs]
) -> ChatLogprobs:
    """Return the tokens of a chat choice with their log probabilities."""
    content = []
    for token_id, token in zip(token_ids, logprobs, strict=True):
        top = [TopLogprob(*_split(texts, other, value)) for other, value in token.top]
        content.append(TokenLogprob(*_split(texts, token_id, token.logprob), top))
    return ChatLogprobs(content)


def _split(
    texts: DetokenizerFactory, token_id: int, logprob: float
) -> tuple[str, float, list[int]]:
    text, data = texts.token_text(token_id)
    return text, _finite(logprob), data


def completion_logprobs(
    texts: DetokenizerFactory,
    token_ids: list[int],
    logprobs: list[TokenLogprobs],
    text_offset: int,
) -> CompletionLogprobs:
    """Return the tokens of a completion choice, the first of which begins at `text_offset`."""
    tokens = [texts.token_text(token_id)[0] for token_id in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    top = [
        {texts.token_text(other)[0]: _finite(value) for other, value in token.top}
        for token in logprobs
    ]
    return CompletionLogprobs(
        offsets, [_finite(token.logprob) for token in logprobs], tokens, top if any(top) else None
    )


def _finite(logprob: float) -> float:
    """Return a number for JSON, which has no infinity: OpenAI writes -9999 in its place."""
    return max(logprob, -9999.0)

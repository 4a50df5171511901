"""From the tokens of one choice to pieces: detokenizing, stop strings, parsing, counts."""

from collections.abc import Sequence

from tandem.frontend.chat.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenNames,
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
)
from tandem.frontend.parsers.pieces import Content, OutputParser, Piece
from tandem.frontend.tokens.detokenizer import DetokenizerFactory
from tandem.frontend.tokens.stop import StopMatcher
from tandem.runtime.errors import InternalError
from tandem.runtime.wire.messages import FinishReason, TokenDelta, TokenLogprobs


class ChoiceText:
    """Turns the deltas of one sequence, in their order, into pieces.

    `is_stopped` is True when a stop string ended the choice. The worker cannot know that, so its
    stream has to be canceled.
    """

    __slots__ = (
        "_detokenizer", "_listed_texts", "_matcher", "_min_tokens", "_num_characters",
        "_num_taken", "_num_top", "_parser", "_texts", "finish_reason", "is_stopped", "num_tokens",
        "stop_token_id",
    )  # fmt: skip

    def __init__(
        self,
        factory: DetokenizerFactory,
        parser: OutputParser,
        stops: list[str],
        min_tokens: int,
        prompt: Sequence[int] = (),
        *,
        with_special: bool = False,
        shows_stop: bool = False,
        num_top: int | None = None,
        lists_ids: bool = False,
    ) -> None:
        self._texts = factory
        self._listed_texts: TokenTexts = TokenNames() if lists_ids else factory
        self._detokenizer = factory.new(prompt, with_special=with_special)
        self._parser = parser
        self._matcher = StopMatcher(stops, is_shown=shows_stop) if stops else None
        self._num_top = num_top  # of the listed log probabilities; None: all that there are
        self._min_tokens = min_tokens
        self._num_characters = 0  # of tokens with logprobs, for their offsets
        self._num_taken = 0  # tokens of the last delta, up to the one that completed a stop string
        self.num_tokens = 0  # generated, including the token that ended the sequence
        self.finish_reason: FinishReason | None = None
        self.is_stopped = False
        self.stop_token_id: int | None = None  # that ended the choice

    @property
    def is_call_cut(self) -> bool:
        """True when the text of the choice ended within a call."""
        return self._parser.is_in_call

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the choice."""
        return None if self._matcher is None else self._matcher.found

    def take(self, deltas: list[TokenDelta]) -> list[Piece]:
        """Return the pieces that can go out now; none once the choice has finished.

        Raises InternalError when the worker failed the sequence.
        """
        if self.finish_reason is not None:
            self._num_taken = 0
            return []
        text = ""
        pieces: list[Piece] = []
        for delta in deltas:
            token_ids = delta.token_ids
            if self._matcher is None:
                self._num_taken = len(token_ids)
                text += self._detokenizer.push(token_ids)
            else:
                pieces += self._take_each(self._matcher, token_ids)
            self.num_tokens += self._num_taken
            if self.is_stopped or delta.finish_reason is not None:
                return pieces + self._end(delta, text)
        return pieces + self._parser.push(text) if text else pieces

    def _take_each(self, matcher: StopMatcher, token_ids: list[int]) -> list[Piece]:
        """Take token by token, so that the count ends at the one that completes a stop string."""
        pieces: list[Piece] = []
        self._num_taken = 0
        for token_id in token_ids:
            text = self._detokenizer.push([token_id])
            parsed = self._parser.push(text) if text else []
            if self.num_tokens + self._num_taken >= self._min_tokens:
                parsed = self._until_stop(matcher, parsed)
            pieces += parsed
            self._num_taken += 1
            if self.is_stopped:
                break
        return pieces

    def _until_stop(self, matcher: StopMatcher, parsed: list[Piece]) -> list[Piece]:
        """Return the pieces up to a stop string, which only counts in content."""
        pieces: list[Piece] = []
        for piece in parsed:
            if isinstance(piece, Content):
                text, self.is_stopped = matcher.push(piece.text)
                pieces += [Content(text)] if text else []
                if self.is_stopped:
                    break
            else:
                pieces += [*_held(matcher), piece]
        return pieces

    def _end(self, delta: TokenDelta, text: str) -> list[Piece]:
        """Note the end of the choice, by a stop string or by its worker. Return the last pieces."""
        if self.is_stopped:
            self.finish_reason = "stop"
            return []
        if delta.finish_reason in ("error", "cancelled"):
            raise InternalError(f"the decode worker ended the sequence: {delta.finish_reason}")
        self.finish_reason = delta.finish_reason
        if delta.stop_token_id is not None:
            self.num_tokens += 1
            self.stop_token_id = delta.stop_token_id
        text += self._detokenizer.flush()
        pieces = self._parser.push(text) if text else []
        pieces += self._parser.finish(is_cut=delta.finish_reason == "length")
        if self._matcher is None:
            return pieces
        pieces = self._until_stop(self._matcher, pieces)
        if self.is_stopped:
            self.finish_reason = "stop"
            return pieces
        return pieces + _held(self._matcher)

    def taken(self, delta: TokenDelta) -> list[int]:
        """Return the tokens that count of the delta taken last, without a stop token."""
        return delta.token_ids[: self._num_taken]

    def with_logprobs(self, delta: TokenDelta) -> tuple[list[int], list[TokenLogprobs]]:
        """Return the tokens that count of the delta taken last, with their log probabilities.

        The stop token is among them where the worker gave its log probabilities.
        """
        if delta.logprobs is None:
            return [], []
        token_ids, logprobs = self.taken(delta), delta.logprobs[: self._num_taken]
        if self._num_top is not None:
            logprobs = list(map(self.trimmed, logprobs))
        has_more = len(delta.logprobs) > len(delta.token_ids)
        if delta.stop_token_id is not None and has_more and not self.is_stopped:
            return [*token_ids, delta.stop_token_id], [*logprobs, self.trimmed(delta.logprobs[-1])]
        return token_ids, logprobs

    def trimmed(self, token: TokenLogprobs) -> TokenLogprobs:
        """Return log probabilities with as many likeliest tokens as the answer lists."""
        if self._num_top is None:
            return token
        return TokenLogprobs(token.logprob, token.top[: self._num_top])

    def token_text(self, token_id: int) -> str:
        """Return the text of one token."""
        return self._texts.token_text(token_id)[0]

    def chat_logprobs(self, token_ids: list[int], logprobs: list[TokenLogprobs]) -> ChatLogprobs:
        """Return log probabilities in the form of chat."""
        return chat_logprobs(self._listed_texts, token_ids, logprobs)

    def completion_logprobs(
        self, token_ids: list[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        """Return log probabilities in the form of completions.

        The offsets continue from the last call.
        """
        texts, offset = self._listed_texts, self._num_characters
        listed = completion_logprobs(texts, token_ids, logprobs, offset)
        self._num_characters += sum(map(len, listed.tokens))
        return listed


def _held(matcher: StopMatcher) -> list[Piece]:
    """Return the content that a matcher holds back, when no more follows it."""
    text = matcher.flush()
    return [Content(text)] if text else []

"""One choice's tokens becoming text: detokenizing, stop strings, counts, log probabilities."""

from tandem.frontend.openai.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    chat_logprobs,
    completion_logprobs,
)
from tandem.frontend.tokens.detokenizer import DetokenizerFactory
from tandem.frontend.tokens.stop import StopMatcher
from tandem.runtime.errors import InternalError
from tandem.runtime.messages import FinishReason, TokenDelta, TokenLogprobs


class ChoiceText:
    """Takes a sequence's deltas in order and says what text they add.

    `is_stopped` tells that a stop string ended it: the worker does not know and is to be cancelled.
    """

    __slots__ = (
        "_detokenizer", "_factory", "_matcher", "_min_tokens", "_num_characters", "_num_taken",
        "finish_reason", "is_stopped", "num_tokens",
    )  # fmt: skip

    def __init__(self, factory: DetokenizerFactory, stops: list[str], min_tokens: int) -> None:
        self._factory = factory
        self._detokenizer = factory.new()
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self._num_characters = 0  # of tokens with logprobs, for their offsets
        self._num_taken = 0  # tokens of the last delta, up to the one that completed a stop string
        self.num_tokens = 0  # generated, the one that ended the sequence too
        self.finish_reason: FinishReason | None = None
        self.is_stopped = False

    def take(self, delta: TokenDelta) -> str:
        """The text that can go out now. Raises InternalError when the worker gave up."""
        num_before = self.num_tokens
        if self.finish_reason is not None:
            self._num_taken = 0
            return ""  # the worker had not heard yet that a stop string ended it
        if self._matcher is None:
            self.num_tokens += len(delta.token_ids)
            text = self._detokenizer.push(delta.token_ids)
        else:
            text = self._take_until_stop(self._matcher, delta.token_ids)
        self._num_taken = self.num_tokens - num_before
        if self.is_stopped:
            self.finish_reason = "stop"
            return text
        if delta.finish_reason is not None:
            text += self._finish(delta, delta.finish_reason)
        return text

    def _take_until_stop(self, matcher: StopMatcher, token_ids: list[int]) -> str:
        """Token by token, so that the count ends at the token that completes a stop string."""
        parts = []
        for token_id in token_ids:
            self.num_tokens += 1
            piece = self._detokenizer.push([token_id])
            if self.num_tokens <= self._min_tokens:
                parts.append(piece)
                continue
            piece, self.is_stopped = matcher.push(piece)
            parts.append(piece)
            if self.is_stopped:
                break
        return "".join(parts)

    def _finish(self, delta: TokenDelta, reason: FinishReason) -> str:
        if reason in ("error", "cancelled"):
            raise InternalError(f"the decode worker ended the sequence: {reason}")
        self.finish_reason = reason
        if delta.stop_token_id is not None:
            self.num_tokens += 1
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return rest
        text, self.is_stopped = self._matcher.push(rest)
        if self.is_stopped:
            self.finish_reason = "stop"
            return text
        return text + self._matcher.flush()

    def with_logprobs(self, delta: TokenDelta) -> tuple[list[int], list[TokenLogprobs]]:
        """Of the delta taken last: its tokens that count, with their log probabilities."""
        if delta.logprobs is None:
            return [], []
        return delta.token_ids[: self._num_taken], delta.logprobs[: self._num_taken]

    def chat_logprobs(self, token_ids: list[int], logprobs: list[TokenLogprobs]) -> ChatLogprobs:
        """The log probabilities of one or more deltas, in chat's form."""
        return chat_logprobs(self._factory, token_ids, logprobs)

    def completion_logprobs(
        self, token_ids: list[int], logprobs: list[TokenLogprobs]
    ) -> CompletionLogprobs:
        """The same in the form of completions; offsets go on from the last call."""
        listed = completion_logprobs(self._factory, token_ids, logprobs, self._num_characters)
        self._num_characters += sum(map(len, listed.tokens))
        return listed

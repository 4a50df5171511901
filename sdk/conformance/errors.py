"""What the conformance kit can find wrong with an engine: one class per broken rule.

ConformanceError
├── start              StartFailed, EmptyModelInConfig, WrongConfigValue
├── generate           GenerateFailed, NoChunksYielded, MalformedChunk, UnknownFinishReason,
│                      NoTerminalChunk, ChunkAfterTerminal, TerminalMissingUsage,
│                      UsageDoesNotAddUp, MaxTokensExceeded, AnswerTooShort,
│                      LogprobsMisaligned, PrefillParamsMissing, ConcurrentGenerateFailed,
│                      HealthCheckFailed
├── cancellation       CancellationIgnored, CancellationNotObserved, AbortFailed, AbortLeaked,
│                      DropFailed, DropLeaked
└── the end            DrainFailed, DrainCutStream, NotQuiescent, CleanupWithoutStartFailed,
                       PartialStartCleanupFailed, CleanupFailed, SecondCleanupFailed, TasksLeaked,
                       ThreadsLeaked
"""

from typing import ClassVar

from tandem.runtime.errors import TandemError


class ConformanceError(TandemError):
    """A rule that the engine breaks. `rule` is the contract; the message says what was seen."""

    rule: ClassVar[str] = ""

    def explain(self) -> str:
        """The failure in full: its name, what was seen, and the rule."""
        return f"{type(self).__name__}: {self.message}\n  The rule: {self.rule}"

    def __str__(self) -> str:
        return f"{self.message} (the rule: {self.rule})"


# ---- start ------------------------------------------------------------------------------------


class StartFailed(ConformanceError):
    rule = "start(worker_id) returns an EngineConfig once generate() may be called."


class EmptyModelInConfig(ConformanceError):
    rule = "EngineConfig.model names the model; it is the one field that must be set."


class WrongConfigValue(ConformanceError):
    rule = "A number in EngineConfig is a positive whole number, or None when not advertised."


# ---- generate ---------------------------------------------------------------------------------


class GenerateFailed(ConformanceError):
    rule = "generate(request, context) is an async generator that answers a plain request."


class NoChunksYielded(ConformanceError):
    rule = "generate() yields at least one chunk, the last one with finish_reason."


class MalformedChunk(ConformanceError):
    rule = (
        "A chunk is a dict with `index`, a whole number, and `token_ids`, a list of token ids "
        "(for a text engine `text`, a string)."
    )


class UnknownFinishReason(ConformanceError):
    rule = "finish_reason is stop, length, cancelled, error, or one of their known other names."


class NoTerminalChunk(ConformanceError):
    rule = "The last chunk carries finish_reason; a stream without it counts as incomplete."


class ChunkAfterTerminal(ConformanceError):
    rule = "Exactly one chunk carries finish_reason, and nothing is yielded after it."


class TerminalMissingUsage(ConformanceError):
    rule = (
        "The last chunk carries completion_usage with prompt_tokens, completion_tokens and "
        "total_tokens."
    )


class UsageDoesNotAddUp(ConformanceError):
    rule = (
        "completion_usage counts the request's token_ids and the tokens yielded, and total_tokens "
        "is their sum."
    )


class MaxTokensExceeded(ConformanceError):
    rule = "No more than stop_conditions.max_tokens tokens are yielded."


class AnswerTooShort(ConformanceError):
    rule = "With stop_conditions.ignore_eos an answer goes on up to max_tokens."


class LogprobsMisaligned(ConformanceError):
    rule = (
        "Where a chunk has log_probs or top_logprobs, they hold one entry per token id; a chunk "
        "that lacks one of them carries none."
    )


class PrefillParamsMissing(ConformanceError):
    rule = "The last chunk of a prefill engine carries disaggregated_params, for the decode engine."


class ConcurrentGenerateFailed(ConformanceError):
    rule = "generate() may be called many times at once; every answer is whole and its own."


class HealthCheckFailed(ConformanceError):
    rule = "What health_check_payload() returns is a request that generate() answers."


# ---- cancellation -----------------------------------------------------------------------------


class CancellationIgnored(ConformanceError):
    rule = "generate() looks at context.is_stopped() between chunks and ends soon after it is true."


class CancellationNotObserved(ConformanceError):
    rule = "A cancelled answer ends with a last chunk whose finish_reason is 'cancelled'."


class AbortFailed(ConformanceError):
    rule = (
        "abort(context) returns without an error, for a running request and for one that has "
        "ended meanwhile."
    )


class AbortLeaked(ConformanceError):
    rule = "After abort(context), what generate() had taken for the request is free again."


class DropFailed(ConformanceError):
    rule = (
        "A stream may be closed at any chunk; abort() is not called then. Release in "
        "try/finally and yield nothing more."
    )


class DropLeaked(ConformanceError):
    rule = "A closed stream frees what generate() had taken, in try/finally, without abort()."


# ---- the end ----------------------------------------------------------------------------------


class DrainFailed(ConformanceError):
    rule = "drain() returns without an error, also while answers are running."


class DrainCutStream(ConformanceError):
    rule = "drain() lets running answers come to their last chunk."


class NotQuiescent(ConformanceError):
    rule = (
        "is_quiescent() is True once no answer runs and nothing is read from this engine any "
        "more (None: the engine does not say)."
    )


class CleanupWithoutStartFailed(ConformanceError):
    rule = "cleanup() works on an engine that was never started: guard what may be unset."


class PartialStartCleanupFailed(ConformanceError):
    rule = "cleanup() works after a start() that was cut short: guard what may be unset."


class CleanupFailed(ConformanceError):
    rule = "cleanup() releases everything and returns without an error."


class SecondCleanupFailed(ConformanceError):
    rule = "A second cleanup() returns at once, without an error."


class TasksLeaked(ConformanceError):
    rule = "After cleanup() none of the engine's asyncio tasks is left."


class ThreadsLeaked(ConformanceError):
    rule = "After cleanup() none of the engine's own threads is left to keep the process alive."

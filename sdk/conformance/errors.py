"""The failures that the conformance kit finds: a name and the broken rule of each."""

from enum import Enum

from tandem.runtime.errors import TandemError


class Failure(Enum):
    """The rules of an engine's contract, each under the name of its failure."""

    # start
    StartFailed = "start(worker_id) returns an EngineConfig once generate() may be called."
    EmptyModelInConfig = "EngineConfig.model names the model; it is the one field that must be set."
    WrongConfigValue = (
        "A number in EngineConfig is a positive whole number, or None when not advertised."
    )
    # generate
    GenerateFailed = (
        "generate(request, context) is an async generator that answers a plain request."
    )
    NoChunksYielded = "generate() yields at least one chunk, the last one with finish_reason."
    MalformedChunk = (
        "A chunk is a dict with `index`, a whole number, and `token_ids`, a list of token ids (for "
        "a text engine `text`, a string)."
    )
    UnknownFinishReason = (
        "finish_reason is stop, length, cancelled, error, or one of their known other names."
    )
    NoTerminalChunk = (
        "The last chunk carries finish_reason; a stream without it counts as incomplete."
    )
    ChunkAfterTerminal = "Exactly one chunk carries finish_reason, and nothing is yielded after it."
    TerminalMissingUsage = (
        "The last chunk carries completion_usage with prompt_tokens, completion_tokens and "
        "total_tokens."
    )
    UsageDoesNotAddUp = (
        "completion_usage counts the request's token_ids and the tokens yielded, and total_tokens "
        "is their sum."
    )
    MaxTokensExceeded = "No more than stop_conditions.max_tokens tokens are yielded."
    AnswerTooShort = "With stop_conditions.ignore_eos an answer goes on up to max_tokens."
    LogprobsMisaligned = (
        "Where a chunk has log_probs or top_logprobs, they hold one entry per token id; a chunk "
        "that lacks one of them carries none."
    )
    PrefillParamsMissing = (
        "The last chunk of a prefill engine carries disaggregated_params, for the decode engine."
    )
    ConcurrentGenerateFailed = (
        "generate() may be called many times at once; every answer is whole and its own."
    )
    HealthCheckFailed = "health_check_payload() returns a request that generate() answers."
    # cancellation
    CancellationIgnored = (
        "generate() looks at context.is_stopped() between chunks and ends soon after it is true."
    )
    CancellationNotObserved = (
        "A cancelled answer ends with a last chunk whose finish_reason is 'cancelled'."
    )
    AbortFailed = (
        "abort(context) returns without an error, for a running request and for one that has ended "
        "meanwhile."
    )
    AbortLeaked = (
        "After abort(context), everything that generate() acquired for the request is released."
    )
    DropFailed = (
        "A stream may be closed at any chunk; abort() is not called then. Release in try/finally "
        "and yield nothing more."
    )
    DropLeaked = (
        "A closed stream releases what generate() acquired, in try/finally, without abort()."
    )
    # the end
    DrainFailed = "drain() returns without an error, also while answers are running."
    DrainCutStream = "drain() lets running answers come to their last chunk."
    NotQuiescent = (
        "is_quiescent() is True once no answer runs and nothing is read from this engine any more "
        "(None: the engine does not say)."
    )
    CleanupWithoutStartFailed = (
        "cleanup() works on an engine that was never started: guard what may be unset."
    )
    PartialStartCleanupFailed = (
        "cleanup() works after a start() that was cut short: guard what may be unset."
    )
    CleanupFailed = "cleanup() releases everything and returns without an error."
    SecondCleanupFailed = "A second cleanup() returns at once, without an error."
    TasksLeaked = "After cleanup() none of the engine's asyncio tasks is left."
    ThreadsLeaked = (
        "After cleanup() none of the engine's own threads is left to keep the process alive."
    )

    def error(self, seen: str) -> "ConformanceError":
        """Return the error of an engine that breaks this rule; `seen` says how."""
        return ConformanceError(self, seen)


class ConformanceError(TandemError):
    """A rule that the engine breaks: `failure` says which, the message says what was seen."""

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure

    @property
    def name(self) -> str:
        """The name of the failure."""
        return self.failure.name

    @property
    def rule(self) -> str:
        """The rule that is broken."""
        return self.failure.value

    def explain(self) -> str:
        """Return the failure in full: its name, what was seen, and the rule."""
        return f"{self.name}: {self.message}\n  The rule: {self.rule}"

    def __str__(self) -> str:
        return f"{self.name}: {self.message} (the rule: {self.rule})"

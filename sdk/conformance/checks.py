"""The checks, in the order in which they are made on one engine."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

from tandem.sdk.conformance.answers import check_logprobs, whole_answer
from tandem.sdk.conformance.cancellation import abort, cancellation, drop
from tandem.sdk.conformance.errors import (
    AnswerTooShort,
    CleanupFailed,
    ConcurrentGenerateFailed,
    ConformanceError,
    DrainCutStream,
    DrainFailed,
    EmptyModelInConfig,
    HealthCheckFailed,
    NotQuiescent,
    SecondCleanupFailed,
    StartFailed,
    WrongConfigValue,
)
from tandem.sdk.conformance.streams import NotApplicable, Subject, bounded, told
from tandem.sdk.engine.types import EngineConfig, GenerateRequest

WORKER_ID = 0x7A11DE
_POSITIVE = (
    "context_length",
    "kv_cache_block_size",
    "total_kv_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "data_parallel_size",
)


@dataclass(frozen=True)
class Check:
    """After a failed check that is not `goes_on` the engine is asked nothing more.

    What belongs to `the_end` is made all the same.
    """

    name: str
    what: str
    run: Callable[[Subject], Awaitable[None]]
    goes_on: bool = False
    the_end: bool = False


async def start(subject: Subject) -> None:
    settings = subject.settings
    try:
        config = await bounded(subject.engine.start(WORKER_ID), settings.start_timeout_s)
    except Exception as error:
        raise StartFailed(f"start() raised {told(error)}") from error
    if not isinstance(config, EngineConfig):
        raise StartFailed(f"start() returned {type(config).__name__}, not EngineConfig")
    if not isinstance(config.model, str) or not config.model.strip():
        raise EmptyModelInConfig(f"EngineConfig.model is {config.model!r}")
    for name in _POSITIVE:
        value = getattr(config, name)
        if value is not None and (not isinstance(value, int) or value <= 0):
            raise WrongConfigValue(f"EngineConfig.{name} is {value!r}")
    subject.config = config


async def generate(subject: Subject) -> None:
    settings = subject.settings
    for max_tokens in (1, settings.max_tokens):
        await whole_answer(subject, subject.ask(1 if subject.is_prefill else max_tokens))


async def length(subject: Subject) -> None:
    if subject.is_text or subject.is_prefill:
        raise NotApplicable("how many tokens it says is not for the request to choose")
    wanted = 2 * subject.settings.max_tokens
    stream = subject.ask(wanted)
    await whole_answer(subject, stream)
    if stream.num_tokens < wanted:
        raise AnswerTooShort(
            f"{wanted} tokens were asked for with ignore_eos, {stream.num_tokens} came, with "
            f"finish_reason {stream.finish_reason!r}"
        )


async def logprobs(subject: Subject) -> None:
    if subject.is_text:
        raise NotApplicable("a text engine yields no token ids")
    max_tokens = 1 if subject.is_prefill else subject.settings.max_tokens
    for wanted in (0, 2):
        stream = subject.ask(max_tokens, logprobs=wanted)
        await whole_answer(subject, stream)
        check_logprobs(stream.chunks)


async def concurrent(subject: Subject) -> None:
    """Every answer has a length of its own, so that mixed-up ones are noticed."""
    settings = subject.settings
    lengths = [
        1 if subject.is_prefill else 1 + (settings.max_tokens + number) % (2 * settings.max_tokens)
        for number in range(settings.num_concurrent)
    ]
    streams = [subject.ask(length) for length in lengths]
    for number, stream in enumerate(streams):
        try:
            await whole_answer(subject, stream)
        except ConformanceError as error:
            raise ConcurrentGenerateFailed(
                f"answer {number} of {len(streams)} at once, of {lengths[number]} tokens: "
                f"{type(error).__name__}: {error.message}"
            ) from error


async def health_check(subject: Subject) -> None:
    timeout_s = subject.settings.generate_timeout_s
    try:
        payload = await bounded(subject.engine.health_check_payload(), timeout_s)
        if payload is None:
            raise NotApplicable("health_check_payload() returned None")
        if not isinstance(payload, dict):
            raise HealthCheckFailed(f"health_check_payload() returned {type(payload).__name__}")
        chunks = await subject.ask_with(cast(GenerateRequest, {**payload})).whole(timeout_s)
    except (HealthCheckFailed, NotApplicable):
        raise
    except Exception as error:
        raise HealthCheckFailed(f"the probe failed: {told(error)}") from error
    if not chunks or not chunks[-1].get("finish_reason"):
        raise HealthCheckFailed("the probe's answer has no last chunk with a finish_reason")


async def drain(subject: Subject) -> None:
    settings = subject.settings
    max_tokens = 1 if subject.is_prefill else 4 * settings.max_tokens
    streams = [subject.ask(max_tokens) for _ in range(settings.num_drained)]
    for stream in streams:
        await stream.first(settings.generate_timeout_s)
    try:
        await bounded(subject.engine.drain(), settings.drain_timeout_s)
    except Exception as error:
        raise DrainFailed(f"drain() while {len(streams)} answers ran: {told(error)}") from error
    for number, stream in enumerate(streams):
        try:
            await whole_answer(subject, stream)
        except ConformanceError as error:
            raise DrainCutStream(
                f"answer {number} of {len(streams)} that ran during drain(): "
                f"{type(error).__name__}: {error.message}"
            ) from error
    try:
        await bounded(subject.at_rest(), settings.drain_timeout_s)
    except Exception as error:
        raise NotQuiescent(f"after drain() and the last answer: {told(error)}") from error


async def cleanup(subject: Subject) -> None:
    try:
        await bounded(subject.engine.cleanup(), subject.settings.cleanup_timeout_s)
    except Exception as error:
        raise CleanupFailed(f"cleanup() raised {told(error)}") from error


async def second_cleanup(subject: Subject) -> None:
    try:
        await bounded(subject.engine.cleanup(), subject.settings.cleanup_timeout_s)
    except Exception as error:
        raise SecondCleanupFailed(f"the second cleanup() raised {told(error)}") from error


CHECKS = (
    Check("start", "start() returns a config with a model", start),
    Check("generate", "one answer: chunks, one last chunk, usage, max_tokens", generate),
    Check("length", "with ignore_eos an answer has max_tokens tokens", length, goes_on=True),
    Check("logprobs", "logprobs go with their tokens", logprobs, goes_on=True),
    Check("concurrent", "answers at once, each its own", concurrent),
    Check("cancellation", "a cancelled answer ends soon, as cancelled", cancellation, goes_on=True),
    Check("abort", "abort() frees what generate() took", abort),
    Check("drop", "a closed stream frees what generate() took", drop),
    Check("health_check", "the health check's request is answered", health_check, goes_on=True),
    Check("drain", "drain() under load lets answers end", drain),
    Check("cleanup", "cleanup() after all this", cleanup, goes_on=True, the_end=True),
    Check("second_cleanup", "cleanup() once more", second_cleanup, goes_on=True, the_end=True),
)

"""The checks, in the order in which they are made on one engine."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

from tandem.sdk.conformance.answers import check_logprobs, whole_answer
from tandem.sdk.conformance.cancellation import abort, cancellation, drop
from tandem.sdk.conformance.errors import Failure
from tandem.sdk.conformance.streams import NotApplicable, Subject, bounded, failing_as
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
    """One check. After it fails, unless it is not `fatal`, only checks `at_end` are made."""

    name: str
    run: Callable[[Subject], Awaitable[None]]
    fatal: bool = True
    at_end: bool = False


async def start(subject: Subject) -> None:
    settings = subject.settings
    with failing_as(Failure.StartFailed, "start() raised"):
        config = await bounded(subject.engine.start(WORKER_ID), settings.start_timeout_s)
    if not isinstance(config, EngineConfig):
        raise Failure.StartFailed.error(
            f"start() returned {type(config).__name__}, not EngineConfig"
        )
    if not isinstance(config.model, str) or not config.model.strip():
        raise Failure.EmptyModelInConfig.error(f"EngineConfig.model is {config.model!r}")
    for name in _POSITIVE:
        value = getattr(config, name)
        if value is not None and (not isinstance(value, int) or value <= 0):
            raise Failure.WrongConfigValue.error(f"EngineConfig.{name} is {value!r}")
    subject.config = config


async def generate(subject: Subject) -> None:
    settings = subject.settings
    for max_tokens in (1, settings.max_tokens):
        await whole_answer(subject, subject.ask(1 if subject.is_prefill else max_tokens))


async def length(subject: Subject) -> None:
    if subject.is_text or subject.is_prefill:
        raise NotApplicable("the request does not choose the number of tokens")
    wanted = 2 * subject.settings.max_tokens
    stream = subject.ask(wanted)
    await whole_answer(subject, stream)
    if stream.num_tokens < wanted:
        raise Failure.AnswerTooShort.error(
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
    settings = subject.settings
    lengths = [  # of its own for every answer, so that mixed-up answers are noticed
        1 if subject.is_prefill else 1 + (settings.max_tokens + number) % (2 * settings.max_tokens)
        for number in range(settings.num_concurrent)
    ]
    streams = [subject.ask(length) for length in lengths]
    for number, stream in enumerate(streams):
        which = f"answer {number} of {len(streams)} at once, of {lengths[number]} tokens:"
        with failing_as(Failure.ConcurrentGenerateFailed, which):
            await whole_answer(subject, stream)


async def health_check(subject: Subject) -> None:
    timeout_s = subject.settings.generate_timeout_s
    with failing_as(Failure.HealthCheckFailed, "the probe failed:"):
        payload = await bounded(subject.engine.health_check_payload(), timeout_s)
    if payload is None:
        raise NotApplicable("health_check_payload() returned None")
    if not isinstance(payload, dict):
        raise Failure.HealthCheckFailed.error(
            f"health_check_payload() returned {type(payload).__name__}"
        )
    with failing_as(Failure.HealthCheckFailed, "the probe failed:"):
        chunks = await subject.ask_with(cast(GenerateRequest, {**payload})).whole(timeout_s)
    if not chunks or not chunks[-1].get("finish_reason"):
        raise Failure.HealthCheckFailed.error(
            "the probe's answer has no last chunk with a finish_reason"
        )


async def drain(subject: Subject) -> None:
    settings = subject.settings
    max_tokens = 1 if subject.is_prefill else 4 * settings.max_tokens
    streams = [subject.ask(max_tokens) for _ in range(settings.num_drained)]
    for stream in streams:
        await stream.first(settings.generate_timeout_s)
    with failing_as(Failure.DrainFailed, f"drain() while {len(streams)} answers ran:"):
        await bounded(subject.engine.drain(), settings.drain_timeout_s)
    for number, stream in enumerate(streams):
        which = f"answer {number} of {len(streams)} that ran during drain():"
        with failing_as(Failure.DrainCutStream, which):
            await whole_answer(subject, stream)
    with failing_as(Failure.NotQuiescent, "after drain() and the last answer:"):
        await bounded(subject.at_rest(), settings.drain_timeout_s)


async def cleanup(subject: Subject) -> None:
    with failing_as(Failure.CleanupFailed, "cleanup() raised"):
        await bounded(subject.engine.cleanup(), subject.settings.cleanup_timeout_s)


async def second_cleanup(subject: Subject) -> None:
    with failing_as(Failure.SecondCleanupFailed, "the second cleanup() raised"):
        await bounded(subject.engine.cleanup(), subject.settings.cleanup_timeout_s)


CHECKS = (
    Check("start", start),
    Check("generate", generate),
    Check("length", length, fatal=False),
    Check("logprobs", logprobs, fatal=False),
    Check("concurrent", concurrent),
    Check("cancellation", cancellation, fatal=False),
    Check("abort", abort),
    Check("drop", drop),
    Check("health_check", health_check, fatal=False),
    Check("drain", drain),
    Check("cleanup", cleanup, fatal=False, at_end=True),
    Check("second_cleanup", second_cleanup, fatal=False, at_end=True),
)

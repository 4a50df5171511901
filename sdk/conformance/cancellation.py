"""Checks of answers that are given up: cancelled, aborted, closed."""

import contextlib
import time
from collections.abc import Awaitable, Callable

from tandem.sdk.conformance.answers import check_answer, check_finish_reason, whole_answer
from tandem.sdk.conformance.errors import ConformanceError, Failure
from tandem.sdk.conformance.streams import (
    NotApplicable,
    Stream,
    Subject,
    bounded,
    described,
    failing_as,
)
from tandem.sdk.engine.types import GenerateRequest


async def cancellation(subject: Subject) -> None:
    _check_has_long_answers(subject)
    running = await _begin(subject)
    _check_is_running(running)
    await _cancel(subject, running)
    await _check_cancelled(subject, running, "stop_generating()")
    unwanted = GenerateRequest(**running.request)
    unwanted["request_id"] += "-unwanted"
    stream = subject.ask_with(unwanted)
    await _cancel(subject, stream)  # its task has not run yet
    await _check_cancelled(subject, stream, "a request that was cancelled before it began")


async def abort(subject: Subject) -> None:
    _check_has_long_answers(subject)

    async def abandon(stream: Stream) -> None:
        stream.context.kill()
        stream.drop()  # as a worker does when its caller is gone
        await _abort(subject, stream)

    await _check_leaks(subject, abandon, Failure.AbortLeaked, "aborted")
    ended = subject.ask(1)
    await whole_answer(subject, ended)
    await _abort(subject, ended)


async def drop(subject: Subject) -> None:
    _check_has_long_answers(subject)
    timeout_s = subject.settings.cancel_timeout_s

    async def abandon(stream: Stream) -> None:
        stream.drop()
        if not await stream.ended(timeout_s):
            raise Failure.DropFailed.error(
                f"a stream did not end within {timeout_s:g} s of closing it"
            )
        if stream.error is not None:
            raise Failure.DropFailed.error(
                f"closing a stream raised {described(stream.error)}"
            ) from stream.error

    await _check_leaks(subject, abandon, Failure.DropLeaked, "closed")


# ---- parts --------------------------------------------------------------------------------------


def _check_has_long_answers(subject: Subject) -> None:
    if subject.is_prefill:
        raise NotApplicable("a prefill engine ends after one token")


async def _begin(subject: Subject) -> Stream:
    """Return a long answer that has its first chunk."""
    stream = subject.ask(subject.num_long_tokens())
    if not await stream.first(subject.settings.generate_timeout_s):
        raise Failure.NoChunksYielded.error(
            f"no chunk came within {subject.settings.generate_timeout_s:g} s of an answer of "
            f"{subject.num_long_tokens()} tokens"
        )
    return stream


def _check_is_running(stream: Stream) -> None:
    """Raise unless the answer is running: only then can it be given up."""
    if not stream.task.done():
        return
    if stream.error is not None:
        raise Failure.GenerateFailed.error(
            f"generate() raised {described(stream.error)}"
        ) from stream.error
    raise NotApplicable(f"all {stream.num_tokens} tokens of a long answer come at once")


async def _cancel(subject: Subject, stream: Stream) -> None:
    """Cancel as a worker does: mark the context, then call the engine's abort()."""
    stream.context.stop_generating()
    with contextlib.suppress(ConformanceError):  # the check of abort() finds these
        await _abort(subject, stream)


async def _check_cancelled(subject: Subject, stream: Stream, how: str) -> None:
    timeout_s = subject.settings.cancel_timeout_s
    begun = time.perf_counter()
    num_tokens = stream.num_tokens
    if not await stream.ended(timeout_s):
        raise Failure.CancellationIgnored.error(
            f"{how}: the answer went on for {timeout_s:g} s, by "
            f"{stream.num_tokens - num_tokens} tokens"
        )
    if stream.error is not None:
        raise Failure.CancellationNotObserved.error(
            f"{how}: generate() raised {described(stream.error)}"
        )
    reason = stream.finish_reason
    if reason is None or check_finish_reason(reason) != "cancelled":
        took_s = time.perf_counter() - begun
        raise Failure.CancellationNotObserved.error(
            f"{how}: the answer ended after {took_s:.2f} s with finish_reason {reason!r}"
        )
    check_answer(
        stream.chunks, stream.request, is_text=subject.is_text, is_prefill=subject.is_prefill
    )


async def _abort(subject: Subject, stream: Stream) -> None:
    state = "has ended" if stream.task.done() else "is running"
    with failing_as(Failure.AbortFailed, f"abort() of a request that {state}:"):
        await bounded(subject.engine.abort(stream.context), subject.settings.cancel_timeout_s)


async def _check_leaks(
    subject: Subject, abandon: Callable[[Stream], Awaitable[None]], leaked: Failure, done: str
) -> None:
    """Abandon more answers than the engine has room for, then ask for a whole one."""
    settings = subject.settings
    room = (subject.config and subject.config.max_num_seqs) or settings.num_concurrent
    rounds = min(room, settings.num_abandoned) + 1
    for number in range(rounds):
        stream = subject.ask(subject.num_long_tokens())
        if not await stream.first(settings.generate_timeout_s):
            raise leaked.error(
                f"after {number} {done} answers the next one got no chunk within "
                f"{settings.generate_timeout_s:g} s"
            )
        _check_is_running(stream)
        await abandon(stream)
        if not await stream.ended(settings.cancel_timeout_s):
            await stream.close()
    with failing_as(leaked, f"after {rounds} {done} answers a plain one failed:"):
        await whole_answer(subject, subject.ask(settings.max_tokens))
    with failing_as(leaked, f"after {rounds} {done} answers:"):
        await bounded(subject.at_rest(), settings.cancel_timeout_s)

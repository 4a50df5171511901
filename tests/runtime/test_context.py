"""Cancellation and deadlines."""

import asyncio
import math

import pytest

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import CancelledRequestError, DeadlineError


async def test_cancelling_reaches_callbacks_once_with_the_first_reason() -> None:
    context = RequestContext("r")
    heard: list[str] = []
    context.on_cancel(lambda: heard.append("one"))
    context.on_cancel(lambda: heard.append("other"))
    context.cancel("client went away")
    context.cancel("again")
    assert heard == ["one", "other"]
    assert context.is_cancelled
    assert await context.cancelled() == "client went away"
    with pytest.raises(CancelledRequestError, match="client went away"):
        context.raise_if_done()


async def test_a_deadline_raises_its_own_error() -> None:
    assert RequestContext().remaining_s() == math.inf
    context = RequestContext(timeout_s=0.02)
    assert context.remaining_s() <= 0.02
    context.raise_if_done()
    assert await context.cancelled() == "deadline"
    assert context.remaining_s() < 0.01
    with pytest.raises(DeadlineError):
        context.raise_if_done()


async def test_a_cancelled_request_stays_cancelled_after_its_deadline() -> None:
    context = RequestContext(timeout_s=0.01)
    context.cancel("first")
    await asyncio.sleep(0.02)
    assert isinstance(context.error(), CancelledRequestError)


async def test_a_callback_that_was_taken_back_is_not_called() -> None:
    context = RequestContext(timeout_s=60)
    heard: list[int] = []
    context.on_cancel(lambda: heard.append(1))()
    context.cancel("x")
    assert heard == []


async def test_a_callback_added_too_late_is_called_at_once() -> None:
    context = RequestContext()
    context.cancel("x")
    heard: list[int] = []
    context.on_cancel(lambda: heard.append(1))
    assert heard == [1]


async def test_waiters_are_woken() -> None:
    context = RequestContext()
    waiting = asyncio.create_task(context.cancelled())
    await asyncio.sleep(0)
    context.cancel("now")
    assert await waiting == "now"

"""Cancellation and deadlines."""

import asyncio
import math

import pytest

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import CancelledRequestError, DeadlineError


async def test_cancelling_reaches_children_and_callbacks_once() -> None:
    parent = RequestContext("r")
    grandchild = parent.child().child()
    heard: list[str] = []
    grandchild.on_cancel(lambda: heard.append("grandchild"))
    parent.on_cancel(lambda: heard.append("parent"))
    parent.cancel("client went away")
    parent.cancel("again")
    assert sorted(heard) == ["grandchild", "parent"]
    assert grandchild.is_cancelled
    assert await grandchild.cancelled() == "client went away"
    with pytest.raises(CancelledRequestError, match="client went away"):
        grandchild.raise_if_done()


async def test_cancelling_a_child_leaves_the_parent() -> None:
    parent = RequestContext()
    parent.child().cancel("only me")
    assert not parent.is_cancelled
    parent.raise_if_done()


async def test_a_deadline_cascades_and_raises_its_own_error() -> None:
    parent = RequestContext(timeout_s=0.02)
    child = parent.child(timeout_s=60)
    assert child.remaining_s() <= 0.02
    assert await child.cancelled() == "deadline"
    assert child.remaining_s() < 0.01
    with pytest.raises(DeadlineError):
        child.raise_if_done()
    with pytest.raises(DeadlineError):
        parent.raise_if_done()


async def test_a_child_may_end_sooner_than_its_parent() -> None:
    parent = RequestContext()
    assert parent.remaining_s() == math.inf
    async with parent.child(timeout_s=0.01) as child:
        await child.cancelled()
    assert not parent.is_cancelled


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


async def test_children_get_a_copy_of_the_headers() -> None:
    parent = RequestContext(headers={"traceparent": "00"})
    child = parent.child()
    child.headers["x"] = "y"
    assert parent.headers == {"traceparent": "00"}
    assert child.id == parent.id

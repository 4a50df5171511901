"""The context of a handler, without a wire."""

import asyncio

import pytest

from tandem.runtime.context import RequestContext
from tandem.sdk import Context


@pytest.mark.parametrize("end", [Context.stop_generating, Context.kill])
async def test_waiting_wakes_at_a_stop_and_at_a_kill(end: object) -> None:
    context = Context()
    waiting = asyncio.create_task(context.async_killed_or_stopped())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert callable(end)
    end(context)
    assert await asyncio.wait_for(waiting, 60)
    assert await asyncio.wait_for(context.async_killed_or_stopped(), 60)  # and at once after it


async def test_waiting_that_was_cancelled_leaves_nothing_behind() -> None:
    context = Context()
    waiting = asyncio.create_task(context.async_killed_or_stopped())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    request = context.request_context
    assert not request._on_cancel and not request._on_stop


def test_a_stop_reaches_callbacks_once_and_late_ones_at_once() -> None:
    request = RequestContext("r")
    heard: list[str] = []
    request.on_stop(lambda: heard.append("stop"))
    request.stop()
    request.stop()
    assert request.is_stopped and not request.is_cancelled
    request.on_stop(lambda: heard.append("late"))
    assert heard == ["stop", "late"]


def test_nothing_is_stopped_after_it_was_cancelled() -> None:
    request = RequestContext("r")
    heard: list[str] = []
    request.on_stop(lambda: heard.append("stop"))
    request.cancel("gone")
    request.stop()
    assert heard == []


def test_the_trace_is_read_from_the_headers() -> None:
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    context = Context(headers={"traceparent": f"00-{trace}-{span}-01"})
    assert (context.trace_id, context.span_id) == (trace, span)


@pytest.mark.parametrize("header", ["", "00-12-34-01", "nonsense"])
def test_a_header_that_is_no_trace_is_none(header: str) -> None:
    context = Context(headers={"traceparent": header})
    assert context.trace_id is None and context.span_id is None

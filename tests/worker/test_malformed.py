"""What a worker answers to a process of the cluster that sends it nonsense: one line, no bug."""

import pytest

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import InternalError, InvalidRequestError, TandemError
from tests.handoff_peer import fresh_prompt
from tests.malformed import garbage, wrong_messages
from tests.worker.pair import Pair

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def answered(pair: Pair, endpoint: str, payload: bytes) -> TandemError | None:
    """The error of a call to worker `one`; None: it has answered."""
    try:
        async with RequestContext(timeout_s=60) as context:
            address = pair.one.node.server.address
            await pair.peer.node.client.call(address, endpoint, payload, context)
    except TandemError as error:
        return error
    return None


async def test_every_endpoint_refuses_what_is_no_message_in_one_line(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    endpoints = list(pair.one.node.server._handlers)
    assert len(endpoints) >= 10
    num_readers = 0
    for endpoint in endpoints:
        if await answered(pair, endpoint, b"\xc1") is None:
            continue  # it has no use for a payload
        num_readers += 1
        for payload in garbage():
            error = await answered(pair, endpoint, payload)
            assert isinstance(error, InvalidRequestError), (endpoint, payload[:40])
            assert error.message.isprintable() and len(error.message) < 500
    assert num_readers >= 7
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_no_message_with_a_wrong_field_is_a_bug_of_any_endpoint(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    num_sent = 0
    for endpoint in list(pair.one.node.server._handlers):
        for payloads in wrong_messages():
            for payload in payloads:
                error = await answered(pair, endpoint, payload)
                assert not isinstance(error, InternalError), (endpoint, payload[:200])
                num_sent += 1
                if isinstance(error, InvalidRequestError) and error.param == "type":
                    break  # it takes messages of other kinds
    assert num_sent > 300
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
    await pair.answered(pair.one, fresh_prompt(21, seed=1), place="remote")

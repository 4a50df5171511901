import asyncio
from time import perf_counter

import pytest

from tandem.bench.client.openai import OpenAIClient, PreparedRequest
from tandem.bench.client.record import RequestRecord
from tandem.runtime.errors import ConfigError, ServiceError
from tests.bench.load.sse_server import (
    Answer,
    CloseConnection,
    Exchange,
    answer_in_full,
    event,
    serving,
    text_event,
    usage_event,
)

STREAM_REQUEST = PreparedRequest(b'{"prompt": "xyz", "stream": true, "max_tokens": 3}', 3)


def streaming(*chunks: bytes, ends: bool = True) -> Answer:
    """Return an answer of these chunks; the connection is cut after them unless it `ends`."""

    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        for chunk in chunks:
            await exchange.send_chunk(chunk)
        if not ends:
            raise CloseConnection
        await exchange.end_stream()

    return answer


def sending(data: bytes) -> Answer:
    async def answer(exchange: Exchange) -> None:
        if not data:
            raise CloseConnection
        await exchange.send(data)

    return answer


async def ask(
    url: str, request: PreparedRequest = STREAM_REQUEST, timeout_s: float = 60.0
) -> RequestRecord:
    client = OpenAIClient(url, timeout_s=timeout_s)
    record = RequestRecord(0, 0.0)
    try:
        await client.send(request, record, perf_counter())
    finally:
        client.close()
    return record


async def answer_of(answer: Answer, **options: float) -> RequestRecord:
    async with serving(answer) as server:
        return await ask(server.url, **options)


async def test_a_stream_becomes_a_record() -> None:
    record = await answer_of(answer_in_full)
    assert record.succeeded
    assert (record.status, record.finish_reason, record.prefill_place) == (200, "length", "local")
    assert (record.num_input_tokens, record.num_output_tokens) == (3, 3)
    assert len(record.output_times_s) == 3
    assert 0 <= record.sent_s <= record.output_times_s[0] <= record.end_s
    assert record.output_times_s == sorted(record.output_times_s)


async def test_events_split_at_every_byte_and_packed_into_one_read_count_the_same() -> None:
    body = text_event("a") + text_event("b", "stop") + usage_event(5, 2, 4) + b"data: [DONE]\n\n"

    for chunks in ([body[at : at + 1] for at in range(len(body))], [body]):
        record = await answer_of(streaming(*chunks))
        assert record.succeeded
        assert len(record.output_times_s) == 2
        assert (record.num_input_tokens, record.num_cached_tokens) == (5, 4)


async def test_a_chunk_of_several_tokens_is_one_output_event() -> None:
    last = text_event("", "stop") + usage_event(1, 3) + b"data: [DONE]\n\n"
    record = await answer_of(streaming(text_event("three tokens here"), last))
    assert (len(record.output_times_s), record.num_output_tokens) == (1, 3)


async def test_without_usage_output_events_stand_for_tokens() -> None:
    record = await answer_of(streaming(text_event("a") + text_event("b", "stop")))
    assert record.succeeded
    assert (record.has_usage, record.num_output_tokens) == (False, 2)


async def test_a_response_that_is_not_streamed_has_usage_and_no_output_events() -> None:
    async with serving() as server:
        record = await ask(server.url, PreparedRequest(b'{"prompt": "xyz", "max_tokens": 2}', 2))
    assert record.succeeded
    assert (record.num_output_tokens, record.finish_reason) == (2, "length")
    assert record.output_times_s == []
    assert record.end_s > 0


@pytest.mark.parametrize(("closes", "num_connections"), [(False, 1), (True, 3)])
async def test_a_connection_is_used_again_unless_the_server_closes_it(
    closes: bool, num_connections: int
) -> None:
    async def answer(exchange: Exchange) -> None:
        await answer_in_full(exchange)
        if closes:
            raise CloseConnection

    async with serving(answer) as server:
        client = OpenAIClient(server.url)
        for index in range(3):
            record = RequestRecord(index, 0.0)
            await client.send(STREAM_REQUEST, record, perf_counter())
            assert record.succeeded
        client.close()
        assert server.num_connections == num_connections


async def test_a_stale_connection_is_replaced_once_and_counted() -> None:
    num_answered = 0

    async def answer(exchange: Exchange) -> None:
        nonlocal num_answered
        num_answered += 1
        if num_answered == 2:  # takes the request on the kept connection, and goes away
            raise CloseConnection
        await answer_in_full(exchange)

    async with serving(answer) as server:
        client = OpenAIClient(server.url)
        for index in range(2):
            record = RequestRecord(index, 0.0)
            await client.send(STREAM_REQUEST, record, perf_counter())
            assert record.succeeded
        client.close()
        assert (server.num_connections, client.pool.num_reconnects) == (2, 1)


async def overloaded(exchange: Exchange) -> None:
    error = {"message": "try later", "type": "server_error", "code": "overloaded"}
    await exchange.send_json(503, {"error": error})


@pytest.mark.parametrize(
    ("answer", "error", "num_events"),
    [
        (overloaded, "http_503 overloaded", 0),
        (sending(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 5\r\n\r\nsorry"), "http_502", 0),
        (
            streaming(text_event("a"), event(error={"message": "gone", "code": "connection_lost"})),
            "stream_error connection_lost",
            1,
        ),
        (streaming(text_event("a")), "incomplete_stream", 1),
        (streaming(text_event("a"), ends=False), "closed_early", 1),
        (sending(b""), "closed_early", 0),
        (sending(b"this is not HTTP\r\n\r\n"), "protocol", 0),
        (streaming(b"data: {oops\n\n" + text_event("a", "stop")), "protocol", 1),
    ],
)
async def test_a_failure_is_named_and_its_time_is_kept(
    answer: Answer, error: str, num_events: int
) -> None:
    record = await answer_of(answer)
    assert not record.succeeded
    assert (record.error, len(record.output_times_s)) == (error, num_events)
    assert record.end_s >= max(record.output_times_s, default=0.0) and record.error_message


async def test_a_body_that_ends_with_the_connection_is_complete() -> None:
    async def answer(exchange: Exchange) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        await exchange.send(head + text_event("a", "stop") + b"data: [DONE]\n\n")
        raise CloseConnection

    assert (await answer_of(answer)).succeeded


async def test_a_silent_server_is_a_timeout() -> None:
    async def answer(exchange: Exchange) -> None:
        await asyncio.Event().wait()

    record = await answer_of(answer, timeout_s=0.05)
    assert record.error == "timeout"
    assert record.end_s > 0


async def test_a_refused_connection_is_named() -> None:
    async with serving() as server:
        url = server.url
    record = await ask(url)
    assert record.error == "connect"
    assert url.removeprefix("http://") in record.error_message


async def test_a_server_without_models_endpoint_is_named() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.send_json(404, {"error": {"message": "no"}})

    async with serving(answer) as server:
        client = OpenAIClient(server.url)
        with pytest.raises(ServiceError, match="HTTP 404"):
            await client.served_models()
        client.close()


def test_an_address_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="localhost:8000"):
        OpenAIClient("localhost:8000")

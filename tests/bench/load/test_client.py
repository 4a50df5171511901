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


async def ask(
    url: str, request: PreparedRequest = STREAM_REQUEST, timeout_s: float = 10.0
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

    async def split(exchange: Exchange) -> None:
        await exchange.start_stream()
        for index in range(len(body)):
            await exchange.send_chunk(body[index : index + 1])
        await exchange.end_stream()

    async def packed(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.send_chunk(body)
        await exchange.end_stream()

    for answer in (split, packed):
        record = await answer_of(answer)
        assert record.succeeded
        assert len(record.output_times_s) == 2
        assert (record.num_input_tokens, record.num_cached_tokens) == (5, 4)


async def test_a_chunk_of_several_tokens_is_one_output_event() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.send_chunk(text_event("three tokens here"))
        await exchange.send_chunk(text_event("", "stop") + usage_event(1, 3) + b"data: [DONE]\n\n")
        await exchange.end_stream()

    record = await answer_of(answer)
    assert (len(record.output_times_s), record.num_output_tokens) == (1, 3)


async def test_without_usage_output_events_stand_for_tokens() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.send_chunk(text_event("a") + text_event("b", "stop"))
        await exchange.end_stream()

    record = await answer_of(answer)
    assert record.succeeded
    assert (record.has_usage, record.num_output_tokens) == (False, 2)


async def test_a_response_that_is_not_streamed_has_usage_and_no_output_events() -> None:
    async with serving() as server:
        record = await ask(server.url, PreparedRequest(b'{"prompt": "xyz", "max_tokens": 2}', 2))
    assert record.succeeded
    assert (record.num_output_tokens, record.finish_reason) == (2, "length")
    assert record.output_times_s == []
    assert record.end_s > 0


async def test_connections_are_kept_and_used_again() -> None:
    async with serving() as server:
        client = OpenAIClient(server.url)
        for index in range(5):
            record = RequestRecord(index, 0.0)
            await client.send(STREAM_REQUEST, record, perf_counter())
            assert record.succeeded
        client.close()
        assert server.num_connections == 1


async def test_a_connection_that_the_server_closes_after_an_answer_is_not_used_again() -> None:
    async def answer(exchange: Exchange) -> None:
        await answer_in_full(exchange)
        raise CloseConnection

    async with serving(answer) as server:
        client = OpenAIClient(server.url)
        for index in range(3):
            record = RequestRecord(index, 0.0)
            await client.send(STREAM_REQUEST, record, perf_counter())
            assert record.succeeded
        client.close()
        assert server.num_connections == 3


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


async def test_an_http_error_is_named_by_status_and_code() -> None:
    async def answer(exchange: Exchange) -> None:
        error = {"message": "try later", "type": "server_error", "code": "overloaded"}
        await exchange.send_json(503, {"error": error})

    record = await answer_of(answer)
    assert (record.error, record.error_message) == ("http_503 overloaded", "try later")


async def test_an_error_event_in_mid_stream_fails_the_request() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.send_chunk(text_event("a"))
        await exchange.send_chunk(
            event(error={"message": "worker died", "code": "connection_lost"})
        )
        await exchange.end_stream()

    record = await answer_of(answer)
    assert (record.error, record.error_message) == ("stream_error connection_lost", "worker died")
    assert len(record.output_times_s) == 1


async def test_a_stream_that_ends_without_a_finish_is_incomplete() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.send_chunk(text_event("a"))
        await exchange.end_stream()

    assert (await answer_of(answer)).error == "incomplete_stream"


async def test_a_connection_cut_in_mid_stream_is_closed_early() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.send_chunk(text_event("a"))
        raise CloseConnection

    record = await answer_of(answer)
    assert record.error == "closed_early"
    assert record.end_s >= record.output_times_s[0]


async def test_a_connection_closed_without_an_answer_is_closed_early() -> None:
    async def answer(exchange: Exchange) -> None:
        raise CloseConnection

    assert (await answer_of(answer)).error == "closed_early"


async def test_a_body_that_ends_with_the_connection_is_complete() -> None:
    async def answer(exchange: Exchange) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        await exchange.send(head + text_event("a", "stop") + b"data: [DONE]\n\n")
        raise CloseConnection

    assert (await answer_of(answer)).succeeded


@pytest.mark.parametrize("data", [b"this is not HTTP\r\n\r\n", b"\x00\x01\x02\x03" * 8])
async def test_an_answer_that_is_not_http_is_a_protocol_error(data: bytes) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.send(data)

    assert (await answer_of(answer)).error == "protocol"


async def test_an_event_that_is_not_json_is_a_protocol_error() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.send_chunk(b"data: {oops\n\n" + text_event("a", "stop"))
        await exchange.end_stream()

    assert (await answer_of(answer)).error == "protocol"


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
            await client.list_models()
        client.close()


def test_an_address_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="localhost:8000"):
        OpenAIClient("localhost:8000")

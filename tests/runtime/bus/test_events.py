"""Publish and subscribe: the same in memory and over NATS, which may go away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import pytest

from tandem.runtime.bus.events import Events, MemoryEvents, NatsEvents, kv_subject, load_subject
from tandem.runtime.bus.nats import NatsConnection
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ServiceError
from tandem.runtime.process.lifecycle import started
from tests.services import MonitoredNatsServer, NatsServer, eventually, free_port


def connected(server: NatsServer) -> AbstractAsyncContextManager[NatsConnection]:
    return started(NatsConnection(RuntimeConfig(nats_url=server.url)))


@pytest.fixture(params=["memory", "nats"])
async def events(request: pytest.FixtureRequest) -> AsyncIterator[Events]:
    if request.param == "memory":
        async with started(MemoryEvents()) as memory:
            yield memory
    else:
        server: NatsServer = request.getfixturevalue("nats")
        async with connected(server) as connection, started(NatsEvents(connection)) as events:
            yield events


async def test_subscribers_hear_their_subjects_in_order(events: Events) -> None:
    loads: list[tuple[str, bytes]] = []
    kvs: list[bytes] = []
    await events.subscribe(load_subject("ns"), lambda subject, data: loads.append((subject, data)))
    await events.subscribe(kv_subject("ns", "a"), lambda subject, data: kvs.append(data))
    for i in range(100):
        events.publish(load_subject("ns", "a"), b"%d" % i)
    events.publish(load_subject("other", "a"), b"not ours")
    events.publish(kv_subject("ns", "b"), b"not a's")
    events.publish(kv_subject("ns", "a"), b"kv")
    await eventually(lambda: len(loads) == 100 and bool(kvs))
    assert loads == [("tandem.ns.load.a", b"%d" % i) for i in range(100)]
    assert kvs == [b"kv"]


async def test_a_failing_listener_hears_the_next_message(events: Events) -> None:
    heard: list[bytes] = []

    def listener(subject: str, data: bytes) -> None:
        heard.append(data)
        raise ValueError(data)

    await events.subscribe("tandem.x.load.y", listener)
    events.publish("tandem.x.load.y", b"1")
    events.publish("tandem.x.load.y", b"2")
    await eventually(lambda: heard == [b"1", b"2"])


async def test_a_listener_that_has_unsubscribed_hears_nothing_more(events: Events) -> None:
    gone: list[bytes] = []
    heard: list[bytes] = []
    unsubscribe = await events.subscribe("tandem.x.load.y", lambda subject, data: gone.append(data))
    await events.subscribe("tandem.x.load.*", lambda subject, data: heard.append(data))
    events.publish("tandem.x.load.y", b"1")
    await eventually(lambda: gone == heard == [b"1"])
    await unsubscribe()
    await unsubscribe()
    events.publish("tandem.x.load.y", b"2")
    await eventually(lambda: heard == [b"1", b"2"])
    assert gone == [b"1"]


async def test_a_subscription_that_ended_while_nats_was_away_does_not_come_back() -> None:
    with MonitoredNatsServer() as server:
        async with connected(server) as connection:
            events = NatsEvents(connection)
            ends = [await events.subscribe(subject, lambda *_: None) for subject in ("a.b", "c.d")]
            await eventually(lambda: server.num_subscriptions("a.b") == 1)
            server.kill()
            await eventually(lambda: not events.connected)
            await ends[0]()
            server.start()
            await eventually(lambda: server.num_subscriptions("c.d") == 1)
            assert server.num_subscriptions("a.b") == 0
        await ends[1]()


async def test_a_subject_that_is_not_utf_8_does_not_end_the_subscriptions(
    nats: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[bytes] = []
    async with connected(nats) as connection, started(NatsEvents(connection)) as events:
        await events.subscribe("utf.load.*", lambda subject, data: heard.append(data))
        await connection.client.flush()
        reader, writer = await asyncio.open_connection("127.0.0.1", nats.port)
        await reader.readline()  # INFO; the server may lose data that come before it
        writer.write(b'CONNECT {"verbose":false}\r\nPUB utf.load.\xff\xfe 3\r\nbad\r\n')
        writer.write(b"PUB utf.load.a 4\r\ngood\r\n")
        await eventually(lambda: heard == [b"bad", b"good"])
        assert "a malformed message to b'utf.load.\\xff\\xfe'" in caplog.text
        writer.close()


async def test_no_nats_is_an_error_that_names_the_address() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    connection = NatsConnection(RuntimeConfig(nats_url=url, connect_attempts=2))
    with pytest.raises(ServiceError, match=rf"NATS not reachable at {url} after 2 attempts \("):
        async with started(connection):
            pass


async def test_while_nats_is_away_events_are_dropped_and_counted_and_then_flow_again() -> None:
    heard: list[bytes] = []
    back = asyncio.Event()

    async def on_reconnect() -> None:
        back.set()

    with NatsServer() as server:
        async with connected(server) as connection, started(NatsEvents(connection)) as events:
            await events.subscribe("tandem.*.load.*", lambda subject, data: heard.append(data))
            connection.on_reconnect(on_reconnect)
            server.kill()
            await eventually(lambda: not events.connected)
            for _ in range(10):
                events.publish("tandem.ns.load.a", b"lost")
            server.restart(empty=True)
            await back.wait()
            events.publish("tandem.ns.load.a", b"after")
            await eventually(lambda: bool(heard))
            assert heard == [b"after"]


async def test_a_frozen_nats_is_noticed_and_closing_stays_bounded() -> None:
    with NatsServer() as server:
        async with connected(server) as connection:
            server.freeze()
            await eventually(lambda: not connection.connected)

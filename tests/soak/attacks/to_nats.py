"""Attacks of anyone who reaches NATS: tickets and events that no worker of the cluster sent."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client

from tandem.queue.streams import QueueNames
from tandem.runtime.bus.events import kv_subject, load_subject
from tandem.runtime.bus.nats import NatsConnection
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.wire.bounds import Message
from tandem.runtime.wire.cluster_messages import KvEvent, LoadReport
from tandem.runtime.wire.messages import encode
from tests.soak.attacks.target import ANSWER_S, HOLD_S, Attack, Target, connected
from tests.soak.attacks.to_etcd import planted_instances_at
from tests.soak.attacks.traps import GREETINGS, trap

NESTS = (b"\x91" * 4000, b"\x91" * 200_000, b"\x81\xa1a" * 60_000)
GARBAGE = (b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"{}", secrets.token_bytes(1000), *NESTS)
Ticket = dict[str, Any]
HUGE = (-1, 2**31, 10**9, 2**63 - 1)


@asynccontextmanager
async def _client(target: Target) -> AsyncIterator[Client]:
    """Connect as a process of the cluster does, whose client survives what other strangers send."""
    connection = NatsConnection(RuntimeConfig(nats_url=target.nats_url))
    await connection.start()
    try:
        yield connection.client
        with contextlib.suppress(nats.errors.Error):
            await connection.client.flush(timeout=ANSWER_S)
    finally:
        await connection.close()


def _subject(target: Target) -> str:
    return QueueNames.of(target.namespace, target.model, target.deployment).subject


async def _captured_ticket(target: Target, client: Client) -> Ticket:
    """Return the fields of an honest request's ticket."""
    subscription = await client.subscribe(f"{_subject(target)}.*")
    while True:
        message = await subscription.next_msg(timeout=ANSWER_S)
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):  # another stranger's
            ticket = msgspec.msgpack.decode(message.data, type=Ticket)
            if type(ticket.get("num_tokens")) is int:
                await subscription.unsubscribe()
                return ticket


async def _publish_changed(target: Target, client: Client, ticket: Ticket, **changes: Any) -> None:
    changed = {**ticket, "handoff_id": secrets.token_bytes(16), **changes}
    await client.publish(f"{_subject(target)}.10", msgspec.msgpack.encode(changed))


async def garbage_tickets(target: Target) -> list[int]:
    async with _client(target) as client:
        for data in GARBAGE * 5:
            await client.publish(f"{_subject(target)}.10", data)
        for headers in ({"Status": "408"}, {"Nats-Msg-Id": "\x1b[31m"}, {"a": "b" * 4000}):
            await client.publish(f"{_subject(target)}.10", b"", headers=headers)
    return []


async def odd_subjects(target: Target) -> list[int]:
    names = ("abc", "-1", "9" * 30, "1e9", "=41", "%s", "💥", "x" * 3000)
    async with _client(target) as client:
        for name in names * 20:
            await client.publish(f"{_subject(target)}.{name}", b"\xc1")
    url = urlsplit(target.nats_url)
    options = json.dumps({"verbose": False, "user": url.username, "pass": url.password})
    async with connected(f"{url.hostname}:{url.port}") as (reader, writer):
        await reader.readline()  # INFO; the server may lose data that come before it
        writer.write(f"CONNECT {options}\r\n".encode())
        for name in (b"\xff\xfe", b"\x01", b"a\x1b[31m"):
            for subject in (_subject(target), f"tandem.{target.namespace}.load"):
                writer.write(b"PUB %b.%b 1\r\nx\r\n" % (subject.encode(), name))
        writer.write(b"PING\r\n")
        assert await reader.readline() == b"PONG\r\n"
    return []


async def replayed_tickets(target: Target) -> list[int]:
    async with _client(target) as client:
        ticket = await _captured_ticket(target, client)
        for _ in range(50):
            await client.publish(f"{_subject(target)}.10", msgspec.msgpack.encode(ticket))
    return []


async def tickets_with_numbers_out_of_range(target: Target) -> list[int]:
    async with _client(target) as client:
        ticket = await _captured_ticket(target, client)
        for field in ("num_tokens", "num_uncached_tokens", "deadline_ms", "attempt"):
            for number in HUGE:
                await _publish_changed(target, client, ticket, **{field: number})
        await _publish_changed(target, client, ticket, handoff_id=b"x" * 4000)
    return []


async def tickets_of_strangers(target: Target) -> list[int]:
    """The prefill worker is to dial a server that greets in one way or another, and then waits."""
    async with _client(target) as client:
        ticket = await _captured_ticket(target, client)
        planted = "0" * len(ticket["decode_instance"])
        for greeting in GREETINGS:
            async with trap(greeting) as address, planted_instances_at(target, address):
                for decode_instance in (planted, "stranger", "") * 10:
                    await _publish_changed(target, client, ticket, decode_instance=decode_instance)
                await client.flush(timeout=ANSWER_S)
                await asyncio.sleep(HOLD_S)
    return []


async def large_tickets(target: Target) -> list[int]:
    async with _client(target) as client:
        for _ in range(60):
            await client.publish(f"{_subject(target)}.10", b"x" * 1_000_000)
    return []


async def garbage_events(target: Target) -> list[int]:
    async with _client(target) as client:
        for subject in (load_subject(target.namespace, "x"), kv_subject(target.namespace, "x")):
            for data in GARBAGE * 10:
                await client.publish(subject, data)
            await client.publish(subject, b"x", headers={"a": "b" * 4000})
    return []


async def forged_events(target: Target) -> list[int]:
    load = LoadReport(
        "x", "e", "decode", num_running=-(2**63), num_waiting=2**63 - 1,
        num_waiting_tokens=2**63 - 1, num_blocks=0, num_free_blocks=-1, num_cached_blocks=2**40,
    )  # fmt: skip
    hashes = [secrets.token_bytes(16) for _ in range(2000)]
    events: list[tuple[str, Message]] = [
        (load_subject(target.namespace, "x"), load),
        *(
            (kv_subject(target.namespace, f"x{i}"), KvEvent(f"x{i}", "e", i, stored=hashes))
            for i in range(50)
        ),
        (kv_subject(target.namespace, "x"), KvEvent("x", "e", -1, removed=[b""], cleared=True)),
    ]
    async with _client(target) as client:
        for subject, event in events:
            await client.publish(subject, encode(event))
    return []


async def deleted_queue(target: Target) -> list[int]:
    names = QueueNames.of(target.namespace, target.model, target.deployment)
    async with _client(target) as client:
        jetstream = client.jetstream()
        for name in (names.stream, names.dead_stream):
            with contextlib.suppress(nats.js.errors.NotFoundError):
                await jetstream.purge_stream(name)
            with contextlib.suppress(nats.js.errors.NotFoundError):
                await jetstream.delete_stream(name)
    return []


NATS_ATTACKS: tuple[Attack, ...] = (
    garbage_tickets, odd_subjects, replayed_tickets, tickets_with_numbers_out_of_range,
    tickets_of_strangers, large_tickets, garbage_events, forged_events, deleted_queue,
)  # fmt: skip

import asyncio
import os
import time
from collections.abc import AsyncIterator

import msgspec
import nats.js.errors
import pytest

from tandem.queue import pull
from tandem.queue.config import QueueConfig
from tandem.queue.jetstream import JetStreamQueue
from tandem.queue.memory import MemoryQueue
from tandem.queue.prefill_queue import PrefillQueue, QueueDepth
from tandem.queue.streams import QueueNames, escape
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ServiceError
from tandem.runtime.messages import PrefillJob, encode
from tandem.runtime.nats import NatsConnection
from tests.services import MonitoredNatsServer, NatsServer, eventually

CONFIG = QueueConfig(ack_wait_s=0.4, max_deliver=2)
DEPLOYMENT = "0123456789abcdef"


def job(num_uncached_tokens: int = 100, attempt: int = 1, handoff_id: bytes = b"") -> PrefillJob:
    return PrefillJob(
        handoff_id=handoff_id or os.urandom(16),
        attempt=attempt,
        deployment="epoch",
        decode_instance="d",
        decode_epoch="e1",
        num_tokens=num_uncached_tokens + 16,
        num_uncached_tokens=num_uncached_tokens,
        deadline_ms=30_000,
    )


@pytest.fixture
async def connection(nats: NatsServer) -> AsyncIterator[NatsConnection]:
    connection = NatsConnection(RuntimeConfig(nats_url=nats.url))
    await connection.start()
    yield connection
    await connection.close()


@pytest.fixture(params=["memory", "jetstream"])
async def queue(
    request: pytest.FixtureRequest, connection: NatsConnection
) -> AsyncIterator[PrefillQueue]:
    queue: PrefillQueue = MemoryQueue(CONFIG)
    if request.param == "jetstream":
        queue = JetStreamQueue(
            connection, CONFIG, "test", f"org/model {os.urandom(4).hex()}", DEPLOYMENT
        )
    await queue.start()
    yield queue
    await queue.close()


async def test_a_waiting_worker_gets_a_job_as_it_was_published(queue: PrefillQueue) -> None:
    receiving = asyncio.create_task(queue.receive(4, 10))
    await asyncio.sleep(0.05)
    sent = job()
    await queue.publish(sent)
    [delivery] = await receiving
    assert delivery.job == sent
    await delivery.ack()
    assert len(encode(sent)) < 1024


async def test_jobs_come_in_order_and_no_more_than_asked_for(queue: PrefillQueue) -> None:
    sent = [job() for _ in range(5)]
    for each in sent:
        await queue.publish(each)
    first = await queue.receive(3, 2)
    rest = await queue.receive(10, 2)
    assert [d.job for d in first + rest] == sent
    assert [len(first), len(rest)] == [3, 2]
    for delivery in first + rest:
        await delivery.ack()
    assert await queue.receive(1, 0.05) == []


async def test_the_same_attempt_is_queued_once_and_another_attempt_again(
    queue: PrefillQueue,
) -> None:
    handoff_id = os.urandom(16)
    for attempt in (1, 1, 2, 1):
        await queue.publish(job(attempt=attempt, handoff_id=handoff_id))
    deliveries = await queue.receive(10, 2)
    assert [d.job.attempt for d in deliveries] == [1, 2]


async def test_an_unanswered_job_comes_again_and_then_becomes_a_dead_letter(
    queue: PrefillQueue,
) -> None:
    await queue.publish(sent := job())
    assert [delivery.job for delivery in await queue.receive(1, 2)] == [sent]
    assert [delivery.job for delivery in await queue.receive(1, 2)] == [sent]
    await queue.publish(good := job())
    [delivery] = await queue.receive(1, 2)
    assert delivery.job == good
    await delivery.ack()
    assert await queue.receive(1, 1) == []
    assert (await queue.depth()) == QueueDepth(0, 0, 0, 1)


async def test_work_in_progress_is_not_given_to_anyone_else(queue: PrefillQueue) -> None:
    await queue.publish(job())
    [delivery] = await queue.receive(1, 2)
    for _ in range(4):
        await delivery.in_progress()
        assert await queue.receive(1, 0.2) == []
    await delivery.ack()
    await delivery.nak()
    assert await queue.receive(1, 0.5) == []


async def test_a_refused_job_comes_again_after_its_delay(queue: PrefillQueue) -> None:
    await queue.publish(job())
    [delivery] = await queue.receive(1, 2)
    start = time.perf_counter()
    await delivery.nak(0.2)
    [delivery] = await queue.receive(1, 2)
    assert time.perf_counter() - start >= 0.19
    await delivery.ack()
    assert await queue.receive(1, 0.5) == []
    assert (await queue.depth()).num_dead == 0


async def depth_becomes(queue: PrefillQueue, expected: QueueDepth) -> None:
    """Wait, within a bound, for a depth: the server counts a moment after it confirms."""
    for _ in range(200):
        if (found := await queue.depth()) == expected:
            return
        await asyncio.sleep(0.01)
    assert found == expected


async def test_depth_counts_jobs_and_the_uncached_tokens_of_all_unfinished_ones(
    queue: PrefillQueue,
) -> None:
    assert await queue.depth() == QueueDepth(0, 0, 0, 0)
    for num_tokens in (100, 100, 2000, 7):
        await queue.publish(job(num_tokens))
    await depth_becomes(queue, QueueDepth(4, 2207, 0, 0))
    [delivery] = await queue.receive(1, 2)
    await depth_becomes(queue, QueueDepth(3, 2207, 1, 0))
    await delivery.ack()
    await depth_becomes(queue, QueueDepth(3, 2107, 0, 0))


async def test_a_job_that_came_for_a_cancelled_receive_is_not_lost(queue: PrefillQueue) -> None:
    receiving = asyncio.create_task(queue.receive(1, 10))
    await asyncio.sleep(0.05)
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    sent = job()
    await queue.publish(sent)
    [delivery] = await queue.receive(1, 2)
    assert delivery.job == sent


async def test_two_workers_share_the_jobs_and_a_closed_one_gives_its_job_back(
    connection: NatsConnection,
) -> None:
    model = os.urandom(4).hex()
    first, second = (
        JetStreamQueue(connection, CONFIG, "test", model, DEPLOYMENT) for _ in range(2)
    )
    await first.start()
    await second.start()
    pulls = [asyncio.create_task(q.receive(1, 5)) for q in (first, second)]
    await asyncio.sleep(0.05)
    await first.publish(job(1))
    await first.publish(job(2))
    got = [delivery.job.num_uncached_tokens for [delivery] in await asyncio.gather(*pulls)]
    assert sorted(got) == [1, 2]

    waiting = asyncio.create_task(second.receive(1, 5))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    sent = job(3)
    await first.publish(sent)
    await asyncio.sleep(0.05)
    await second.close()
    assert sent in [delivery.job for delivery in await first.receive(5, 2)]
    await first.close()


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_job_on_its_way_to_a_worker_that_stops_receiving_goes_to_another(
    nats: NatsServer, connection: NatsConnection, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """Also when the worker does not wait for the broker."""
    if is_late:
        monkeypatch.setattr(pull, "_LEAVE_TIMEOUT_S", 0.0)
    config = QueueConfig(ack_wait_s=60, max_deliver=5)
    model = os.urandom(4).hex()
    elsewhere = NatsConnection(RuntimeConfig(nats_url=nats.url))
    await elsewhere.start()
    leaving, other = (
        JetStreamQueue(each, config, "test", model, DEPLOYMENT) for each in (connection, elsewhere)
    )
    for queue in (leaving, other):
        await queue.start()
    for _ in range(20):
        waiting = asyncio.create_task(leaving.receive(1, 10))
        await eventually(lambda: bool(leaving._pulls._standing_until))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        sent = job()
        await asyncio.gather(other.publish(sent), leaving.stop_receiving())
        [delivery] = await other.receive(1, 5)
        assert delivery.job == sent
        await delivery.ack()
    await other.close()
    await elsewhere.close()


async def test_a_worker_that_stops_receiving_without_a_broker_gets_nothing_afterwards() -> None:
    with MonitoredNatsServer() as server:
        connection = NatsConnection(RuntimeConfig(nats_url=server.url))
        await connection.start()
        queue = JetStreamQueue(connection, CONFIG, "test", "stopped", DEPLOYMENT)
        await queue.start()
        assert await queue.receive(1, 0.05) == []
        inbox = f"{queue._pulls._inbox}.*"
        assert server.num_subscriptions(inbox) == 1
        server.kill()
        await eventually(lambda: not queue.connected)
        await queue.stop_receiving()
        server.restart()
        await eventually(lambda: queue.connected)
        assert server.num_subscriptions(inbox) == 0
        await queue.close()
        await connection.close()


async def test_a_frozen_broker_neither_holds_a_worker_that_stops_receiving_nor_loses_it() -> None:
    with NatsServer() as server:
        connection = NatsConnection(RuntimeConfig(nats_url=server.url))
        await connection.start()
        queue = JetStreamQueue(connection, CONFIG, "test", "frozen", DEPLOYMENT)
        await queue.start()
        assert await queue.receive(1, 0.05) == []
        server.freeze()
        await queue.stop_receiving()
        server.thaw()
        sent = job()
        await queue.publish(sent)
        [delivery] = await queue.receive(1, 5)
        assert delivery.job == sent
        assert connection.client.stats["reconnects"] == 0
        await queue.close()
        await connection.close()


@pytest.mark.parametrize(
    "odd",
    [
        {"num_uncached_tokens": -5},
        {"num_uncached_tokens": 10**9},
        {"num_tokens": 10**9},
        {"deadline_ms": 10**12},
        {"deadline_ms": -1},
        {"attempt": -1},
        {"handoff_id": bytes(17)},
    ],
)
async def test_a_ticket_with_absurd_numbers_becomes_a_dead_letter_at_once(
    queue: PrefillQueue, odd: dict[str, int | bytes]
) -> None:
    await queue.publish(msgspec.structs.replace(job(), **odd))
    await queue.publish(good := job(7))
    [delivery] = await queue.receive(5, 2)
    assert delivery.job == good
    await delivery.ack()
    await asyncio.sleep(0.05)
    assert await queue.depth() == QueueDepth(0, 0, 0, 1)


@pytest.mark.parametrize("kind", ["memory", "jetstream"])
async def test_a_full_queue_refuses_a_job_and_keeps_the_others(
    kind: str, connection: NatsConnection
) -> None:
    config = QueueConfig(max_jobs=2)
    queue: PrefillQueue = MemoryQueue(config)
    if kind == "jetstream":
        queue = JetStreamQueue(connection, config, "test", os.urandom(4).hex(), DEPLOYMENT)
    await queue.start()
    sent = [job(), job()]
    for each in sent:
        await queue.publish(each)
    with pytest.raises(ServiceError, match=r"full|maximum messages exceeded"):
        await queue.publish(job())
    assert [delivery.job for delivery in await queue.receive(5, 1)] == sent
    await queue.close()


async def test_a_queue_at_the_broker_is_bounded_in_bytes(connection: NatsConnection) -> None:
    model = os.urandom(4).hex()
    queue = JetStreamQueue(connection, CONFIG, "test", model, DEPLOYMENT)
    await queue.start()
    jetstream = connection.client.jetstream()
    with pytest.raises(nats.js.errors.APIError, match="message size exceeds"):
        await jetstream.publish(
            f"{QueueNames.of('test', model, DEPLOYMENT).subject}.5", bytes(1024 * 1024)
        )
    for stream in (
        QueueNames.of("test", model, DEPLOYMENT).stream,
        QueueNames.of("test", model, DEPLOYMENT).dead_stream,
    ):
        info = await jetstream.stream_info(stream)
        assert info.config.max_bytes == CONFIG.max_queue_bytes
    await queue.close()


DEEP = b"\x82\xa4type\xaaPrefillJob\xa1x" + b"\x91" * 3000 + b"\x01"


@pytest.mark.parametrize("data", [b"\xc1 garbage", DEEP], ids=["garbage", "nested"])
async def test_bytes_that_are_no_job_become_a_dead_letter(
    connection: NatsConnection, data: bytes
) -> None:
    queue = JetStreamQueue(connection, CONFIG, "test", "poisoned", DEPLOYMENT)
    await queue.start()
    names = QueueNames.of("test", "poisoned", DEPLOYMENT)
    await connection.client.jetstream().publish(f"{names.subject}.5", data)
    await queue.publish(good := job())
    deliveries = await queue.receive(5, 2)
    assert [delivery.job for delivery in deliveries] == [good]
    assert (await queue.depth()).num_dead == 1
    await connection.client.jetstream().delete_stream(names.dead_stream)
    await queue.close()


@pytest.mark.parametrize(
    ("end", "headers"),
    [(b"\xff\xfe", b"NATS/1.0\r\n\r\n"), (b"5", b"NATS/1.0\r\nStatus: 408\r\n\r\n")],
    ids=["subject", "status"],
)
async def test_a_malformed_message_does_not_hold_up_the_jobs_behind_it(
    connection: NatsConnection, nats: NatsServer, end: bytes, headers: bytes
) -> None:
    model = f"malformed {os.urandom(4).hex()}"
    queue = JetStreamQueue(connection, CONFIG, "test", model, DEPLOYMENT)
    await queue.start()
    receiving = asyncio.create_task(queue.receive(1, 20))
    reader, writer = await asyncio.open_connection("127.0.0.1", nats.port)
    await reader.readline()  # INFO; the server may lose data that come before it
    subject = QueueNames.of("test", model, DEPLOYMENT).subject.encode() + b"." + end
    sizes = b"%d %d" % (len(headers), len(headers) + 1)
    writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n')
    writer.write(b"HPUB %b %b\r\n%bx\r\n" % (subject, sizes, headers))
    while not (await queue.depth()).num_dead:
        await asyncio.sleep(0.01)
    await queue.publish(good := job())
    [delivery] = await receiving
    assert delivery.job == good
    writer.close()
    await queue.close()


async def test_subjects_that_are_no_number_of_tokens_count_none(
    connection: NatsConnection,
) -> None:
    queue = JetStreamQueue(connection, CONFIG, "test", "odd subjects", DEPLOYMENT)
    await queue.start()
    await queue.publish(job(100))
    subject = QueueNames.of("test", "odd subjects", DEPLOYMENT).subject
    for end in ("abc", "-5", "1_0", "9" * 3000):
        await connection.client.jetstream().publish(f"{subject}.{end}", b"")
    assert (await queue.depth()).num_tokens == 100
    await queue.close()


async def test_a_broker_that_is_away_fails_a_publish_at_once_and_comes_back_empty_usable() -> None:
    with NatsServer() as server:
        connection = NatsConnection(RuntimeConfig(nats_url=server.url))
        await connection.start()
        queue = JetStreamQueue(connection, CONFIG, "test", "restarted", DEPLOYMENT)
        await queue.start()
        receiving = asyncio.create_task(queue.receive(1, 30))
        await asyncio.sleep(0.05)
        server.kill()
        while queue.connected:
            await asyncio.sleep(0.01)
        start = time.perf_counter()
        with pytest.raises(ServiceError, match="NATS is not connected"):
            await queue.publish(job())
        with pytest.raises(ServiceError, match="NATS is not connected"):
            await queue.depth()
        assert time.perf_counter() - start < 0.5
        server.restart(empty=True)
        while not queue.connected:
            await asyncio.sleep(0.01)
        sent = job()
        await queue.publish(sent)
        [delivery] = await receiving
        assert delivery.job == sent
        await queue.close()
        await connection.close()


async def test_a_stream_that_vanished_is_made_again_by_whoever_needs_it(
    connection: NatsConnection,
) -> None:
    queue = JetStreamQueue(connection, CONFIG, "test", "vanishing", DEPLOYMENT)
    await queue.start()
    jetstream = connection.client.jetstream()
    for use in ("publish", "receive", "depth"):
        await jetstream.delete_stream(QueueNames.of("test", "vanishing", DEPLOYMENT).stream)
        if use == "receive":
            assert await queue.receive(1, 0.2) == []
        if use == "depth":
            assert (await queue.depth()).num_jobs == 0
        await queue.publish(job())
        [delivery] = await queue.receive(1, 2)
        await delivery.ack()
    await queue.close()


async def test_deployments_of_a_model_get_their_own_jobs(connection: NatsConnection) -> None:
    model = os.urandom(4).hex()
    queues = [JetStreamQueue(connection, CONFIG, "test", model, f"layout.{n}") for n in range(3)]
    for queue in queues:
        await queue.start()
    sent = [job(100 * (n + 1)) for n in range(3)]
    for queue, its_job in zip(queues, sent, strict=True):
        await queue.publish(its_job)
    for queue, its_job in zip(reversed(queues), reversed(sent), strict=True):
        depth = await queue.depth()
        assert (depth.num_jobs, depth.num_tokens) == (1, its_job.num_uncached_tokens)
        [delivery] = await queue.receive(5, 2)
        assert delivery.job == its_job
        await delivery.ack()
        assert await queue.receive(5, 0.05) == []
        await queue.close()


async def test_a_changed_setting_is_applied_to_an_existing_queue(
    connection: NatsConnection,
) -> None:
    for config in (QueueConfig(max_age_s=60), QueueConfig(max_age_s=90, ack_wait_s=7)):
        queue = JetStreamQueue(connection, config, "test", "reconfigured", DEPLOYMENT)
        await queue.start()
        await queue.close()
    info = await connection.client.jetstream().stream_info(
        QueueNames.of("test", "reconfigured", DEPLOYMENT).stream
    )
    assert info.config.max_age == 90


def test_names_that_differ_stay_different_when_escaped() -> None:
    names = ["a/b", "a.b", "a_b", "a b", "a*b", "a=2Fb", "ä", "ab"]
    assert len({escape(name) for name in names}) == len(names)
    assert escape("Qwen3-8B") == "Qwen3-8B"
    assert QueueNames.of("a_b", "c", "d").stream != QueueNames.of("a", "b_c", "d").stream

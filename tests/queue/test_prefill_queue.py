import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import msgspec
import nats.js.errors
import pytest

from tandem.queue import jetstream, pull
from tandem.queue.config import QueueConfig
from tandem.queue.jetstream import JetStreamQueue
from tandem.queue.prefill_queue import PrefillQueue, QueueDepth
from tandem.queue.streams import QueueNames, escape
from tandem.runtime.bus.nats import NatsConnection
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ServiceError
from tandem.runtime.process.lifecycle import started
from tandem.runtime.wire.handoff_messages import PrefillJob
from tandem.runtime.wire.messages import encode
from tests.services import MonitoredNatsServer, NatsServer, eventually

CONFIG = QueueConfig(ack_wait_s=60, request_timeout_s=0.99)
SHORT_ACK_WAIT = CONFIG.model_copy(update={"ack_wait_s": 0.4, "max_deliver": 2})
DEPLOYMENT = "0123456789abcdef"
SOON_S = 30.0  # for a job that is there


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


def names_of(model: str) -> QueueNames:
    return QueueNames.of("test", model, DEPLOYMENT)


def connected(server: NatsServer) -> AbstractAsyncContextManager[NatsConnection]:
    return started(NatsConnection(RuntimeConfig(nats_url=server.url)))


def at_broker(
    connection: NatsConnection,
    model: str = "",
    config: QueueConfig = CONFIG,
    deployment: str = DEPLOYMENT,
) -> AbstractAsyncContextManager[JetStreamQueue]:
    """A queue of a model; of one of its own where no name is given."""
    model = model or f"org/model {os.urandom(4).hex()}"
    return started(JetStreamQueue(connection, config, "test", model, deployment))


@pytest.fixture
async def connection(nats: NatsServer) -> AsyncIterator[NatsConnection]:
    async with connected(nats) as connection:
        yield connection


@pytest.fixture
async def queue(connection: NatsConnection) -> AsyncIterator[PrefillQueue]:
    async with at_broker(connection) as queue:
        yield queue


async def depth_becomes(queue: PrefillQueue, **expected: int) -> None:
    """Wait for these numbers of the depth: the server counts a moment after it confirms."""

    async def is_right() -> bool:
        depth = await queue.depth()
        return expected == {name: getattr(depth, name) for name in expected}

    await eventually(is_right)


async def stop(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_waiting_worker_gets_a_job_as_it_was_published(queue: PrefillQueue) -> None:
    receiving = asyncio.create_task(queue.receive(4, SOON_S))
    await asyncio.sleep(0.05)
    await queue.publish(sent := job())
    [delivery] = await receiving
    assert delivery.job == sent
    await delivery.ack()
    assert len(encode(sent)) < 1024


async def test_jobs_come_in_order_and_no_more_than_asked_for(queue: PrefillQueue) -> None:
    sent = [job() for _ in range(5)]
    for each in sent:
        await queue.publish(each)
    first = await queue.receive(3, SOON_S)
    rest = await queue.receive(10, SOON_S)
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
    deliveries = await queue.receive(10, SOON_S)
    assert [d.job.attempt for d in deliveries] == [1, 2]


async def test_an_unanswered_job_comes_again_and_then_becomes_a_dead_letter(
    connection: NatsConnection,
) -> None:
    async with at_broker(connection, config=SHORT_ACK_WAIT) as queue:
        await queue.publish(sent := job())
        for _ in range(2):
            assert [delivery.job for delivery in await queue.receive(1, SOON_S)] == [sent]
        await queue.publish(good := job())
        [delivery] = await queue.receive(1, SOON_S)
        assert delivery.job == good
        await delivery.ack()

        async def is_dead() -> bool:
            assert await queue.receive(1, 0.2) == []
            return await queue.depth() == QueueDepth(0, 0, 0, 1)

        await eventually(is_dead)


async def test_work_in_progress_is_not_given_to_anyone_else(
    connection: NatsConnection,
) -> None:
    config = CONFIG.model_copy(update={"ack_wait_s": 1.0})
    async with at_broker(connection, config=config) as queue:
        await queue.publish(job())
        [delivery] = await queue.receive(1, SOON_S)
        for _ in range(12):
            await delivery.in_progress()
            assert await queue.receive(1, 0.1) == []
        await delivery.ack()
        await delivery.give_back()
        assert await queue.receive(1, 0.2) == []


async def test_a_job_may_be_given_back_more_often_than_it_may_be_lost(
    connection: NatsConnection,
) -> None:
    config = CONFIG.model_copy(update={"max_deliver": 2})
    async with at_broker(connection, config=config) as queue:
        await queue.publish(sent := job())
        for number in range(40):
            [delivery] = await queue.receive(1, SOON_S)
            assert delivery.job == msgspec.structs.replace(sent, num_returns=number)
            assert delivery.num_deliveries == 1
            await delivery.give_back()
            await delivery.give_back()
        [delivery] = await queue.receive(1, SOON_S)
        await delivery.ack()
        await depth_becomes(queue, num_jobs=0, num_tokens=0, num_in_progress=0, num_dead=0)


async def test_a_job_waits_longer_with_each_return(queue: PrefillQueue) -> None:
    await queue.publish(job())
    start = time.perf_counter()
    for _ in range(5):
        [delivery] = await queue.receive(1, SOON_S)
        await delivery.give_back(0.01)
    [delivery] = await queue.receive(1, SOON_S)
    assert time.perf_counter() - start > 0.009 * (1 + 2 + 4 + 8 + 16)
    await delivery.ack()


async def test_deliveries_without_an_answer_count_across_returns(
    connection: NatsConnection,
) -> None:
    """The first delivery is lost, the second given back, the third lost: two may be."""
    async with at_broker(connection, config=SHORT_ACK_WAIT) as queue:
        await queue.publish(job())
        await queue.receive(1, SOON_S)
        [delivery] = await queue.receive(1, SOON_S)
        assert delivery.num_deliveries == 2
        await delivery.give_back()
        [delivery] = await queue.receive(1, SOON_S)
        assert (delivery.job.num_lost, delivery.num_deliveries) == (1, 2)

        async def is_dead() -> bool:
            assert await queue.receive(1, 0.2) == []
            return await queue.depth() == QueueDepth(0, 0, 0, 1)

        await eventually(is_dead)


async def test_a_worker_that_stops_receiving_offers_at_once_what_it_gave_back(
    nats: NatsServer, connection: NatsConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream, "_LONGEST_RETURN_S", 30.0)
    model = os.urandom(4).hex()
    async with (
        connected(nats) as elsewhere,
        at_broker(elsewhere, model) as other,
        at_broker(connection, model) as leaving,
    ):
        await leaving.publish(sent := job())
        [delivery] = await leaving.receive(1, SOON_S)
        await delivery.give_back(30.0)
        await leaving.stop_receiving()
        [delivery] = await other.receive(1, SOON_S)
        assert delivery.job == msgspec.structs.replace(sent, num_returns=1)
        await delivery.ack()
        await depth_becomes(other, num_jobs=0, num_in_progress=0, num_dead=0)


async def test_a_job_that_a_full_queue_does_not_take_anew_comes_again(
    connection: NatsConnection,
) -> None:
    async with at_broker(connection, config=QueueConfig(max_jobs=1)) as queue:
        await queue.publish(sent := job())
        [delivery] = await queue.receive(1, SOON_S)
        await delivery.give_back(0.01)
        [delivery] = await queue.receive(1, SOON_S)
        assert delivery.job == sent and delivery.num_deliveries == 2
        await delivery.ack()


async def test_depth_counts_jobs_and_the_uncached_tokens_of_all_unfinished_ones(
    queue: PrefillQueue,
) -> None:
    assert await queue.depth() == QueueDepth(0, 0, 0, 0)
    for num_tokens in (100, 100, 2000, 7):
        await queue.publish(job(num_tokens))
    await depth_becomes(queue, num_jobs=4, num_tokens=2207, num_in_progress=0, num_dead=0)
    [delivery] = await queue.receive(1, SOON_S)
    await depth_becomes(queue, num_jobs=3, num_tokens=2207, num_in_progress=1, num_dead=0)
    await delivery.ack()
    await depth_becomes(queue, num_jobs=3, num_tokens=2107, num_in_progress=0, num_dead=0)


async def test_a_job_that_came_for_a_cancelled_receive_is_not_lost(queue: PrefillQueue) -> None:
    receiving = asyncio.create_task(queue.receive(1, 10))
    await asyncio.sleep(0.05)
    await stop(receiving)
    await queue.publish(sent := job())
    [delivery] = await queue.receive(1, SOON_S)
    assert delivery.job == sent


async def test_two_workers_share_the_jobs_and_a_closed_one_gives_its_job_back(
    connection: NatsConnection,
) -> None:
    model = os.urandom(4).hex()
    async with at_broker(connection, model) as first:
        async with at_broker(connection, model) as second:
            pulls = [asyncio.create_task(q.receive(1, SOON_S)) for q in (first, second)]
            await eventually(lambda: all(q._pulls._standing_until for q in (first, second)))
            await first.publish(job(1))
            await first.publish(job(2))
            got = [delivery.job.num_uncached_tokens for [delivery] in await asyncio.gather(*pulls)]
            assert sorted(got) == [1, 2]

            waiting = asyncio.create_task(second.receive(1, 5))
            await eventually(lambda: bool(second._pulls._standing_until))
            await stop(waiting)
            await first.publish(sent := job(3))
            await eventually(lambda: bool(second._pulls._messages))
        assert sent in [delivery.job for delivery in await first.receive(5, SOON_S)]


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_job_on_its_way_to_a_worker_that_stops_receiving_goes_to_another(
    nats: NatsServer, connection: NatsConnection, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """Also when the worker does not wait for the broker.

    A broker that is about to send a job when the subscription ends keeps it until its ack is due.
    """
    if is_late:
        monkeypatch.setattr(pull, "_LEAVE_TIMEOUT_S", 0.0)
    model, config = os.urandom(4).hex(), CONFIG.model_copy(update={"ack_wait_s": 2.0})
    leaving = JetStreamQueue(connection, config, "test", model, DEPLOYMENT)
    await leaving.start()
    num_kept = 0
    async with connected(nats) as elsewhere, at_broker(elsewhere, model, config) as other:
        for _ in range(20):
            waiting = asyncio.create_task(leaving.receive(1, 10))
            await eventually(lambda: bool(leaving._pulls._standing_until))
            await stop(waiting)
            sent = job()
            await asyncio.gather(other.publish(sent), leaving.stop_receiving())
            deliveries = await other.receive(1, 1.5)
            num_kept += not deliveries
            [delivery] = deliveries or await other.receive(1, SOON_S)
            assert delivery.job == sent
            await delivery.ack()
    assert num_kept <= 2


async def test_a_worker_that_stops_receiving_without_a_broker_gets_nothing_afterwards() -> None:
    with MonitoredNatsServer() as server:
        async with connected(server) as connection, at_broker(connection) as queue:
            assert await queue.receive(1, 0.05) == []
            inbox = f"{queue._pulls._inbox}.*"
            assert server.num_subscriptions(inbox) == 1
            server.kill()
            await eventually(lambda: not queue.connected)
            await queue.stop_receiving()
            server.restart()
            await eventually(lambda: queue.connected)
            assert server.num_subscriptions(inbox) == 0


async def test_a_frozen_broker_neither_holds_a_worker_that_stops_receiving_nor_loses_it() -> None:
    with NatsServer() as server:
        async with connected(server) as connection, at_broker(connection) as queue:
            assert await queue.receive(1, 0.05) == []
            server.freeze()
            await queue.stop_receiving()
            server.thaw()
            await queue.publish(sent := job())
            [delivery] = await queue.receive(1, SOON_S)
            assert delivery.job == sent
            assert connection.client.stats["reconnects"] == 0


@pytest.mark.parametrize(
    "odd",
    [
        {"num_uncached_tokens": -5}, {"num_uncached_tokens": 10**9}, {"num_tokens": 10**9},
        {"deadline_ms": 10**12}, {"deadline_ms": -1}, {"attempt": -1}, {"handoff_id": bytes(17)},
    ],
)  # fmt: skip
async def test_a_ticket_with_absurd_numbers_becomes_a_dead_letter_at_once(
    queue: PrefillQueue, odd: dict[str, int | bytes]
) -> None:
    await queue.publish(msgspec.structs.replace(job(), **odd))
    await queue.publish(good := job(7))
    [delivery] = await queue.receive(5, SOON_S)
    assert delivery.job == good
    await delivery.ack()
    await depth_becomes(queue, num_jobs=0, num_tokens=0, num_in_progress=0, num_dead=1)


async def test_a_full_queue_refuses_a_job_and_keeps_the_others(
    connection: NatsConnection,
) -> None:
    async with at_broker(connection, config=QueueConfig(max_jobs=2)) as queue:
        sent = [job(), job()]
        for each in sent:
            await queue.publish(each)
        with pytest.raises(ServiceError, match="maximum messages exceeded"):
            await queue.publish(job())
        assert [delivery.job for delivery in await queue.receive(5, SOON_S)] == sent


async def test_a_queue_at_the_broker_is_bounded_in_bytes(connection: NatsConnection) -> None:
    names, jetstream = names_of("bounded"), connection.client.jetstream()
    async with at_broker(connection, "bounded"):
        with pytest.raises(nats.js.errors.APIError, match="message size exceeds"):
            await jetstream.publish(f"{names.subject}.5", bytes(1024 * 1024))
        for stream in (names.stream, names.dead_stream):
            info = await jetstream.stream_info(stream)
            assert info.config.max_bytes == CONFIG.max_queue_bytes


DEEP = b"\x82\xa4type\xaaPrefillJob\xa1x" + b"\x91" * 3000 + b"\x01"


@pytest.mark.parametrize("data", [b"\xc1 garbage", DEEP], ids=["garbage", "nested"])
async def test_bytes_that_are_no_job_become_a_dead_letter(
    connection: NatsConnection, data: bytes
) -> None:
    model = f"poisoned {os.urandom(4).hex()}"
    async with at_broker(connection, model) as queue:
        await connection.client.jetstream().publish(f"{names_of(model).subject}.5", data)
        await queue.publish(good := job())
        deliveries = await queue.receive(5, SOON_S)
        assert [delivery.job for delivery in deliveries] == [good]
        await depth_becomes(queue, num_dead=1)


@pytest.mark.parametrize(
    ("end", "headers"),
    [(b"\xff\xfe", b"NATS/1.0\r\n\r\n"), (b"5", b"NATS/1.0\r\nStatus: 408\r\n\r\n")],
    ids=["subject", "status"],
)
async def test_a_malformed_message_does_not_hold_up_the_jobs_behind_it(
    connection: NatsConnection, nats: NatsServer, end: bytes, headers: bytes
) -> None:
    model = f"malformed {os.urandom(4).hex()}"
    async with at_broker(connection, model) as queue:
        receiving = asyncio.create_task(queue.receive(1, SOON_S))
        reader, writer = await asyncio.open_connection("127.0.0.1", nats.port)
        await reader.readline()  # INFO; the server may lose data that come before it
        subject = names_of(model).subject.encode() + b"." + end
        sizes = b"%d %d" % (len(headers), len(headers) + 1)
        writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n')
        writer.write(b"HPUB %b %b\r\n%bx\r\n" % (subject, sizes, headers))
        await depth_becomes(queue, num_dead=1)
        await queue.publish(good := job())
        [delivery] = await receiving
        assert delivery.job == good
        writer.close()


async def test_subjects_that_are_no_number_of_tokens_count_none(connection: NatsConnection) -> None:
    async with at_broker(connection, "odd subjects") as queue:
        await queue.publish(job(100))
        for end in ("abc", "-5", "1_0", "9" * 3000):
            subject = f"{names_of('odd subjects').subject}.{end}"
            await connection.client.jetstream().publish(subject, b"")
        await depth_becomes(queue, num_jobs=5, num_tokens=100)


async def test_a_broker_that_is_away_fails_a_publish_at_once_and_comes_back_empty_usable() -> None:
    with NatsServer() as server:
        async with connected(server) as connection, at_broker(connection) as queue:
            receiving = asyncio.create_task(queue.receive(1, 2 * SOON_S))
            await eventually(lambda: bool(queue._pulls._standing_until))
            server.kill()
            await eventually(lambda: not queue.connected)
            with pytest.raises(ServiceError, match="NATS is not connected"):
                await queue.publish(job())
            with pytest.raises(ServiceError, match="NATS is not connected"):
                await queue.depth()
            server.restart(empty=True)
            await eventually(lambda: queue.connected)
            sent = job()

            async def is_published() -> bool:
                """Not while the receiver makes the stream: nobody waits for that."""
                try:
                    await queue.publish(sent)
                except ServiceError:
                    return False
                return True

            await eventually(is_published)
            [delivery] = await receiving
            assert delivery.job == sent


async def test_a_stream_that_vanished_is_made_again_by_whoever_needs_it(
    connection: NatsConnection,
) -> None:
    async with at_broker(connection, "vanishing") as queue:
        for use in ("publish", "receive", "depth"):
            await connection.client.jetstream().delete_stream(names_of("vanishing").stream)
            if use == "receive":
                assert await queue.receive(1, 0.2) == []
            if use == "depth":
                assert (await queue.depth()).num_jobs == 0
            await queue.publish(job())
            [delivery] = await queue.receive(1, SOON_S)
            await delivery.ack()


async def test_deployments_of_a_model_get_their_own_jobs(connection: NatsConnection) -> None:
    model = os.urandom(4).hex()
    async with (
        at_broker(connection, model, deployment="layout.0") as one,
        at_broker(connection, model, deployment="layout.1") as other,
    ):
        for queue, num_tokens in ((one, 100), (other, 200)):
            await queue.publish(job(num_tokens))
        for queue, num_tokens in ((other, 200), (one, 100)):
            await depth_becomes(queue, num_jobs=1, num_tokens=num_tokens)
            [delivery] = await queue.receive(5, SOON_S)
            assert delivery.job.num_uncached_tokens == num_tokens
            await delivery.ack()
            assert await queue.receive(5, 0.05) == []


async def test_a_changed_setting_is_applied_to_an_existing_queue(
    connection: NatsConnection,
) -> None:
    for config in (QueueConfig(max_age_s=60), QueueConfig(max_age_s=90, ack_wait_s=7)):
        async with at_broker(connection, "reconfigured", config):
            pass
    stream = names_of("reconfigured").stream
    info = await connection.client.jetstream().stream_info(stream)
    assert info.config.max_age == 90


def test_names_that_differ_stay_different_when_escaped() -> None:
    names = ["a/b", "a.b", "a_b", "a b", "a*b", "a=2Fb", "ä", "ab"]
    assert len({escape(name) for name in names}) == len(names)
    assert escape("Qwen3-8B") == "Qwen3-8B"
    assert QueueNames.of("a_b", "c", "d").stream != QueueNames.of("a", "b_c", "d").stream


async def test_an_autoscaler_reads_the_tickets_that_wait_or_are_in_progress() -> None:
    names = QueueNames.of("test", "org/Model_1.5", DEPLOYMENT)

    def lag(consumer: str) -> int:
        """KEDA's arithmetic on NATS' monitoring port; it names account, stream and consumer."""
        [account] = server.monitor("/jsz?acc=$G&consumers=true&config=true")["account_details"]
        assert account["name"] == "$G"
        [stream] = [s for s in account["stream_detail"] if s["name"] == names.stream]
        [found] = [c for c in stream["consumer_detail"] if c["name"] == consumer]
        return int(found["num_pending"]) + int(found["num_ack_pending"])

    with MonitoredNatsServer() as server:
        async with (
            connected(server) as connection,
            at_broker(connection, "org/Model_1.5") as queue,
        ):
            assert lag(names.consumer) == 0
            for _ in range(3):
                await queue.publish(job())
            await eventually(lambda: lag(names.consumer) == 3)  # the broker counts a moment later
            [delivery] = await queue.receive(1, SOON_S)
            await eventually(lambda: lag(names.consumer) == 3)
            await delivery.ack()
            await eventually(lambda: lag(names.consumer) == 2)

"""The prefill queue on NATS JetStream.

One work-queue stream per namespace and model, and a consumer per deployment, so that a worker takes
tickets that it can serve. The last token of a job's subject is its number of uncached tokens, so
that the broker's own count per subject gives the queue's depth in tokens, exactly and in one
request.
"""

import asyncio
import logging
import re
import time

import nats.errors
import nats.js.errors
from msgspec.structs import replace
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from tandem.queue.config import QueueConfig
from tandem.queue.limits import flaw
from tandem.queue.prefill_queue import Delivery, QueueDepth
from tandem.queue.pull import PullConsumer, best_effort
from tandem.queue.streams import QueueNames, create_streams
from tandem.runtime.bus.nats import NatsConnection
from tandem.runtime.clock import wall_seconds
from tandem.runtime.errors import ProtocolError, ServiceError
from tandem.runtime.tasks import ends_within
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.handoff_messages import PrefillJob
from tandem.runtime.wire.messages import encode

_CREATE_TIMEOUT_S = 10.0  # of each stream: the broker writes it to a disk that may be busy
_DEDUP_HEADER = "Nats-Msg-Id"
_REASON_HEADER = "Tandem-Reason"
_MAX_HEADER_CHARS = 200
_RETRY_S = 0.05  # after a pull that ended early
_LONGEST_RETURN_S = 0.25  # of a job that is given back
_MAX_DOUBLINGS = 16
_NUMBER = re.compile(r"[0-9]{1,9}")  # of tokens, in a subject

_decode_job = decoder(PrefillJob)
_NATS_ERRORS = (nats.errors.Error, TimeoutError, OSError)

logger = logging.getLogger(__name__)


class JetStreamDelivery:
    """A job pulled from a JetStreamQueue."""

    def __init__(self, queue: "JetStreamQueue", message: Msg, job: PrefillJob) -> None:
        self._queue = queue
        self._message = message
        self._job = job
        self._answered = False

    @property
    def job(self) -> PrefillJob:
        return self._job

    @property
    def num_deliveries(self) -> int:
        return self._job.num_lost + self._message.metadata.num_delivered

    async def ack(self) -> None:
        if self._answer():
            await best_effort(self._message.ack())

    async def give_back(self, delay_s: float = 0.0) -> None:
        if self._answer():
            self._queue.give_back(self._message, self._job, delay_s)

    async def in_progress(self) -> None:
        if not self._answered:
            await best_effort(self._message.in_progress())

    def _answer(self) -> bool:
        first, self._answered = not self._answered, True
        return first


class JetStreamQueue:
    """A PrefillQueue in a NATS server, of the workers of one deployment of a model.

    The connection is the caller's to start and close.
    """

    def __init__(
        self,
        connection: NatsConnection,
        config: QueueConfig,
        namespace: str,
        model: str,
        deployment: str,
    ) -> None:
        self._connection = connection
        self._config = config
        self._names = QueueNames.of(namespace, model, deployment)
        self._pulls = PullConsumer(connection, self._names.stream, self._names.consumer)
        self._creating = asyncio.Lock()
        self._returning: set[asyncio.Task[None]] = set()
        self._hurry = asyncio.Event()  # the jobs that are given back wait no longer
        self._closed = False

    @property
    def connected(self) -> bool:
        return self._connection.connected

    async def start(self) -> None:
        self._require_connection()
        await self._create()
        self._connection.on_reconnect(self._on_reconnect)

    async def publish(self, job: PrefillJob) -> None:
        self._require_connection()
        offer = f"{job.handoff_id.hex()}-{job.attempt}"
        headers = {_DEDUP_HEADER: f"{offer}-{job.num_returns}" if job.num_returns else offer}
        subject = f"{self._names.subject}.{job.num_uncached_tokens}"
        try:
            await self._publish(subject, encode(job), headers)
        except _NATS_ERRORS as exc:
            raise self._error("publish", exc) from exc

    async def receive(self, max_jobs: int, timeout_s: float) -> list[Delivery]:
        deadline = time.perf_counter() + timeout_s
        while True:
            messages = await self._pull(max_jobs, deadline)
            admitted = [await self._admit(message) for message in messages]
            jobs: list[Delivery] = [delivery for delivery in admitted if delivery is not None]
            remaining_s = deadline - time.perf_counter()
            if jobs or remaining_s <= 0:
                return jobs
            if not messages:
                await self._pulls.wait(min(remaining_s, _RETRY_S))

    async def depth(self) -> QueueDepth:
        self._require_connection()
        jetstream = self._jetstream
        try:
            consumer, jobs, dead = await asyncio.gather(
                jetstream.consumer_info(self._names.stream, self._names.consumer),
                jetstream.stream_info(
                    self._names.stream, subjects_filter=f"{self._names.subject}.*"
                ),
                jetstream.stream_info(self._names.dead_stream),
            )
        except nats.js.errors.NotFoundError:
            await self._create()
            return QueueDepth(num_jobs=0, num_tokens=0, num_in_progress=0, num_dead=0)
        except _NATS_ERRORS as exc:
            raise self._error("depth", exc) from exc
        subjects = jobs.state.subjects or {}
        return QueueDepth(
            num_jobs=consumer.num_pending or 0,
            num_tokens=sum(_num_tokens(s) * count for s, count in subjects.items()),
            num_in_progress=consumer.num_ack_pending or 0,
            num_dead=dead.state.last_seq,
        )

    async def close(self) -> None:
        self._closed = True
        await self.stop_receiving()

    async def stop_receiving(self) -> None:
        await self._pulls.close()
        self._hurry.set()
        await asyncio.gather(*self._returning)
        self._hurry.clear()

    def give_back(self, message: Msg, job: PrefillJob, delay_s: float) -> None:
        """Offer a delivered job anew after the delay."""
        task = asyncio.create_task(self._offer_again(message, job, delay_s))
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    async def _offer_again(self, message: Msg, job: PrefillJob, delay_s: float) -> None:
        """Publish a job anew in place of its message.

        A message that is refused would come again, but the broker counts its deliveries, and does
        not tell those that a worker gave back from those that ended the worker.
        """
        delay_s = min(delay_s * 2 ** min(job.num_returns, _MAX_DOUBLINGS), _LONGEST_RETURN_S)
        offer_at = time.perf_counter() + delay_s
        while not self._hurry.is_set() and (left_s := offer_at - time.perf_counter()) > 0:
            await ends_within(self._hurry.wait(), min(left_s, self._config.ack_wait_s / 3))
            await best_effort(message.in_progress())
        num_lost = job.num_lost + message.metadata.num_delivered - 1
        try:
            await self.publish(replace(job, num_returns=job.num_returns + 1, num_lost=num_lost))
        except ServiceError as exc:
            logger.debug("%s", exc)
            await best_effort(message.nak(delay=wall_seconds(delay_s) or None))
        else:
            await best_effort(message.ack())

    async def _dead_letter(self, message: Msg, reason: str) -> None:
        """Move a delivered message to the dead letters; when that fails it is delivered again."""
        identity = _header_value((message.headers or {}).get(_DEDUP_HEADER, ""))
        headers = {_REASON_HEADER: _header_value(reason), _DEDUP_HEADER: f"dead-{identity}"}
        try:
            await self._publish(self._names.dead_subject, message.data, headers)
        except (*_NATS_ERRORS, ServiceError) as exc:
            logger.warning(
                "%s: job %s was not dead-lettered: %s", self._names.stream, identity, exc
            )
            return
        logger.warning("%s: job %s is a dead letter: %s", self._names.stream, identity, reason)
        await best_effort(message.term())

    @property
    def _jetstream(self) -> JetStreamContext:
        return self._connection.client.jetstream(timeout=self._config.request_timeout_s)

    async def _publish(self, subject: str, payload: bytes, headers: dict[str, str]) -> None:
        try:
            await self._jetstream.publish(subject, payload, headers=headers)
        except nats.js.errors.NoStreamResponseError:
            if self._creating.locked():  # others wait for it
                raise
            async with asyncio.timeout(self._config.request_timeout_s):
                await self._create()
            await self._jetstream.publish(subject, payload, headers=headers)

    async def _pull(self, max_jobs: int, deadline: float) -> list[Msg]:
        try:
            return await self._pulls.pull(max_jobs, deadline)
        except nats.errors.NoRespondersError:
            await self._on_reconnect()
        except _NATS_ERRORS as exc:
            logger.debug("%s, receive: %s", self._names.stream, exc)
        return []

    async def _admit(self, message: Msg) -> JetStreamDelivery | None:
        """Return a message's job; dead-letter a flawed one, and one delivered too often."""
        try:
            job = _decode_job(message.data)
        except ProtocolError as exc:
            await self._dead_letter(message, exc.message)
            return None
        if (reason := flaw(job, self._config)) is not None:
            await self._dead_letter(message, reason)
            return None
        delivery = JetStreamDelivery(self, message, job)
        if delivery.num_deliveries > self._config.max_deliver:
            reason = f"given up after {self._config.max_deliver} deliveries without an answer"
            await self._dead_letter(message, reason)
            return None
        return delivery

    async def _on_reconnect(self) -> None:
        """Create the streams and pull again: the broker forgot the pull and may be empty."""
        if self._closed:
            return
        try:
            await self._create()
        except ServiceError as exc:
            logger.warning("%s", exc)
        self._pulls.reset()

    async def _create(self) -> None:
        async with self._creating:
            try:
                patient = self._connection.client.jetstream(timeout=_CREATE_TIMEOUT_S)
                num_addresses = self._connection.num_addresses
                await create_streams(patient, self._names, self._config, num_addresses)
            except _NATS_ERRORS as exc:
                raise self._error("create", exc) from exc

    def _require_connection(self) -> None:
        if not self.connected:
            raise ServiceError(
                f"{self._names.stream}: NATS is not connected ({self._connection.url})"
            )

    def _error(self, doing: str, exc: Exception) -> ServiceError:
        reason = str(exc) or type(exc).__name__
        return ServiceError(f"{self._names.stream}, {doing}: {reason} ({self._connection.url})")


def _num_tokens(subject: str) -> int:
    """Return the uncached tokens of a job by its subject, 0 for a subject of no job of Tandem's."""
    number = subject.rpartition(".")[2]
    return int(number) if _NUMBER.fullmatch(number) else 0


def _header_value(text: str) -> str:
    """Return a text, perhaps a stranger's, as the value of a header: short, printable ASCII."""
    return ascii(text)[1:-1][:_MAX_HEADER_CHARS]

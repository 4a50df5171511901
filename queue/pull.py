"""Pulling from a JetStream consumer with the latency of a push.

One request waits at the broker, which answers it the moment a job is published. A second request,
which does not wait, takes the jobs behind it, if the first message counts any. The client library's
own `fetch` of several messages waits for all of them.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Awaitable

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tandem.runtime.bus.nats import NatsConnection
from tandem.runtime.clock import wall_seconds
from tandem.runtime.tasks import ends_within

logger = logging.getLogger(__name__)

_STATUS = "Status"
_NO_RESPONDERS = "503"
_LATE_S = 0.25  # how long after its expiry the end of a pull is awaited
_NO_WAIT_TIMEOUT_S = 0.5
_LEAVE_TIMEOUT_S = 0.5  # for the answer of the broker


class PullConsumer:
    """The receiving end of one worker. One caller at a time."""

    def __init__(self, connection: NatsConnection, stream: str, consumer: str) -> None:
        self._connection = connection
        self._api_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._subscription: Subscription | None = None
        self._inbox = ""
        self._messages: deque[Msg] = deque()
        self._ended: dict[str, str] = {}  # reply subject of a pull |-> the status that ended it
        self._wake = asyncio.Event()
        self._num_pulls = 0
        self._standing = ""  # the pull that waits at the broker; outlives a cancelled caller
        self._standing_until = 0.0
        self._leaving: asyncio.Task[None] | None = None

    async def pull(self, max_messages: int, deadline: float) -> list[Msg]:
        """Return messages, none when the first has not come by `deadline` (perf_counter seconds).

        Raise NoRespondersError when the consumer does not exist, and the client's errors.
        """
        await self._subscribe()
        now = time.perf_counter()
        if not self._messages and self._standing_until <= now:
            if deadline <= now:
                return []
            self._standing = await self._request(1, deadline - now)
            self._standing_until = deadline + _LATE_S
        first = await self._take(self._standing, deadline + _LATE_S)
        if first is None:
            return []
        messages = [first]
        num_more = min(max_messages - 1, first.metadata.num_pending)
        if num_more > 0:
            reply = await self._request(num_more, None)
            until = time.perf_counter() + _NO_WAIT_TIMEOUT_S
            while len(messages) <= num_more and (message := await self._take(reply, until)):
                messages.append(message)
        return messages

    async def wait(self, timeout_s: float) -> None:
        """Wait until a message or a status arrives, or `timeout_s` has passed."""
        self._wake.clear()
        await ends_within(self._wake.wait(), timeout_s)

    def reset(self) -> None:
        """Forget the pulls under way: the broker has, after a reconnection."""
        self._standing_until = 0.0
        self._ended[self._standing] = "reset"
        self._wake.set()

    async def close(self) -> None:
        """Stop listening, and give back what came and was not taken, or comes too late."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await self._leave(subscription)
        self._standing_until = 0.0
        while self._messages:
            await best_effort(self._messages.popleft().nak())

    async def _leave(self, subscription: Subscription) -> None:
        """End a subscription, after the messages that the broker has sent already have come."""
        if not self._connection.connected:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()  # else a reconnection would bring it back
            return
        # Left alone when it is late: nats-py's connection fails on the answer to a cancelled drain.
        self._leaving = asyncio.create_task(_drain(subscription))
        await asyncio.wait({self._leaving}, timeout=_LEAVE_TIMEOUT_S)

    async def _subscribe(self) -> None:
        if self._subscription is None:
            self._inbox = self._connection.client.new_inbox()
            self._subscription = await self._connection.client.subscribe(
                f"{self._inbox}.*", cb=self._on_message
            )

    async def _request(self, batch: int, expires_s: float | None) -> str:
        """Request messages, only waiting ones if `expires_s` is None; return the reply subject."""
        self._num_pulls += 1
        self._ended.clear()
        reply = f"{self._inbox}.{self._num_pulls}"
        request: dict[str, int | bool] = {"batch": batch}
        if expires_s is None:
            request["no_wait"] = True
        else:
            request["expires"] = max(int(wall_seconds(expires_s) * 1e9), 1_000_000)
        await self._connection.client.publish(
            self._api_subject, json.dumps(request).encode(), reply
        )
        return reply

    async def _take(self, reply: str, until: float) -> Msg | None:
        """Return the next message; None when the pull `reply` ended without one, or at `until`."""
        while not self._messages:
            status = self._ended.pop(reply, None)
            if status == _NO_RESPONDERS:
                raise nats.errors.NoRespondersError
            remaining_s = until - time.perf_counter()
            if status is not None or remaining_s <= 0:
                return None
            await self.wait(remaining_s)
        return self._messages.popleft()

    async def _on_message(self, message: Msg) -> None:
        status = (message.headers or {}).get(_STATUS)
        # A job keeps its own subject, whatever its headers are.
        if status is None or not message.subject.startswith(f"{self._inbox}."):
            if self._subscription is None:
                await best_effort(message.nak())
                return
            self._messages.append(message)
            self._standing_until = 0.0
        else:
            self._ended[message.subject] = status
            if message.subject == self._standing:
                self._standing_until = 0.0
        self._wake.set()


async def best_effort(call: Awaitable[object]) -> None:
    """Send an answer to the broker, which delivers a job again where it does not come."""
    try:
        await call
    except (nats.errors.Error, OSError) as exc:
        logger.debug("an answer to the broker was not sent: %s", exc)


async def _drain(subscription: Subscription) -> None:
    with contextlib.suppress(nats.errors.Error, TimeoutError):
        await subscription.drain()  # type: ignore[no-untyped-call]

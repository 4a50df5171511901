"""One limit for each API key over all frontends: each tells the others what it has spent.

tandem.{namespace}.limits.{instance_id}    SpentLimits

The messages have sums since the begin of a count, so that a lost one is made up for by the next.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from itertools import islice

from tandem.frontend.access.limits import Client
from tandem.runtime.bus.events import Events, Unsubscribe
from tandem.runtime.errors import ProtocolError
from tandem.runtime.tasks import cancel, keep_running
from tandem.runtime.wire.bounds import Count, Few, Message, Name, Real
from tandem.runtime.wire.decoding import RefusalLog, decoder
from tandem.runtime.wire.messages import encode

logger = logging.getLogger(__name__)

INTERVAL_S = 0.1  # between two messages, and so the time for which frontends may count apart
FORGET_S = 300.0  # after the last message of a frontend
MAX_KEYS = 4096  # of one message


class Spent(Message, frozen=True, tag=False):
    """What a frontend's requests with one API key have spent, and the room that it sees."""

    name: Name  # of the key
    serial: Count  # of the count, which begins anew when the key's entry changes
    requests: Real = 0.0
    tokens: Real = 0.0
    requests_left: Real = 0.0
    tokens_left: Real = 0.0


class SpentLimits(Message, frozen=True):
    """The counts of one frontend whose buckets are not full."""

    instance_id: Name
    spent: Few[Spent]


_decode = decoder(SpentLimits)
_refusals = RefusalLog(logger, "spent limits")


class SharedLimits:
    """Tells other frontends what the clients here have spent, and takes away what they have."""

    def __init__(
        self,
        events: Events,
        namespace: str,
        instance_id: str,
        clients: Callable[[], Iterable[Client]],
    ) -> None:
        self._events = events
        self._prefix = f"tandem.{namespace}.limits."
        self._instance_id = instance_id
        self._clients = clients
        # by frontend and key: the count here that it was taken away from, and the message
        self._heard: dict[str, dict[str, tuple[int, Spent]]] = {}
        self._heard_s: dict[str, float] = {}  # the last message of each
        self._unsubscribe: Unsubscribe | None = None
        self._telling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to tell and to listen."""
        self._unsubscribe = await self._events.subscribe(f"{self._prefix}*", self._on_message)
        self._telling = keep_running("the shared limits", self._tell_next)

    async def close(self) -> None:
        """End both. Idempotent, also without `start`."""
        await cancel(self._telling)
        if self._unsubscribe is not None:
            await self._unsubscribe()
            self._unsubscribe = None

    async def _tell_next(self) -> None:
        await asyncio.sleep(INTERVAL_S)
        self.tell()

    def tell(self) -> None:
        """Publish the counts of all clients that are below their limits."""
        counts = (each for each in self._clients() if not each.is_full)
        while some := [_spent_of(each) for each in islice(counts, MAX_KEYS)]:
            message = encode(SpentLimits(self._instance_id, some))
            self._events.publish(self._prefix + self._instance_id, message)

    def _on_message(self, subject: str, payload: bytes) -> None:
        sender = subject.rpartition(".")[2]
        if sender == self._instance_id:
            return
        try:
            message = _decode(payload)
        except ProtocolError as error:
            _refusals.note(sender, error)
            return
        now_s = time.perf_counter()
        self._heard_s[sender] = now_s
        for gone in [each for each, at_s in self._heard_s.items() if now_s - at_s > FORGET_S]:
            del self._heard_s[gone]
            self._heard.pop(gone, None)
        heard = self._heard.setdefault(sender, {})
        clients = {each.key.name: each for each in self._clients()}
        for spent in message.spent:
            if (client := clients.get(spent.name)) is None:
                continue
            serial, before = heard.get(spent.name, (-1, spent))
            is_new = (serial, before.serial) != (client.serial, spent.serial)
            _apply(client, spent, None if is_new else before)
            heard[spent.name] = client.serial, spent


def _spent_of(client: Client) -> Spent:
    requests, tokens = client.requests, client.tokens
    return Spent(
        client.key.name,
        client.serial,
        requests.num_spent if requests else 0.0,
        tokens.num_spent if tokens else 0.0,
        requests.level if requests else 0.0,
        tokens.level if tokens else 0.0,
    )


def _apply(client: Client, spent: Spent, before: Spent | None) -> None:
    """Take away what was spent since `before`; without it have no more room than the other has."""
    for bucket, left, now, then in (
        (client.requests, spent.requests_left, spent.requests, before and before.requests),
        (client.tokens, spent.tokens_left, spent.tokens, before and before.tokens),
    ):
        if bucket is not None and then is None:
            bucket.lower_to(left)
        elif bucket is not None:
            bucket.lower(now - (then or 0.0))

"""The connector in vLLM's rank: a thread with an event loop of its own, which moves the KV.

The engine's thread gives it orders and takes its news; neither waits for the other.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.runtime.process.logs import setup_logging
from tandem.vllm.kv_layout import VllmPool
from tandem.vllm.member import Member
from tandem.vllm.settings import ConnectorSettings
from tandem.vllm.step_messages import End, Ends, LoadEnd, News, Orders

if TYPE_CHECKING:
    from torch.cuda import Event

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


class WorkerSide:
    """Answers the rank's calls."""

    def __init__(self, settings: ConnectorSettings) -> None:
        self._settings = settings
        self._ends = Ends()
        self._taken: list[End] = []  # in this step
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tandem", daemon=True)
        self._member: Member | None = None
        self._is_vram = False

    def join(self, pool: VllmPool) -> None:
        """Join the cluster with these blocks, and return once peers can reach them."""
        self._is_vram = pool.memory == "VRAM"
        self._thread.start()
        self._member = member = Member(self._settings, pool, self._ends)
        if not logging.getLogger().handlers:
            runtime = self._settings.config.runtime
            name = member.node.instance_id
            setup_logging(runtime.log_level, "connector", name, runtime.log_format)
            logging.setLogRecordFactory(logging.LogRecord)  # vLLM's lines show more than Tandem's
        asyncio.run_coroutine_threadsafe(member.start(), self._loop).result()

    def close(self) -> None:
        """Leave the cluster; handoffs under way are retracted. Idempotent."""
        member, self._member = self._member, None
        if member is None:
            return
        closing = asyncio.run_coroutine_threadsafe(member.close(), self._loop)
        try:
            closing.result(CLOSE_TIMEOUT_S)
        except TimeoutError:
            logger.warning("the connector did not end within %g s", CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)

    def begin_loads(self, orders: Orders) -> None:
        """Offer and cancel prompts, and follow the tickets of the first rank."""
        if orders.offers or orders.cancelled or orders.begun:
            self._post(lambda member: member.take_offers(orders))

    def begin_writes(self, orders: Orders) -> None:
        """Have the blocks written that this step has completed."""
        if orders.progress or orders.over:
            event = self._event()
            self._post(lambda member: member.take_progress(orders, event))

    def take_ends(self) -> tuple[set[str], set[str]]:
        """Return the requests whose loads have ended, and those of them that failed; each once."""
        fresh = [self._ends.popleft() for _ in range(len(self._ends))]
        self._taken += fresh
        loads = [end for end in fresh if isinstance(end, LoadEnd)]
        failed = {end.request_id for end in loads if end.reason is not None}
        return {end.request_id for end in loads}, failed

    def news(self) -> News | None:
        """Return the news of this step; `take_ends` comes before it."""
        if self._member is None:
            return None
        taken, self._taken = self._taken, []
        return News(self._member.view, {self._settings.rank: taken})

    def _post(self, act: Callable[[Member], None]) -> None:
        if (member := self._member) is not None:
            self._loop.call_soon_threadsafe(act, member)

    def _event(self) -> "Event | None":
        """Return an event that happens once the step's KV is in the pool; None: it is there."""
        if not self._is_vram:
            return None
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

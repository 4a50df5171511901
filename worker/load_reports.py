"""A worker's reports of its load, and its own prompts, whose coming and going changes it."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from tandem.engine.schedule.outputs import LoadStats
from tandem.runtime.tasks import ends_within
from tandem.runtime.wire.cluster_messages import positions_of

INTERVAL_S = 0.25  # between reports of an engine that computes, unless prompts come or go
HEARTBEAT_S = 0.5  # between reports of one that does not
MIN_INTERVAL_S = 0.02
PLACING_S = 0.002  # a prompt that has come is placed first: a report takes the same threads
LONG_TOKENS = 512  # of a prompt that delays others noticeably
BURST_S = 0.05  # prompts that came within it may be in no report yet
MAX_IN_BURST = 256  # prompts


class Burst:
    """The prompts that came within BURST_S; frontends have sent such to alike workers too."""

    def __init__(self) -> None:
        self._came: deque[tuple[float, str, int]] = deque(maxlen=MAX_IN_BURST)

    def add(self, now_s: float, request_id: str, num_tokens: int) -> None:
        self._came.append((now_s, request_id, num_tokens))

    def just_come(self, now_s: float, request_id: str) -> tuple[int, float]:
        """Return the tokens of all but this one, and the sum of their positions. In any thread."""
        since_s = now_s - BURST_S
        came = [n for at, name, n in list(self._came) if at >= since_s and name != request_id]
        return sum(came), sum(map(positions_of, came))


class OwnPrompts:
    """Prompts that wait or are computed here for answers of this worker.

    While there is one, the prefill role of the same worker takes no prompt of another worker.
    """

    def __init__(self) -> None:
        self._request_ids: set[str] = set()
        self.none = asyncio.Event()
        self.none.set()
        self.changed = asyncio.Event()  # the first or a long one came, or the last is gone
        self.num_tokens = 0  # of all that came so far
        self.context = 0.0  # the positions of these, summed
        self._burst = Burst()

    def just_come(self, request_id: str) -> tuple[int, float]:
        """Return what came with this prompt, as `Burst` does."""
        return self._burst.just_come(time.perf_counter(), request_id)

    def add(self, request_id: str, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.context += positions_of(num_tokens)
        self._burst.add(time.perf_counter(), request_id, num_tokens)
        if not self._request_ids or num_tokens >= LONG_TOKENS:
            self.changed.set()
        self.none.clear()
        self._request_ids.add(request_id)

    def discard(self, request_id: str) -> None:
        self._request_ids.discard(request_id)
        if not self._request_ids and not self.none.is_set():
            self.none.set()
            self.changed.set()


class LoadReports:
    """Sends the load of a worker to the frontends and to other workers.

    `load` is answered after the engine's step. Until then prompts that came since its last answer
    count as waiting.
    """

    def __init__(
        self,
        prompts: OwnPrompts,
        load: Callable[[], Awaitable[LoadStats]],
        send: Callable[[LoadStats], None],
        progress: Callable[[], tuple[int, bool]],  # of the engine, as in EngineLoop
    ) -> None:
        self._prompts, self._load, self._send = prompts, load, send
        self._progress = progress
        self._last: LoadStats | None = None
        self._counted = (0, 0.0)  # tokens and context of `prompts`, when it was last asked for

    async def send_next(self) -> None:
        """Send one report, and wait until the next is due."""
        reported, _ = self._progress()
        await self._send_one()
        await asyncio.sleep(MIN_INTERVAL_S)
        changed = self._prompts.changed
        if not await ends_within(changed.wait(), INTERVAL_S - MIN_INTERVAL_S):
            num_steps, is_busy = self._progress()
            if num_steps == reported and not is_busy:
                await ends_within(changed.wait(), HEARTBEAT_S - INTERVAL_S)
        if changed.is_set():
            await asyncio.sleep(PLACING_S)
        changed.clear()

    async def _send_one(self) -> None:
        prompts = self._prompts
        asked_at, num_sent = (prompts.num_tokens, prompts.context), self._counted[0]
        answer = asyncio.ensure_future(self._load())
        try:
            while not (await asyncio.wait([answer], timeout=MIN_INTERVAL_S))[0]:
                if self._last is not None and prompts.num_tokens > num_sent:
                    num_sent = prompts.num_tokens
                    num_new = num_sent - self._counted[0]
                    new_context = prompts.context - self._counted[1]
                    self._send(
                        replace(
                            self._last,
                            num_waiting_tokens=self._last.num_waiting_tokens + num_new,
                            num_own_prompt_tokens=self._last.num_own_prompt_tokens + num_new,
                            waiting_context=self._last.waiting_context + new_context,
                        )
                    )
        finally:
            answer.cancel()
        self._last, self._counted = answer.result(), asked_at
        self._send(self._last)

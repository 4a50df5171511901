"""Tickets of decode workers: their prompts are computed by this vLLM, and written as they are."""

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from tandem.prefill.config import PrefillConfig
from tandem.prefill.job import Job
from tandem.prefill.running_jobs import RunningJobs
from tandem.prefill.tools import JobTools
from tandem.queue.prefill_queue import PrefillQueue
from tandem.runtime.block_hash import num_blocks_of
from tandem.runtime.errors import TransferError
from tandem.runtime.messages import unpack_tokens
from tandem.runtime.timeline import Timeline
from tandem.transfer.handoff.claimant import Claimant
from tandem.transfer.handoff.writer import BlockWriter, ComputedBlocks
from tandem.vllm.ends import Ends
from tandem.vllm.kv_layout import VllmBlocks
from tandem.vllm.prompts import PromptClient
from tandem.vllm.step_messages import Progress

if TYPE_CHECKING:
    from torch.cuda import Event

logger = logging.getLogger(__name__)


class TicketPrompt:
    """The computation of one ticket's prompt."""

    def __init__(
        self, prompts: "TicketPrompts", claimant: Claimant, writer: BlockWriter, _: Timeline
    ) -> None:
        self._prompts = prompts
        self._key = claimant.request_id
        self._writer = writer
        self._steps: asyncio.Queue[tuple[Progress, Event | None] | str] = asyncio.Queue()

    async def run(self) -> None:
        grant, prompts = self._writer.machine.grant, self._prompts
        token_ids = unpack_tokens(grant.token_ids)
        num_prompt_tokens = len(token_ids)
        prompts.open[self._key] = self
        try:
            prompts.client.compute(self._key, token_ids, grant.cache_salt)
            num_tokens = 0
            while num_tokens < num_prompt_tokens and not self._writer.machine.error:
                step = await self._steps.get()
                if isinstance(step, str):
                    raise TransferError(step)
                progress, event = step
                num_tokens = min(progress.num_tokens, num_prompt_tokens)
                if num_tokens == num_prompt_tokens:
                    logger.debug("ticket %s: computed", self._key)
                self._write(progress, num_tokens, num_tokens == num_prompt_tokens, event)
        finally:
            del prompts.open[self._key]

    def _write(
        self, progress: Progress, num_tokens: int, is_last: bool, event: "Event | None"
    ) -> None:
        blocks = self._prompts.blocks
        num_blocks = num_tokens // blocks.block_size
        if is_last:
            num_blocks = num_blocks_of(num_tokens, blocks.block_size)
        table = blocks.table(progress.block_ids[:num_blocks])
        self._writer.write_ready(ComputedBlocks(table, len(table), (1,), (1,), event))

    def advance(self, progress: Progress, event: "Event | None") -> None:
        """Handle a step of vLLM's that computed a part of the prompt."""
        self._steps.put_nowait((progress, event))

    def stop(self, reason: str) -> None:
        self._steps.put_nowait(reason)
        self._prompts.client.stop(self._key)

    def release(self) -> None:
        self._prompts.ends.released(self._key)


class TicketPrompts:
    """The prompts of tickets that are computed now, by key."""

    def __init__(self, client: PromptClient, blocks: VllmBlocks, ends: Ends) -> None:
        self.client = client
        self.blocks = blocks
        self.ends = ends
        self.open: dict[str, TicketPrompt] = {}
        client.on_failed = self.fail

    def compute(self, claimant: Claimant, writer: BlockWriter, timeline: Timeline) -> TicketPrompt:
        return TicketPrompt(self, claimant, writer, timeline)

    def advance(self, progress: Progress, event: "Event | None") -> None:
        """Have the blocks of a step written, or released if the ticket is over."""
        if (prompt := self.open.get(progress.key)) is not None:
            prompt.advance(progress, event)
        else:
            self.ends.released(progress.key)

    def fail(self, key: str, reason: str) -> None:
        """End the computation of a ticket, if it still runs."""
        if (prompt := self.open.get(key)) is not None:
            prompt.stop(reason)

    def fail_all(self, reason: str) -> None:
        for key in list(self.open):
            self.fail(key, reason)


class Tickets:
    """Takes tickets from the queue, up to the budget of jobs and of uncached tokens."""

    def __init__(self, tools: JobTools, queue: PrefillQueue, config: PrefillConfig) -> None:
        self.jobs = RunningJobs()
        self._tools = tools
        self._queue = queue
        self._config = config

    async def receive(self) -> None:
        """Take the next ticket and begin it."""
        await self.jobs.room(self._config)
        for delivery in await self._queue.receive(1, self._config.receive_timeout_s):
            await self.jobs.begin(Job(self._tools, delivery), delivery)


def stopped_ancestor() -> int | None:
    """Return the id of a stopped process between this one and the one that computes prompts.

    A stopped scheduler would hold a ticket up although this process is well.
    """
    pid = os.getppid()
    for _ in range(2):  # vLLM's scheduler, and Tandem's engine
        if pid <= 1:
            return None
        try:
            with open(f"/proc/{pid}/stat", errors="replace") as stat:
                state, parent = stat.read().rpartition(")")[2].split()[:2]
        except OSError:
            return None
        if state in "Tt":
            return pid
        pid = int(parent)
    return None

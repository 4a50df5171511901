"""Tickets of decode workers: their prompts are computed by this vLLM, and written as they are."""

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from tandem.runtime.block_hash import num_blocks_of
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import TandemError, TransferError
from tandem.runtime.messages import encode, unpack_tokens
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.timeline import Timeline
from tandem.transfer.handoff.claimant import Claimant
from tandem.transfer.handoff.writer import BlockWriter, ComputedBlocks
from tandem.vllm.kv_layout import VllmPool
from tandem.vllm.step_messages import COMPUTE, ComputePrompt, Ends, Progress, Released

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
        num_prompt_tokens, num_tokens = len(unpack_tokens(grant.token_ids)), 0
        prompts.open[self._key] = self
        computing = asyncio.create_task(
            self._compute(ComputePrompt(self._key, grant.token_ids, grant.cache_salt))
        )
        try:
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
            computing.cancel()
            del prompts.open[self._key]

    async def _compute(self, prompt: ComputePrompt) -> None:
        """Have the engine compute the prompt, until this is cancelled."""
        prompts = self._prompts
        try:
            async with RequestContext() as context:
                await prompts.client.call(prompts.engine, COMPUTE, encode(prompt), context)
        except TandemError as error:
            self.stop(f"the engine failed: {error.message}")

    def _write(
        self, progress: Progress, num_tokens: int, is_last: bool, event: "Event | None"
    ) -> None:
        pool = self._prompts.pool
        num_blocks = num_tokens // pool.layout.block_size
        if is_last:
            num_blocks = num_blocks_of(num_tokens, pool.layout.block_size)
        table = pool.table(progress.block_ids[:num_blocks])
        self._writer.write_ready(ComputedBlocks(table, len(table), (1,), (1,), event))

    def advance(self, progress: Progress, event: "Event | None") -> None:
        """Handle a step of vLLM's that computed a part of the prompt."""
        self._steps.put_nowait((progress, event))

    def stop(self, reason: str) -> None:
        self._steps.put_nowait(reason)

    def release(self) -> None:
        self._prompts.ends.append(Released(self._key))


class TicketPrompts:
    """The prompts of tickets that are computed now, by key; `engine` is the address of theirs."""

    def __init__(self, client: RequestClient, engine: str, pool: VllmPool, ends: Ends) -> None:
        self.client = client
        self.engine = engine
        self.pool = pool
        self.ends = ends
        self.open: dict[str, TicketPrompt] = {}

    def advance(self, progress: Progress, event: "Event | None") -> None:
        """Have the blocks of a step written, or released if the ticket is over."""
        if (prompt := self.open.get(progress.key)) is not None:
            prompt.advance(progress, event)
        else:
            self.ends.append(Released(progress.key))

    def fail(self, key: str, reason: str) -> None:
        """End the computation of a ticket, if it still runs."""
        if (prompt := self.open.get(key)) is not None:
            prompt.stop(reason)

    def fail_all(self, reason: str) -> None:
        for prompt in self.open.values():
            prompt.stop(reason)


def stopped_ancestor() -> int | None:
    """Return the id of a stopped process between this one and the one that computes prompts.

    A stopped scheduler would hold a ticket up although this process is well.
    """
    stopped = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    with suppress(psutil.Error):
        for process in psutil.Process().parents()[:2]:  # vLLM's scheduler, and Tandem's engine
            if process.status() in stopped:
                return process.pid
    return None

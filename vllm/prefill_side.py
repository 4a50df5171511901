"""Tickets of decode workers: their prompts are computed by this vLLM, and written as they are."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import psutil

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import TandemError, TransferError
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.tracing.timeline import Timeline
from tandem.runtime.wire.block_hash import num_blocks_of
from tandem.runtime.wire.cluster_messages import TransferMetadata
from tandem.runtime.wire.handoff_messages import PrefillJob
from tandem.runtime.wire.messages import encode, unpack_tokens
from tandem.transfer.handoff.claimant import Claimant
from tandem.transfer.handoff.writer import BlockWriter, ComputedBlocks
from tandem.vllm.kv_layout import VllmPool
from tandem.vllm.settings import engine_of, member_id
from tandem.vllm.step_messages import COMPUTE, ComputePrompt, Ends, Progress, Released

if TYPE_CHECKING:
    from torch.cuda import Event

# the steps of vLLM's that computed a part of a prompt, or the reason for its end
Steps = asyncio.Queue["tuple[Progress, Event | None] | str"]

_NO_DEADLINE_MS = 24 * 3600 * 1000  # the lease of the grant ends before

logger = logging.getLogger(__name__)


class TicketPrompt:
    """The computation of one ticket's prompt.

    Its key has what the other ranks need to follow the first: handoff id, attempt, and the engine
    of the decode worker.
    """

    def __init__(
        self, prompts: "TicketPrompts", claimant: Claimant, writer: BlockWriter, _: Timeline
    ) -> None:
        self._prompts = prompts
        engine = engine_of(writer.link.peer.instance_id)
        self._key = f"{claimant.request_id}.{engine}"  # `follow` takes it apart
        self._writer = writer
        self.steps = prompts.waiting.pop(self._key, Steps())

    async def run(self) -> None:
        grant, prompts = self._writer.machine.grant, self._prompts
        pool, block_size = prompts.pool, prompts.pool.layout.block_size
        num_prompt_tokens, num_tokens = len(unpack_tokens(grant.token_ids)), 0
        prompts.open[self._key] = self
        prompt = ComputePrompt(self._key, grant.token_ids, grant.cache_salt)
        computing = None if prompts.rank else asyncio.create_task(self._compute(prompt))
        try:
            while num_tokens < num_prompt_tokens and not self._writer.machine.error:
                step = await self.steps.get()
                if isinstance(step, str):
                    raise TransferError(step)
                progress, event = step
                num_tokens = min(progress.num_tokens, num_prompt_tokens)
                num_blocks = num_tokens // block_size
                if num_tokens == num_prompt_tokens:
                    num_blocks = num_blocks_of(num_tokens, block_size)
                    logger.debug("ticket %s: computed", self._key)
                table = pool.table(progress.block_ids[:num_blocks])
                self._writer.write_ready(ComputedBlocks(table, len(table), (1,), (1,), event))
        finally:
            if computing is not None:
                computing.cancel()

    async def _compute(self, prompt: ComputePrompt) -> None:
        """Have the engine compute the prompt, until this is cancelled."""
        prompts = self._prompts
        try:
            async with RequestContext() as context:
                await prompts.client.call(prompts.engine, COMPUTE, encode(prompt), context)
        except TandemError as error:
            self.stop(f"the engine failed: {error.message}")

    def stop(self, reason: str) -> None:
        self.steps.put_nowait(reason)

    def release(self) -> None:
        del self._prompts.open[self._key]
        self._prompts.ends.append(Released(self._key))


@dataclass(slots=True)
class FollowedTicket:
    """A delivery that comes from the first rank, by vLLM's scheduler, and not from the queue."""

    job: PrefillJob
    on_end: Callable[[], None]
    num_deliveries: int = 1

    async def ack(self) -> None:
        self.on_end()

    async def give_back(self, delay_s: float = 0.0) -> None:
        self.on_end()

    async def in_progress(self) -> None:
        """Do nothing: no other worker gets it."""


class TicketPrompts:
    """The prompts of tickets that are computed now, by key; `engine` is the address of theirs.

    The first rank has them computed. The others follow its tickets.
    """

    def __init__(
        self, client: RequestClient, engine: str, rank: int, pool: VllmPool, ends: Ends
    ) -> None:
        self.client = client
        self.engine = engine
        self.rank = rank
        self.pool = pool
        self.ends = ends
        self.open: dict[str, TicketPrompt] = {}
        self.waiting: dict[str, Steps] = {}  # of tickets that this rank has not claimed yet

    def follow(
        self, key: str, deployment: str, peers: Mapping[str, TransferMetadata]
    ) -> FollowedTicket:
        """Return this rank's ticket for a prompt that the engine has begun for the first rank's."""
        handoff_id, attempt, engine = key.split(".")
        decode_instance = member_id(engine, self.rank)
        peer = peers.get(decode_instance)
        self.waiting[key] = Steps()
        ticket = PrefillJob(
            bytes.fromhex(handoff_id),
            int(attempt),
            deployment,
            decode_instance,
            decode_epoch="" if peer is None else peer.epoch,
            num_tokens=0,
            num_uncached_tokens=0,
            deadline_ms=_NO_DEADLINE_MS,
        )
        return FollowedTicket(ticket, partial(self._forget, key))

    def _forget(self, key: str) -> None:
        """Release the blocks of a ticket that was never granted."""
        if self.waiting.pop(key, None) is not None:
            self.ends.append(Released(key))

    def advance(self, progress: Progress, event: "Event | None") -> None:
        """Have the blocks of a step written, or released if the ticket is over."""
        if (steps := self._steps_of(progress.key)) is not None:
            steps.put_nowait((progress, event))
        else:
            self.ends.append(Released(progress.key))

    def fail(self, key: str, reason: str) -> None:
        """End the computation of a ticket, if it still runs."""
        if (steps := self._steps_of(key)) is not None:
            steps.put_nowait(reason)

    def _steps_of(self, key: str) -> "Steps | None":
        prompt = self.open.get(key)
        return self.waiting.get(key) if prompt is None else prompt.steps


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

"""One ticket on a prefill worker: claim, compute, write block by block, settle, acknowledge."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass

import msgspec

from tandem.engine.engine import SequenceOutput
from tandem.engine.loop import EngineLoop
from tandem.engine.sequence import Sequence
from tandem.prefill.metrics import PrefillMetrics
from tandem.queue.prefill_queue import Delivery
from tandem.runtime.context import RequestContext
from tandem.runtime.discovery import TypedView
from tandem.runtime.errors import DeadlineError, TandemError, TransferError
from tandem.runtime.messages import (
    Claim,
    ClaimAnswer,
    Claimed,
    ClaimRefused,
    FirstToken,
    PrefillJob,
    Settled,
    TransferMetadata,
    encode,
    unpack_tokens,
)
from tandem.runtime.node import Node
from tandem.runtime.request_plane import ResponseStream
from tandem.runtime.timeline import Timeline
from tandem.transfer.agent import TransferAgent
from tandem.transfer.handoff import PostedWrite, PrefillHandoff

logger = logging.getLogger(__name__)

_CLAIM_ANSWER = msgspec.msgpack.Decoder(ClaimAnswer)
SETTLE_TIMEOUT_S = 5.0
PEER_WAIT_S = 0.5  # less than a decode worker waits for a claim


@dataclass(slots=True, frozen=True)
class JobTools:
    """What every job of a worker uses."""

    node: Node
    agent: TransferAgent
    loop: EngineLoop
    outputs: dict[str, "asyncio.Queue[SequenceOutput]"]  # request id |-> its steps' outcomes
    peers: TypedView[TransferMetadata]
    metrics: PrefillMetrics
    deployment: str
    block_size: int
    lease_margin_ms: int
    renew_interval_s: float


class Job:
    """The life of one delivery. What is no TandemError leaves `run`, and the ticket comes again."""

    def __init__(self, tools: JobTools, delivery: Delivery) -> None:
        ticket = delivery.job
        self._tools = tools
        self._delivery = delivery
        self._timeline = Timeline()
        self._context = RequestContext(
            timeout_s=ticket.deadline_ms / 1e3, headers=dict(ticket.trace)
        )
        self._steps: asyncio.Queue[SequenceOutput] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self.ticket: PrefillJob = ticket
        self.request_id = f"{ticket.handoff_id.hex()}.{ticket.attempt}"

    async def run(self) -> None:
        """Ends with the ticket acknowledged: either its KV was delivered, or D knows better."""
        renewing = asyncio.create_task(self._renew())
        try:
            async with self._context:
                outcome = await self._handle()
        except TandemError as error:
            logger.warning("handoff %s: %s", self.request_id, error)
            outcome = error.code
        finally:
            renewing.cancel()
        self._tools.metrics.job_ended(outcome)
        await self._delivery.ack()

    def cancel(self, reason: str) -> None:
        """Posts nothing more, and settles; `run` ends when no write is under way."""
        self._context.cancel(reason)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._tools.renew_interval_s)
            await self._delivery.in_progress()

    async def _handle(self) -> str:
        tools, ticket = self._tools, self.ticket
        if ticket.deployment != tools.deployment:
            return "stale"
        peer = await self._find_peer()
        if peer is not None and peer.epoch != ticket.decode_epoch:
            return "stale"
        claim_sent_at = time.perf_counter()
        claim = Claim(ticket.handoff_id, ticket.attempt, tools.node.instance_id, tools.node.epoch)
        stream = await tools.node.client.open(
            ticket.decode_address, "claim", encode(claim), self._context
        )
        async with stream:
            answer = await self._read_answer(stream)
            if isinstance(answer, ClaimRefused):
                return answer.reason
            if not isinstance(answer, Claimed):
                return "cancelled"
            self._timeline.mark("claimed")
            machine = PrefillHandoff(
                ticket.handoff_id,
                ticket.attempt,
                answer,
                claim_sent_at=claim_sent_at,
                margin_ms=tools.lease_margin_ms,
            )
            return await self._deliver(stream, machine, peer)

    async def _find_peer(self) -> TransferMetadata | None:
        """D's transfer metadata; a ticket can overtake the news of a D that has just come."""
        peers, decode_instance = self._tools.peers, self.ticket.decode_instance
        if decode_instance not in peers.items:
            with contextlib.suppress(DeadlineError):
                await peers.wait_for(lambda items: decode_instance in items, PEER_WAIT_S)
        return peers.items.get(decode_instance)

    async def _read_answer(self, stream: ResponseStream) -> ClaimAnswer:
        try:
            answer: ClaimAnswer = _CLAIM_ANSWER.decode(await anext(stream, b""))
            return answer
        except (TandemError, msgspec.MsgspecError) as error:
            # D may have granted it all the same, and would wait for the end of the lease.
            reason = str(error)
            await self._settle(Settled(self.ticket.handoff_id, self.ticket.attempt, 0, 0, reason))
            raise

    async def _deliver(
        self, stream: ResponseStream, machine: PrefillHandoff, peer: TransferMetadata | None
    ) -> str:
        listening = asyncio.create_task(self._listen(stream, machine))
        try:
            if peer is None:
                raise TransferError(f"no transfer metadata of {self.ticket.decode_instance}")
            await self._tools.agent.connect(peer)
            await self._compute(machine)
        except TandemError as error:
            logger.warning("handoff %s: %s", self.request_id, error)
            machine.stop(error.message)
        finally:
            if machine.unposted:
                machine.stop("not every block was computed")
            await self._wind_up(machine)
            listening.cancel()
        return "delivered" if not machine.error else "failed"

    async def _wind_up(self, machine: PrefillHandoff) -> None:
        """Gives the source blocks back once no write can read them any more, and settles."""
        tools = self._tools
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if outcome is not None:
                logger.error("handoff %s", self.request_id, exc_info=outcome)
        tools.loop.post(lambda engine: engine.abort(self.request_id))
        tools.outputs.pop(self.request_id, None)
        if machine.settled is not None:  # else it is not known how a write ended: the lease must
            await self._settle(machine.settled, machine.settled_notice())

    async def _listen(self, stream: ResponseStream, machine: PrefillHandoff) -> None:
        """D cancels, ends the stream, or dies: whichever it is, nothing more is posted."""
        reason = "the decode worker retracted it"
        try:
            async for _ in stream:
                break
        except TandemError as error:
            reason = error.message
        if not machine.unposted:
            return
        machine.stop(reason)
        stopped = TransferError(reason)
        output = SequenceOutput(self.request_id, [], finish_reason="error", error=stopped)
        self._steps.put_nowait(output)

    async def _compute(self, machine: PrefillHandoff) -> None:
        """Computes the prompt and writes each block as soon as it is full."""
        tools, grant = self._tools, machine.grant
        token_ids = unpack_tokens(grant.token_ids)
        seq = Sequence(
            request_id=self.request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=grant.sampling,
            stop=grant.stop,
            cache_salt=grant.cache_salt,
            prefill_only=True,
        )
        tools.outputs[self.request_id] = self._steps
        await tools.loop.call(lambda engine: engine.add(seq))
        finished = False
        while not finished and not machine.error:
            output = await self._steps.get()
            if output.error is not None:
                raise output.error
            finished = output.finish_reason is not None
            if finished:
                self._timeline.mark("computed")
                tools.metrics.computed(seq.num_prompt_tokens, seq.num_cached_tokens)
                self._spawn(self._send_first_token(machine, seq, output))
            self._write_ready(machine, seq, finished, output.num_computed_tokens)

    def _write_ready(
        self, machine: PrefillHandoff, seq: Sequence, finished: bool, num_computed: int
    ) -> None:
        """Posts the blocks that are complete by now: full ones, and the tail at the end."""
        num_ready = len(seq.block_table) if finished else num_computed // self._tools.block_size
        ordinals = sorted(ordinal for ordinal in machine.unposted if ordinal < num_ready)
        if not ordinals:
            return
        longest_s = self._tools.agent.longest_write_s
        write = machine.post(ordinals, time.perf_counter(), longest_s)
        if write is not None:
            self._spawn(self._write(machine, write, [seq.block_table[i] for i in ordinals]))

    async def _write(
        self, machine: PrefillHandoff, write: PostedWrite, local_blocks: list[int]
    ) -> None:
        agent, ticket = self._tools.agent, self.ticket
        try:
            checksums = await agent.checksums(local_blocks)
            await agent.write(
                ticket.decode_instance,
                ticket.decode_epoch,
                list(zip(local_blocks, write.remote_blocks, strict=True)),
                machine.landed_notice(write, checksums),
                post_before=write.post_before,
            )
        except TransferError as error:
            machine.failed(write, error.message)
        else:
            machine.completed(write)

    async def _send_first_token(
        self, machine: PrefillHandoff, seq: Sequence, output: SequenceOutput
    ) -> None:
        logprobs = output.logprobs[0] if output.logprobs else None
        first = FirstToken(
            handoff_id=self.ticket.handoff_id,
            attempt=self.ticket.attempt,
            token_id=output.token_ids[0],
            logprobs=logprobs,
            num_cached_tokens=seq.num_cached_tokens,
            timeline_ms=self._timeline.ms(),
        )
        try:
            await self._tell("first_token", encode(first))
        except TandemError as error:
            machine.stop(f"the first token was not delivered: {error.message}")

    async def _settle(self, settled: Settled, notice: bytes | None = None) -> None:
        """Tells D that nothing of ours can land any more; by `notice` if D's server is away."""
        try:
            await self._tell("settled", encode(settled))
        except TandemError as error:
            logger.warning("handoff %s: not settled: %s", self.request_id, error)
            if notice is not None:
                with contextlib.suppress(TransferError):
                    await self._tools.agent.notify(self.ticket.decode_instance, notice)

    async def _tell(self, endpoint: str, payload: bytes) -> None:
        context = RequestContext(timeout_s=SETTLE_TIMEOUT_S)
        async with context:
            await self._tools.node.client.call(
                self.ticket.decode_address, endpoint, payload, context
            )

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)

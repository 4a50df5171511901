"""One ticket on a prefill worker: claim, compute, write block by block, settle, acknowledge."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Coroutine
from dataclasses import dataclass

import msgspec

from tandem.engine.loop import EngineLoop
from tandem.engine.outputs import SequenceOutput
from tandem.engine.schedule.sequence import LayerProgress, Sequence, layer_boundaries
from tandem.prefill.metrics import PrefillMetrics
from tandem.prefill.prefix_pull import PrefixPuller
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
from tandem.runtime.plane.client import ResponseStream
from tandem.runtime.timeline import Timeline
from tandem.runtime.trace import TraceFile
from tandem.transfer.config import TransferConfig
from tandem.transfer.group import TransferGroup, WriteOrder
from tandem.transfer.handoff.prefill import PostedWrite, PrefillHandoff
from tandem.transfer.link import Link

logger = logging.getLogger(__name__)

_CLAIM_ANSWER = msgspec.msgpack.Decoder(ClaimAnswer)
SETTLE_TIMEOUT_S = 5.0
PEER_WAIT_S = 0.5  # less than a decode worker waits for a claim
EXCLUDED_DELAY_S = 0.05  # so that somebody else is quicker


Step = SequenceOutput | LayerProgress


@dataclass(slots=True, frozen=True)
class JobTools:
    """What every job of a worker uses."""

    node: Node
    group: TransferGroup
    loop: EngineLoop
    steps: dict[str, "asyncio.Queue[Step]"]  # request id |-> its steps' outcomes
    peers: TypedView[TransferMetadata]
    metrics: PrefillMetrics
    trace: TraceFile
    puller: PrefixPuller
    deployment: str
    block_size: int
    max_chunk_tokens: int  # that one step computes
    transfer: TransferConfig
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
        self._steps: asyncio.Queue[Step] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self.ticket: PrefillJob = ticket
        self._run = secrets.token_bytes(8)
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
        self._record(outcome)
        if outcome == "excluded":
            await self._delivery.nak(EXCLUDED_DELAY_S)  # for another prefill worker
        else:
            await self._delivery.ack()

    def _record(self, outcome: str) -> None:
        ticket = self.ticket
        args: dict[str, str | int] = {
            "handoff_id": ticket.handoff_id.hex(),
            "end": outcome,
            "decode_instance": ticket.decode_instance,
            "num_tokens": ticket.num_tokens,
            "num_uncached_tokens": ticket.num_uncached_tokens,
        }
        self._tools.trace.record(self.request_id, self._timeline, args, ticket.trace)

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
        claim = Claim(
            ticket.handoff_id,
            ticket.attempt,
            tools.node.instance_id,
            tools.node.epoch,
            tools.group.layout.tp_size,
            self._run,
        )
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
            return await self._deliver(stream, answer, claim_sent_at, peer)

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
            await self._settle(self._nothing_written(reason))
            raise

    async def _deliver(
        self,
        stream: ResponseStream,
        grant: Claimed,
        claim_sent_at: float,
        peer: TransferMetadata | None,
    ) -> str:
        tools, ticket = self._tools, self.ticket
        try:
            if peer is None:
                raise TransferError(f"no transfer metadata of {ticket.decode_instance}")
            if not all(0 <= block_id < peer.num_blocks for _, block_id in grant.fill):
                raise TransferError(f"a block to fill is out of range: {peer.num_blocks} blocks")
            link = await tools.group.connect(peer)
        except TandemError as error:
            await self._settle(self._nothing_written(error.message))
            raise
        machine = PrefillHandoff(
            ticket.handoff_id,
            ticket.attempt,
            grant,
            claim_sent_at=claim_sent_at,
            margin_ms=tools.transfer.lease_margin_ms,
            num_layers=tools.group.layout.num_layers,
            rank_pairs=link.rank_pairs,
            run=self._run,
        )
        listening = asyncio.create_task(self._listen(stream, machine))
        try:
            await self._compute(machine, link)
        except TandemError as error:
            logger.warning("handoff %s: %s", self.request_id, error)
            machine.stop(error.message)
        finally:
            if machine.has_unposted:
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
        tools.steps.pop(self.request_id, None)
        if not machine.pinned:  # else it is not known how a write ended: it may read our blocks yet
            tools.loop.post(lambda engine: engine.abort(self.request_id))
            timeline_ms = self._timeline.since("claimed")
            await self._settle(machine.settled(timeline_ms), machine.settled_notice())

    async def _listen(self, stream: ResponseStream, machine: PrefillHandoff) -> None:
        """D cancels, ends the stream, or dies: whichever it is, nothing more is posted."""
        reason = "the decode worker retracted it"
        try:
            async for _ in stream:
                break
        except TandemError as error:
            reason = error.message
        if not machine.has_unposted:
            return
        machine.stop(reason)
        stopped = TransferError(reason)
        output = SequenceOutput(self.request_id, [], finish_reason="error", error=stopped)
        self._steps.put_nowait(output)

    async def _compute(self, machine: PrefillHandoff, link: Link) -> None:
        """Computes the prompt and writes each block as soon as it is full."""
        tools, grant = self._tools, machine.grant
        token_ids = unpack_tokens(grant.token_ids)
        seq = Sequence(
            request_id=self.request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids) - grant.num_generated,
            sampling=grant.sampling,
            stop=grant.stop,
            cache_salt=grant.cache_salt,
            prefill_only=True,
            num_layer_groups=self._num_layer_groups(grant, link),
        )
        tools.steps[self.request_id] = self._steps
        num_pulled = await self._pull_prefix(seq, grant, link)
        started_at = time.perf_counter()
        await tools.loop.call(lambda engine: engine.add(seq))
        finished = False
        while not finished and not machine.error:
            step = await self._steps.get()
            if isinstance(step, LayerProgress):
                self._write_ready(machine, link, seq, step)
                continue
            if step.error is not None:
                raise step.error
            finished = step.finish_reason is not None
            if finished:
                self._timeline.mark("computed")
                computed_s = time.perf_counter() - started_at
                tools.puller.rate.observe(seq.num_given_tokens - seq.num_cached_tokens, computed_s)
                tools.metrics.computed(seq.num_given_tokens, seq.num_cached_tokens, num_pulled)
            num_tokens = seq.num_given_tokens if finished else step.num_computed_tokens
            num_layers = tools.group.layout.num_layers
            whole = LayerProgress(self.request_id, num_tokens, num_layers, None)
            self._write_ready(machine, link, seq, whole)
            if finished:  # after the write, which has the longer way
                self._spawn(self._send_first_token(machine, seq, step))

    def _num_layer_groups(self, grant: Claimed, link: Link) -> int:
        """In how many groups of layers the last chunk of the prompt goes."""
        tools, layout = self._tools, self._tools.group.layout
        if link.rates is None or not tools.transfer.stream_layers:
            return 1
        num_blocks = min(len(grant.fill), -(-tools.max_chunk_tokens // tools.block_size))
        return link.rates.num_groups(num_blocks, layout.block_bytes, layout.num_layers)

    async def _pull_prefix(self, seq: Sequence, grant: Claimed, link: Link) -> int:
        """Takes over what D has cached of the prompt if that is faster than computing it."""
        if not self._tools.transfer.pull_prefixes:
            return 0
        handoff = (self.ticket.handoff_id, self.ticket.attempt)
        num_tokens = await self._tools.puller.pull(seq, handoff, grant, link, self._tell)
        if num_tokens:
            self._timeline.mark("prefix_pulled")
        return num_tokens

    def _write_ready(
        self, machine: PrefillHandoff, link: Link, seq: Sequence, progress: LayerProgress
    ) -> None:
        """Posts what is complete by now: full blocks, and the tail at the end."""
        num_tokens, block_size = progress.num_computed_tokens, self._tools.block_size
        num_blocks = num_tokens // block_size
        if num_tokens == seq.num_given_tokens:
            num_blocks = len(machine.grant.cached_ordinals) + len(machine.grant.fill)
        longest_s = self._tools.group.longest_write_s
        for first_layer, ordinals in machine.ready(num_blocks, progress.num_layers).items():
            layers = range(first_layer, progress.num_layers)
            for write in machine.post(ordinals, layers, time.perf_counter(), longest_s):
                self._spawn(self._write(machine, link, seq, write, progress))

    async def _write(
        self,
        machine: PrefillHandoff,
        link: Link,
        seq: Sequence,
        write: PostedWrite,
        progress: LayerProgress,
    ) -> None:
        group = self._tools.group
        self._timeline.mark("first_write")
        local_blocks = [seq.block_table[ordinal] for ordinal in write.ordinals]
        try:
            order = WriteOrder(
                write.ranks,
                write.layers,
                list(zip(local_blocks, write.remote_blocks, strict=True)),
                lambda checksums: machine.landed_notice(write, checksums),
                layer_boundaries(group.layout.num_layers, seq.num_layer_groups),
                write.post_before,
                progress.event,
            )
            notice = await group.write(link, order)
        except TransferError as error:
            machine.failed(write, error.message)
            self._tools.metrics.write_failed()
        else:
            machine.completed(write, notice)
            share = len(write.layers) / group.layout.num_layers / len(link.rank_pairs)
            num_bytes = len(local_blocks) * share * group.layout.tp_size * group.layout.block_bytes
            self._tools.metrics.written(round(num_bytes))
            if not machine.pinned:
                self._timeline.mark("last_write")

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
            timeline_ms=self._timeline.since("claimed"),
        )
        try:
            await self._tell("first_token", encode(first))
        except TandemError as error:
            machine.stop(f"the first token was not delivered: {error.message}")

    def _nothing_written(self, reason: str) -> Settled:
        return Settled(self.ticket.handoff_id, self.ticket.attempt, 0, 0, reason, run=self._run)

    async def _settle(self, settled: Settled, notice: bytes | None = None) -> None:
        """Tells D that nothing of ours can land any more; by `notice` if D's server is away."""
        try:
            await self._tell("settled", encode(settled))
        except TandemError as error:
            logger.warning("handoff %s: not settled: %s", self.request_id, error)
            if notice is not None:
                with contextlib.suppress(TransferError):
                    await self._tools.group.notify(self.ticket.decode_instance, notice)

    async def _tell(self, endpoint: str, payload: bytes) -> bytes:
        context = RequestContext(timeout_s=SETTLE_TIMEOUT_S)
        async with context:
            return await self._tools.node.client.call(
                self.ticket.decode_address, endpoint, payload, context
            )

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)

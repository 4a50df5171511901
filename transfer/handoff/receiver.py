"""One handoff into the blocks of this process: drives its state machine, carries out its actions.

Runs on the event loop.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from tandem.runtime.errors import TransferError
from tandem.runtime.plane.server import Responder
from tandem.runtime.tasks import ends_within
from tandem.runtime.tracing.timeline import Timeline
from tandem.runtime.wire.cluster_messages import Instance
from tandem.runtime.wire.handoff_messages import (
    Claim,
    ClaimRefused,
    FirstToken,
    PrefixBlocks,
    PrefixRequest,
    Settled,
)
from tandem.runtime.wire.messages import encode
from tandem.transfer.handoff.actions import (
    Abort,
    Action,
    Admit,
    PrefillLocally,
    ReleaseQuarantined,
    Retract,
    Span,
    Verify,
)
from tandem.transfer.handoff.causes import CloseCause
from tandem.transfer.handoff.decode import UNCLAIMED, DecodeHandoff
from tandem.transfer.handoff.landed import Landed, SettledNotice
from tandem.transfer.layout import RankPair
from tandem.transfer.peers import is_dead, is_here, is_stopped

if TYPE_CHECKING:
    from tandem.transfer.handoff.server import HandoffServer

logger = logging.getLogger(__name__)

CLAIMANT_CHECK_INTERVAL_S = 0.25  # between looks at the claimant's process during a quarantine


class BlockOwner(Protocol):
    """The owner of the blocks that a handoff fills: what a handoff asks it and tells it."""

    def defers(self, prefill_instance: str) -> bool:
        """Return True if the ticket that this worker claims should be offered again later."""

    def on_claimed(self, claimant: Instance) -> None:
        """Handle the first claim, and each repeated one."""

    def on_mismatch(self, prefill_instance: str) -> None:
        """Handle a block that is not the one that was announced."""

    def on_admitted(self, first: FirstToken | None) -> None:
        """Decode the prompt: every block is proven."""

    def on_given_up(self, cause: CloseCause, detail: str, *, quarantined: bool) -> None:
        """Prefill locally. `quarantined`: writes may still land in the fill blocks."""

    def on_cancelled(self, *, quarantined: bool) -> None:
        """Drop the request. `quarantined`: writes may still land in the fill blocks."""

    def on_released(self, block_ids: list[int]) -> None:
        """Free quarantined blocks."""

    def on_ended(self) -> None:
        """Account for the end of the handoff, once."""


class HandoffReceiver:
    """One handoff of one request. After `ended`, only this process can write the blocks.

    `request_id` is for log lines.
    """

    def __init__(
        self,
        server: "HandoffServer",
        machine: DecodeHandoff,
        owner: BlockOwner,
        request_id: str,
        timeline: Timeline,
        cached_blocks: Mapping[int, int],
    ) -> None:
        self.request_id = request_id
        self.machine = machine
        self.owner = owner
        self.claim_over = asyncio.Event()  # nothing is sent on its stream any more
        self.ended = asyncio.Event()
        self._server = server
        self._group = server.group
        self._timeline = timeline
        self._cached_blocks = cached_blocks  # ordinal |-> block id; the claimant may READ them
        self._claimant: Instance | None = None  # as in discovery at the time of the claim
        self._claim_stream: Responder | None = None
        self._aio = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_finished = False
        self._expects = False  # KV that may still count: the transfer thread polls often for it

    @property
    def is_unclaimed(self) -> bool:
        """No prefill worker has claimed the ticket, and it has not been given up."""
        return self.machine.state in UNCLAIMED

    # ---- messages of prefill workers ----------------------------------------------------------

    def claim(self, claim: Claim, claimant: Instance, stream: Responder) -> bool:
        """Answer a claim on its stream; False if it was refused."""
        was_unclaimed = self.is_unclaimed
        is_afar = not is_here(claimant)
        answer = self.machine.claim(claim, time.perf_counter(), is_afar=is_afar)
        stream.send(encode(answer))
        if isinstance(answer, ClaimRefused):
            return False
        if was_unclaimed:
            self._expects = True
            self._group.expect(+1)
        self._timeline.mark("claimed")
        self.owner.on_claimed(claimant)
        self._claimant = claimant
        self._claim_stream = stream
        self._schedule_tick()
        return True

    def claim_stream_lost(self, claim: Claim, stream: Responder) -> None:
        """Give up if the claim's stream ended before the handoff did."""
        if self._claim_stream is stream:
            self._claim_stream = None
            self.claim_over.set()
            self.run(self.machine.peer_lost(claim.prefill_instance))

    def landed(self, notice: Landed, decode_rank: int) -> None:
        """Handle the notice of one complete write."""
        self.run(self.machine.landed(notice, time.perf_counter(), decode_rank))

    def settled(self, settled: Settled) -> None:
        """Handle the request plane's message that nothing can land any more."""
        self._timeline.merge(settled.timeline_ms, "claimed")
        self.run(self.machine.settled(settled, time.perf_counter()))

    def settled_notice(self, notice: SettledNotice) -> None:
        """Handle the transfer plane's message that nothing can land any more."""
        self.run(self.machine.settled_notice(notice))

    async def prefix_blocks(self, request: PrefixRequest) -> PrefixBlocks:
        """Return the cached blocks that the claimant wants to READ, and their checksums."""
        machine, group = self.machine, self._group
        is_known = self._cached_blocks.keys() >= set(request.ordinals)
        is_ours = machine.is_ours(request.handoff_id, request.attempt, request.secret)
        if not is_ours or not machine.is_live or not is_known:
            return PrefixBlocks()
        blocks = [(ordinal, self._cached_blocks[ordinal]) for ordinal in request.ordinals]
        layers = range(group.layout.num_layers)
        checksums = [
            await group.checksums(ranks, layers, [block for _, block in blocks])
            for ranks in group.layout.read_pairs_from(machine.claimant_tp_size)
        ]
        return PrefixBlocks(blocks, checksums)

    # ---- decisions of this worker -------------------------------------------------------------

    def cancel(self) -> None:
        """End the handoff of a request that is over."""
        self.run(self.machine.cancel())

    def unclaimed(self) -> None:
        """Give up a handoff that none has claimed in time."""
        self.give_up_unclaimed(CloseCause.UNCLAIMED, "no worker was free to claim it in time")

    def give_up_unclaimed(self, cause: CloseCause, detail: str) -> None:
        """Prefill locally if no prefill worker has claimed the ticket."""
        if self.is_unclaimed:
            self.run(self.machine.fail(cause, detail))

    def abandon(self) -> None:
        """Cancel and stop waiting for the end: the worker stops."""
        self.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._end()

    # ---- actions of the machine ---------------------------------------------------------------

    def run(self, actions: list[Action]) -> None:
        """Carry out the machine's actions."""
        if self.machine.all_landed:
            self._timeline.mark("landed")
        if self.machine.all_proven:
            self._timeline.mark("verified")
        for action in actions:
            match action:
                case Verify():
                    self._server.spawn(self._verify(action))
                case Admit(first):
                    self.owner.on_admitted(first)
                case Retract(_, message):  # the blocks are in quarantine
                    self._server.spawn(self._watch_claimant())
                    if self._claim_stream is not None:
                        self._claim_stream.send(encode(message))
                case PrefillLocally(cause, detail, quarantined):
                    self.owner.on_given_up(cause, detail, quarantined=quarantined)
                case Abort(quarantined):
                    self.owner.on_cancelled(quarantined=quarantined)
                case ReleaseQuarantined(block_ids):
                    self.owner.on_released(list(block_ids))
        if self._expects and not self.machine.is_live:
            self._expects = False
            self._group.expect(-1)
        self._schedule_tick()

    async def _verify(self, verify: Verify) -> None:
        """Compare checksums; a prefill worker with wrong KV is counted, named and excluded."""
        span, machine = verify.span, self.machine
        blocks = [block_id for _, block_id, _ in verify.blocks]
        try:
            found = await self._group.checksums(self._ranks_of(span), span.layers, blocks)
        except TransferError as error:
            self.run(machine.fail(CloseCause.FAILED, error.message))
            return
        actions: list[Action] = []
        for (ordinal, _, announced), checksum in zip(verify.blocks, found, strict=True):
            if machine.is_live and announced != checksum:
                self._note_mismatch(span, ordinal)
            actions += machine.verified(span, ordinal, announced == checksum)
        self.run(actions)

    def _ranks_of(self, span: Span) -> RankPair:
        return next(
            ranks
            for ranks in self._group.layout.rank_pairs_from(self.machine.claimant_tp_size)
            if (ranks.prefill_rank, ranks.decode_rank) == (span.prefill_rank, span.decode_rank)
        )

    def _note_mismatch(self, span: Span, ordinal: int) -> None:
        claimant = self.machine.claimant
        assert claimant is not None
        self.owner.on_mismatch(claimant[0])
        logger.error(
            "request %s: block %d (%s) from %s does not match its announced checksum",
            self.request_id,
            ordinal,
            span,
            ".".join(claimant),
        )
        if self._server.health.failed(claimant, time.perf_counter()):
            logger.error("prefill worker %s is excluded: its KV is corrupt", claimant[0])

    async def _watch_claimant(self) -> None:
        """End a quarantine early if the claimant is dead; prolong it while a rank is stopped."""
        machine, claimant = self.machine, self._claimant
        if claimant is None or not is_here(claimant):
            return  # nothing can be seen of it
        while not self.ended.is_set():
            if is_dead(claimant):
                self.run(machine.peer_gone(claimant.instance_id, claimant.epoch))
                return
            if is_stopped(claimant):
                machine.claimant_stopped(time.perf_counter())
                self._schedule_tick()
            await ends_within(self.ended.wait(), CLAIMANT_CHECK_INTERVAL_S)

    # ---- time ---------------------------------------------------------------------------------

    def _schedule_tick(self) -> None:
        """Set the timer for the machine's next tick, or finish if the handoff has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.machine.may_reuse_blocks:
            self._finish()
            return
        next_tick = self.machine.next_tick
        assert next_tick is not None
        delay_s = max(0.0, next_tick - time.perf_counter()) + 1e-3
        self._timer = self._aio.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = time.perf_counter()
        if self._claimant is not None and is_stopped(self._claimant):
            self.machine.claimant_stopped(now)
        self.run(self.machine.tick(now))

    def _finish(self) -> None:
        """Account for the end of the handoff, once."""
        if self._is_finished:
            return
        self._is_finished = True
        self._end()
        self._server.remove(self)
        self.owner.on_ended()

    def _end(self) -> None:
        self.ended.set()
        self.claim_over.set()

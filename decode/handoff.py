"""One handoff on a decode worker: drives its state machine and carries out its actions.

Runs on the event loop. Commands for the engine are posted in order, so everything that a handoff
decides about its blocks happens before anything that follows from the decision.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass

from tandem.decode.admission import Decision, PlacementCause
from tandem.decode.config import DisaggConfig
from tandem.decode.metrics import DecodeMetrics
from tandem.decode.peers import PeerHealth, is_dead, is_stopped
from tandem.decode.requests import ActiveRequest
from tandem.decode.transfer_cost import TransferCost
from tandem.engine.engine import Engine
from tandem.engine.loop import EngineLoop
from tandem.engine.outputs import SequenceOutput
from tandem.engine.step.sampler import SampledToken
from tandem.runtime.errors import InternalError, NotFoundError, TransferError
from tandem.runtime.messages import (
    Claim,
    ClaimRefused,
    FirstToken,
    Instance,
    PrefixBlocks,
    PrefixRequest,
    Settled,
    encode,
)
from tandem.runtime.plane.server import Responder
from tandem.runtime.printable import short
from tandem.transfer.group import TransferGroup
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
from tandem.transfer.handoff.decode import DecodeHandoff, HandoffState
from tandem.transfer.handoff.landed import Landed, SettledNotice
from tandem.transfer.layout import RankPair
from tandem.worker.worker import OwnPrompts

logger = logging.getLogger(__name__)

CLAIMANT_CHECK_INTERVAL_S = 0.25  # between looks at the claimant's process during a quarantine
_UNCLAIMED = (HandoffState.ALLOCATED, HandoffState.QUEUED)
_ENDED = (HandoffState.ADMITTED, HandoffState.CLOSED)


@dataclass(frozen=True, slots=True)
class HandoffTools:
    """The parts of a decode worker that all of its handoffs use."""

    group: TransferGroup
    loop: EngineLoop
    metrics: DecodeMetrics
    health: PeerHealth
    transfer_cost: TransferCost
    thresholds: Callable[[], DisaggConfig]
    prefill_instances: Mapping[str, Instance]
    spawn: Callable[[Coroutine[None, None, None]], None]
    on_ended: Callable[["RemotePrefill"], None]
    own_prompts: OwnPrompts


class RemotePrefill:
    """One handoff of one request. After `ended`, only this worker can write the blocks."""

    def __init__(
        self,
        tools: HandoffTools,
        active: ActiveRequest,
        machine: DecodeHandoff,
        num_uncached_tokens: int,
        cached_blocks: dict[int, int],
    ) -> None:
        self.active = active
        self.machine = machine
        self.num_uncached_tokens = num_uncached_tokens
        self.num_pending_tokens = num_uncached_tokens  # 0 once computed
        self.ended = asyncio.Event()
        self._tools = tools
        self._cached_blocks = cached_blocks  # ordinal |-> block id; the claimant may READ them
        self._claimant: Instance | None = None  # as in discovery at the time of the claim
        self._claim_stream: Responder | None = None
        self._first_was_sent = False
        self._aio = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_finished = False

    @property
    def is_unclaimed(self) -> bool:
        """No prefill worker has claimed the ticket, and it has not been given up."""
        return self.machine.state in _UNCLAIMED

    # ---- messages of prefill workers ----------------------------------------------------------

    def claim(self, claim: Claim, stream: Responder) -> bool:
        """Answer a claim on its stream; False if it was refused."""
        now, was_unclaimed = time.perf_counter(), self.is_unclaimed
        if self._tools.health.is_excluded((claim.prefill_instance, claim.prefill_epoch), now):
            stream.send(encode(ClaimRefused("excluded")))
            return False
        claimant = self._tools.prefill_instances.get(claim.prefill_instance)
        if claimant is None or claimant.epoch != claim.prefill_epoch:
            logger.warning("refused a claim of %s: not registered", short(claim.prefill_instance))
            stream.send(encode(ClaimRefused("unregistered")))
            return False
        answer = self.machine.claim(claim, now)
        stream.send(encode(answer))
        if isinstance(answer, ClaimRefused):
            return False
        if was_unclaimed:
            self._tools.group.expect(+1)
            self.active.timeline.mark("claimed")
        self.active.prefill_instance = claim.prefill_instance
        self._claimant = claimant
        self._claim_stream = stream
        self._schedule_tick()
        return True

    def claim_stream_lost(self, claim: Claim, stream: Responder) -> None:
        """Give up if the claim's stream ended before the handoff did."""
        if self._claim_stream is stream:
            self._claim_stream = None
            self.run(self.machine.peer_lost(claim.prefill_instance))

    def landed(self, notice: Landed, decode_rank: int) -> None:
        """Handle the notice of one complete write."""
        self.run(self.machine.landed(notice, time.perf_counter(), decode_rank))

    def first_token(self, first: FirstToken) -> None:
        """Handle the prompt's first token, which may come before its KV."""
        actions = self.machine.first_token(first)
        if self.machine.first is first:
            self._tools.group.expect(0)
            self.active.timeline.merge(first.timeline_ms, "claimed")
            self._send_first(first)
        self.run(actions)

    def settled(self, settled: Settled) -> None:
        """Handle the request plane's message that nothing can land any more."""
        self.active.timeline.merge(settled.timeline_ms, "claimed")
        self.run(self.machine.settled(settled, time.perf_counter()))

    def settled_notice(self, notice: SettledNotice) -> None:
        """Handle the transfer plane's message that nothing can land any more."""
        self.run(self.machine.settled_notice(notice))

    async def prefix_blocks(self, request: PrefixRequest) -> PrefixBlocks:
        """Return the cached blocks that the claimant wants to READ, and their checksums."""
        machine, group = self.machine, self._tools.group
        is_known = self._cached_blocks.keys() >= set(request.ordinals)
        is_ours = machine.is_ours(request.handoff_id, request.attempt, request.secret)
        if not is_ours or not machine.is_live or not is_known:
            return PrefixBlocks()
        blocks = [(ordinal, self._cached_blocks[ordinal]) for ordinal in request.ordinals]
        layers = range(group.layout.num_layers)
        checksums = [
            await group.checksums(ranks, layers, [block for _, block in blocks])
            for ranks in group.rank_pairs_from(machine.claimant_tp_size)
        ]
        return PrefixBlocks(blocks, checksums)

    # ---- decisions of this worker -------------------------------------------------------------

    def cancel(self) -> None:
        """End the handoff of a request that is over."""
        self.run(self.machine.cancel())

    def give_up_unclaimed(self, cause: CloseCause, detail: str) -> None:
        """Prefill locally if no prefill worker has claimed the ticket."""
        if self.is_unclaimed:
            self.run(self.machine.fail(cause, detail))

    def abandon(self) -> None:
        """Cancel and stop waiting for the end: the worker stops."""
        self.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self.ended.set()

    # ---- actions of the machine ---------------------------------------------------------------

    def run(self, actions: list[Action]) -> None:
        """Carry out the machine's actions."""
        if self.machine.all_landed:
            self.active.timeline.mark("landed")
        if self.machine.all_proven:
            self.active.timeline.mark("verified")
        for action in actions:
            match action:
                case Verify():
                    self._tools.spawn(self._verify(action))
                case Admit(first):
                    self._admit(first)
                case Retract(_, message):  # the blocks are in quarantine
                    self._tools.spawn(self._watch_claimant())
                    if self._claim_stream is not None:
                        self._claim_stream.send(encode(message))
                case PrefillLocally(cause, detail, quarantined):
                    self._prefill_locally(cause, detail, quarantined=quarantined)
                case Abort(quarantined):
                    self._abort(quarantined=quarantined)
                case ReleaseQuarantined(block_ids):
                    self._release_quarantined(list(block_ids))
        self._schedule_tick()

    async def _verify(self, verify: Verify) -> None:
        """Compare checksums; a prefill worker with wrong KV is counted, named and excluded."""
        span, machine = verify.span, self.machine
        blocks = [block_id for _, block_id, _ in verify.blocks]
        try:
            found = await self._tools.group.checksums(self._ranks_of(span), span.layers, blocks)
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
            for ranks in self._tools.group.rank_pairs_from(self.machine.claimant_tp_size)
            if (ranks.prefill_rank, ranks.decode_rank) == (span.prefill_rank, span.decode_rank)
        )

    def _note_mismatch(self, span: Span, ordinal: int) -> None:
        claimant = self.machine.claimant
        assert claimant is not None
        self._tools.metrics.mismatched(claimant[0])
        logger.error(
            "request %s: block %d (%s) from %s does not match its announced checksum",
            self.active.request.request_id,
            ordinal,
            span,
            ".".join(claimant),
        )
        if self._tools.health.failed(claimant, time.perf_counter()):
            logger.error("prefill worker %s is excluded: its KV is corrupt", claimant[0])

    async def _watch_claimant(self) -> None:
        """End a quarantine early if the claimant is dead; prolong it while it is stopped."""
        machine, claimant = self.machine, self._claimant
        while claimant is not None and not self.ended.is_set():
            if is_dead(claimant):
                self.run(machine.peer_gone(claimant.instance_id, claimant.epoch))
                return
            if is_stopped(claimant):
                machine.claimant_stopped(time.perf_counter())
                self._schedule_tick()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLAIMANT_CHECK_INTERVAL_S):
                    await self.ended.wait()

    # ---- outcomes: the client gets each token once, wherever its prompt was computed ----------

    def _send_first(self, first: FirstToken) -> None:
        """Send the first token before its KV has landed, unless it is no part of the answer."""
        active = self.active
        if (
            active.seq.finish_reason_after(first.token_id) == "stop"
            or not active.seq.stop.max_tokens
        ):
            return
        self._first_was_sent = True
        logprobs = None if first.logprobs is None else [first.logprobs]
        active.send([first.token_id], logprobs)

    def _admit(self, first: FirstToken) -> None:
        self._tools.transfer_cost.observe(self.num_uncached_tokens, self.active.timeline.ms())
        self._tools.metrics.handoff_admitted()
        self.active.span.end_handoff()
        request_id = self.active.request.request_id
        token = SampledToken(first.token_id, first.logprobs)
        self._on_engine(lambda engine: engine.admit(request_id, token))

    def _prefill_locally(self, cause: CloseCause, detail: str, *, quarantined: bool) -> None:
        """Compute the prompt here; a first token that the client has is kept."""
        active, first = self.active, self.machine.first
        request_id = active.request.request_id
        logger.warning("request %s: prefilled locally (%s): %s", request_id, cause, detail)
        self._tools.metrics.handoff_closed(cause)
        active.span.end_handoff(cause)
        self._tools.own_prompts.add(request_id)
        token = None
        if self._first_was_sent and first is not None:
            token = SampledToken(first.token_id, first.logprobs)
        elif not active.reported:
            active.decision = Decision("local", PlacementCause.FALLBACK, detail=detail)
            active.prefill_instance = None
        self._on_engine(
            lambda engine: engine.prefill_locally(request_id, quarantined=quarantined, first=token)
        )

    def _abort(self, *, quarantined: bool) -> None:
        request_id = self.active.request.request_id
        self._tools.metrics.handoff_closed(CloseCause.CANCELLED)
        self._tools.loop.post(lambda engine: engine.abort(request_id, quarantined=quarantined))

    def _release_quarantined(self, block_ids: list[int]) -> None:
        self._tools.loop.post(lambda engine: engine.release_quarantined(block_ids))

    def _on_engine(self, act: Callable[[Engine], SequenceOutput | None]) -> None:
        """Run `act` on the engine thread, and emit its output."""

        def run(engine: Engine) -> None:
            try:
                output = act(engine)
            except NotFoundError:
                return  # cancelled meanwhile
            except Exception:
                lost = InternalError("the engine could not take over the prompt")
                self._aio.call_soon_threadsafe(self.active.fail, lost)
                raise
            if output is not None:
                self._aio.call_soon_threadsafe(self._emit_joined, output)

        self._tools.loop.post(run)

    def _emit_joined(self, output: SequenceOutput) -> None:
        """Emit the engine's output of the first token, without the token if it was sent before."""
        if not self._first_was_sent:
            self.active.emit(output)
        elif output.finish_reason is not None:
            self.active.send([], None, output.finish_reason, output.stop_token_id)

    # ---- time ---------------------------------------------------------------------------------

    def _schedule_tick(self) -> None:
        """Set the timer for the machine's next tick, or finish if the handoff has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.machine.state in _ENDED:
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
        if self.machine.claimant is not None:
            self._tools.group.expect(-1)
        for cause, count in self.machine.dropped.items():
            self._tools.metrics.dropped(cause, count)
        self.ended.set()
        self._tools.on_ended(self)

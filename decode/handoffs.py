"""The handoffs of a decode worker with Tandem's engine: their tickets, and their outcomes.

Runs on the event loop. Commands for the engine are posted in order, so everything that a handoff
decides about its blocks happens before anything that follows from the decision.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from functools import partial

from tandem.decode.admission import (
    LOOK_AGAIN_S,
    MAX_WAYS_GIVEN,
    SOONER_HERE,
    decide_again,
    given_up,
    gives_way,
    may_wait_s,
    with_targets,
)
from tandem.decode.config import DisaggConfig, Policy
from tandem.decode.decision import Decision
from tandem.decode.metrics import DecodeMetrics
from tandem.decode.prefill_view import PrefillView
from tandem.decode.requests import ActiveRequest
from tandem.decode.thresholds import LiveThresholds
from tandem.engine.core.engine import Engine
from tandem.engine.schedule.outputs import LoadStats, Reservation, SequenceOutput
from tandem.engine.step.outcome import SampledToken
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import InternalError, InvalidRequestError, NotFoundError
from tandem.runtime.plane.server import RequestServer, Responder
from tandem.runtime.wire.cluster_messages import Instance
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.handoff_messages import Ack, Claimed, FirstToken, PrefillJob
from tandem.runtime.wire.messages import encode, pack_tokens
from tandem.runtime.wire.request_bounds import check_token_id
from tandem.transfer.handoff.causes import CloseCause
from tandem.transfer.handoff.server import HandoffServer
from tandem.worker.worker import Worker

logger = logging.getLogger(__name__)

_decode_first = decoder(FirstToken, InvalidRequestError)


class RemotePrefills:
    """The open handoffs of a decode worker: a `TicketOwner`."""

    def __init__(
        self,
        worker: Worker,
        server: HandoffServer,
        view: PrefillView,
        thresholds: LiveThresholds,
        metrics: DecodeMetrics,
    ) -> None:
        self.server, self.view = server, view
        self.thresholds, self.metrics = thresholds, metrics
        self.loop, self.own_prompts = worker.loop, worker.own_prompts
        self._vocab_size = worker.engine.runner.model_config.vocab_size
        self._open: dict[str, RemotePrefill] = {}  # by handoff id, in hex

    def start(self, active: ActiveRequest, reservation: Reservation) -> None:
        """Offer the prompt of `active`, whose blocks are reserved, to the prefill workers."""
        remote = RemotePrefill(self, active, reservation)
        self._open[active.handoff_id] = remote
        self.own_prompts.discard(active.request.request_id)
        if active.done.done():
            remote.handoff.cancel()
        else:
            remote.offer()

    def cancel(self, active: ActiveRequest) -> None:
        """End the handoff of a request that is over, if it has one."""
        if (remote := self._open.get(active.handoff_id)) is not None:
            remote.handoff.cancel()

    def remove(self, active: ActiveRequest) -> None:
        """Remove a handoff that has ended."""
        del self._open[active.handoff_id]

    # ---- the prefill role of this worker ------------------------------------------------------

    def leaves_tickets(self, load: LoadStats) -> bool:
        return self.view.leaves_tickets(load)

    def take_back(self, job: PrefillJob) -> bool:
        remote = self._open.get(job.handoff_id.hex())
        if remote is None or not remote.handoff.is_unclaimed:
            return True
        policy = self.thresholds.current.policy
        if remote.active.request.prefill_place == "remote" or policy is Policy.ALWAYS_REMOTE:
            return False
        reason = "this worker was the first to have room"
        remote.handoff.give_up_unclaimed(CloseCause.TAKEN_BACK, reason)
        return True

    # ---- messages of prefill workers ----------------------------------------------------------

    def register(self, server: RequestServer) -> None:
        """Serve the handoff endpoints."""
        self.server.register(server)
        server.register("first_token", self._on_first_token)

    def on_notification(self, rank: int, data: bytes) -> None:
        self.server.on_notification(rank, data)

    async def _on_first_token(
        self, payload: bytes, context: RequestContext, answer: Responder
    ) -> None:
        first = _decode_first(payload)
        check_token_id(first.token_id, self._vocab_size)
        if (remote := self._open.get(first.handoff_id.hex())) is not None:
            remote.first_token(first)
        answer.send(encode(Ack()))


class RemotePrefill:
    """One prompt that another worker may compute: the `BlockOwner` of its handoff."""

    def __init__(
        self, remotes: RemotePrefills, active: ActiveRequest, reservation: Reservation
    ) -> None:
        self.active = active
        self._remotes = remotes
        self._num_uncached_tokens = active.seq.num_given_tokens - reservation.num_cached_tokens
        self._is_taken = False  # claimed, or given up
        self._num_ways_given = 0  # to other tickets, as its target of the first token is lost
        self._first_was_sent = False
        self._held: asyncio.TimerHandle | None = None  # a first token that waits for its KV
        self._aio = asyncio.get_running_loop()
        table = active.seq.block_table
        self.handoff = remotes.server.open(
            self,
            self._grant(reservation),
            active.request.request_id,
            active.timeline,
            cached_blocks={ordinal: table[ordinal] for ordinal in reservation.cached_ordinals},
        )
        active.num_cached_tokens = reservation.num_cached_tokens
        active.handoff_id = self.handoff.machine.handoff_id.hex()

    # ---- from a reservation to a ticket -------------------------------------------------------

    def _grant(self, reservation: Reservation) -> Claimed:
        request = self.active.request
        config = self._remotes.thresholds.current
        return Claimed(
            secret=secrets.token_bytes(16),
            lease_ms=config.handoff_timeout_of(self._num_uncached_tokens),
            token_ids=pack_tokens(self.active.seq.token_ids),
            sampling=request.sampling,
            stop=request.stop,
            fill=reservation.fill,
            cached_ordinals=reservation.cached_ordinals,
            cache_salt=request.cache_salt,
            num_generated=request.num_generated,
            grammar=request.grammar,
        )

    def offer(self) -> None:
        """Publish the ticket, and give it up when none has claimed it in time."""
        self._remotes.server.spawn(self._publish_ticket())

    async def _publish_ticket(self) -> None:
        active, num_tokens = self.active, self.active.seq.num_given_tokens
        assert active.decision is not None
        trace = active.span.begin_handoff()
        server, num_uncached = self._remotes.server, self._num_uncached_tokens
        if await server.publish(self.handoff, num_tokens, num_uncached, trace):
            active.timeline.mark("queued")
            # Not before: until it is on the queue no worker can claim it
            config = self._remotes.thresholds.current
            timeout_ms = active.decision.claim_timeout_ms or config.claim_timeout_ms
            self._aio.call_later(timeout_ms / 1e3, self._unclaimed)

    def _unclaimed(self) -> None:
        """End the wait of a ticket, unless another worker is still predicted to be better."""
        if not self.handoff.is_unclaimed:
            return
        if not self._is_predicted:
            self.handoff.unclaimed()
            return

        def look(engine: Engine) -> None:
            self._aio.call_soon_threadsafe(end_look, self._decided_again(engine))

        def end_look(decision: Decision) -> None:
            if not decision.is_predicted:
                self.handoff.unclaimed()
            elif decision.place == "remote":
                self._aio.call_later(LOOK_AGAIN_S, self._unclaimed)
            else:
                self.handoff.give_up_unclaimed(CloseCause.TAKEN_BACK, SOONER_HERE)

        self._remotes.loop.post(look)

    def _decided_again(self, engine: Engine) -> Decision:
        """Return the place of the prompt as of now. On the engine thread.

        A worker that has been silent for as long as `claim_timeout_ms` is none.
        """
        active, config = self.active, self._config
        return decide_again(
            config,
            self._num_uncached_tokens,
            self._remotes.view.side(
                engine, active.seq, longest_silence_s=config.claim_timeout_ms / 1e3
            ),
            num_cached_tokens=active.num_cached_tokens,
            waited_ms=active.timeline.elapsed_s() * 1e3,
        )

    @property
    def _is_predicted(self) -> bool:
        return self.active.decision is not None and self.active.decision.is_predicted

    @property
    def _config(self) -> DisaggConfig:
        return with_targets(self._remotes.thresholds.current, self.active.request.targets)

    def _taken(self) -> None:
        if not self._is_taken:
            self._is_taken = True
            self._remotes.view.taken(self._num_uncached_tokens)

    # ---- claims, and the first token ----------------------------------------------------------

    def defers(self, prefill_instance: str) -> bool:
        """Return True if other tickets should be computed first, a limited number of times."""
        view = self._remotes.view
        if not self._is_predicted or self._num_ways_given == MAX_WAYS_GIVEN:
            return False
        place = view.place_of(prefill_instance)
        if place is None or view.queue_depth.num_jobs == 0:
            return False
        waited_ms = self.active.timeline.elapsed_s() * 1e3
        is_late = gives_way(self._config, place, self._num_uncached_tokens, waited_ms)
        self._num_ways_given += is_late
        return is_late

    def on_claimed(self, claimant: Instance) -> None:
        self.active.prefill_instance = claimant.instance_id
        self._taken()

    def first_token(self, first: FirstToken) -> None:
        """Handle the prompt's first token, which may come before its KV."""
        actions = self.handoff.machine.first_token(first)
        if self.handoff.machine.first is first:
            self._remotes.server.group.expect(0)
            self.active.timeline.merge(first.timeline_ms, "claimed")
            self._hold(first)
        self.handoff.run(actions)

    # ---- outcomes: the client gets each token once, wherever its prompt was computed ----------

    def _hold(self, first: FirstToken) -> None:
        """Send the first token, now or when its answer goes on, unless it is no part of it."""
        active = self.active
        finish_reason = active.seq.finish_reason_after(first.token_id)
        if finish_reason == "stop" or not active.seq.stop.max_tokens:
            return
        assert active.decision is not None
        wait_s = may_wait_s(active.decision, active.timeline.elapsed_s())
        if wait_s > 0 and finish_reason is None and not active.request.num_generated:
            self._held = self._aio.call_later(wait_s, self._send_first, first)
        else:
            self._send_first(first)

    def _release_held(self) -> None:
        """Leave a first token that still waits to the engine's output."""
        if self._held is not None:
            self._held.cancel()

    def _send_first(self, first: FirstToken) -> None:
        active = self.active
        self._first_was_sent = True
        logprobs = None if first.logprobs is None else [first.logprobs]
        active.send([first.token_id], logprobs)

    def on_mismatch(self, prefill_instance: str) -> None:
        self._remotes.metrics.mismatched(prefill_instance)

    def on_ended(self) -> None:
        for cause, count in self.handoff.machine.dropped.items():
            self._remotes.metrics.dropped(cause, count)
        self._remotes.remove(self.active)
        self._taken()

    def on_admitted(self, first: FirstToken | None) -> None:
        assert first is not None, "the machine awaits the first token"
        is_held = self._held is not None and not self._first_was_sent
        self._release_held()
        self._remotes.view.transfer_cost.observe(
            self._num_uncached_tokens, self.active.timeline.ms()
        )
        self._remotes.metrics.handoff_admitted()
        self.active.span.end_handoff()
        request_id = self.active.request.request_id
        token = SampledToken(first.token_id, first.logprobs)
        self._on_engine(lambda engine: engine.admit(request_id, token), is_held=is_held)

    def on_given_up(self, cause: CloseCause, detail: str, *, quarantined: bool) -> None:
        """Compute the prompt here; a first token that the client has is kept."""
        self._release_held()
        active, first = self.active, self.handoff.machine.first
        request_id = active.request.request_id
        logger.warning("request %s: prefilled locally (%s): %s", request_id, cause, detail)
        self._remotes.metrics.handoff_closed(cause)
        active.span.end_handoff(cause)
        self._remotes.own_prompts.add(request_id, self._num_uncached_tokens)
        token = None
        if self._first_was_sent and first is not None:
            token = SampledToken(first.token_id, first.logprobs)
        active.place_again(given_up(detail))
        self._on_engine(
            lambda engine: engine.prefill_locally(request_id, quarantined=quarantined, first=token)
        )

    def on_cancelled(self, *, quarantined: bool) -> None:
        self._release_held()
        request_id = self.active.request.request_id
        self._remotes.metrics.handoff_closed(CloseCause.CANCELLED)
        self._remotes.loop.post(lambda engine: engine.abort(request_id, quarantined=quarantined))

    def on_released(self, block_ids: list[int]) -> None:
        self._remotes.loop.post(lambda engine: engine.release_quarantined(block_ids))

    def _on_engine(
        self, act: Callable[[Engine], SequenceOutput | None], *, is_held: bool = False
    ) -> None:
        """Run `act` on the engine thread, and emit its output.

        Where `is_held`, a step before the next token at most, and not in the step before that one.
        """

        def run(engine: Engine) -> None:
            try:
                output = act(engine)
            except NotFoundError:
                return  # cancelled meanwhile
            except Exception:
                lost = InternalError("the engine could not take over the prompt")
                self._aio.call_soon_threadsafe(self.active.fail, lost)
                raise
            if output is None:
                return
            emit = partial(self._emit_joined, output)
            if is_held and output.finish_reason is None:
                self._remotes.loop.after_launched(emit)
            else:
                self._aio.call_soon_threadsafe(emit)

        self._remotes.loop.post(run)

    def _emit_joined(self, output: SequenceOutput) -> None:
        """Emit the engine's output of the first token, without the token if it was sent before."""
        if not self._first_was_sent:
            self.active.emit(output)
        elif output.finish_reason is not None:
            self.active.send([], None, output.finish_reason, output.stop_token_id)

"""One handoff on a decode worker with Tandem's engine: its outcomes for the engine and the client.

Runs on the event loop. Commands for the engine are posted in order, so everything that a handoff
decides about its blocks happens before anything that follows from the decision.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from tandem.decode.admission import given_up, may_wait_s
from tandem.decode.metrics import DecodeMetrics
from tandem.decode.requests import ActiveRequest
from tandem.decode.transfer_cost import TransferCost
from tandem.engine.core.engine import Engine
from tandem.engine.core.loop import EngineLoop
from tandem.engine.schedule.outputs import SequenceOutput
from tandem.engine.step.sampler import SampledToken
from tandem.runtime.errors import InternalError, NotFoundError
from tandem.runtime.wire.handoff_messages import FirstToken, Settled
from tandem.transfer.handoff.causes import CloseCause
from tandem.transfer.handoff.decode import DecodeHandoff
from tandem.transfer.handoff.receiver import HandoffReceiver, ReceiverTools
from tandem.worker.load_reports import OwnPrompts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HandoffTools(ReceiverTools):
    """The parts of a decode worker that all of its handoffs use."""

    loop: EngineLoop
    metrics: DecodeMetrics
    transfer_cost: TransferCost
    taken: Callable[["RemotePrefill"], None]  # claimed, or given up
    remove: Callable[["RemotePrefill"], None]  # from the open handoffs
    own_prompts: OwnPrompts


class RemotePrefill(HandoffReceiver):
    """One handoff of one request. After `ended`, only this worker can write the blocks."""

    _tools: HandoffTools

    def __init__(
        self,
        tools: HandoffTools,
        active: ActiveRequest,
        machine: DecodeHandoff,
        num_uncached_tokens: int,
        cached_blocks: dict[int, int],
    ) -> None:
        super().__init__(tools, active.request.request_id, machine, cached_blocks)
        self.active = active
        self.num_uncached_tokens = num_uncached_tokens
        self.num_unclaimed_tokens = num_uncached_tokens  # 0 once claimed
        self.num_ways_given = 0  # to other tickets, as its target of the first token is lost
        self._first_was_sent = False
        self._held: asyncio.TimerHandle | None = None  # a first token that waits for its KV

    def first_token(self, first: FirstToken) -> None:
        """Handle the prompt's first token, which may come before its KV."""
        actions = self.machine.first_token(first)
        if self.machine.first is first:
            self._tools.group.expect(0)
            self.active.timeline.merge(first.timeline_ms, "claimed")
            self._hold(first)
        self.run(actions)

    def settled(self, settled: Settled) -> None:
        self.active.timeline.merge(settled.timeline_ms, "claimed")
        super().settled(settled)

    def on_progress(self) -> None:
        if self.machine.all_landed:
            self.active.timeline.mark("landed")
        if self.machine.all_proven:
            self.active.timeline.mark("verified")

    def on_claimed(self, prefill_instance: str) -> None:
        self.active.timeline.mark("claimed")
        self.active.prefill_instance = prefill_instance
        self._tools.taken(self)

    def on_mismatch(self, prefill_instance: str) -> None:
        self._tools.metrics.mismatched(prefill_instance)

    def on_ended(self) -> None:
        for cause, count in self.machine.dropped.items():
            self._tools.metrics.dropped(cause, count)
        self._tools.remove(self)

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

    def on_admitted(self, first: FirstToken | None) -> None:
        assert first is not None, "the machine awaits the first token"
        self._release_held()
        self._tools.transfer_cost.observe(self.num_uncached_tokens, self.active.timeline.ms())
        self._tools.metrics.handoff_admitted()
        self.active.span.end_handoff()
        request_id = self.request_id
        token = SampledToken(first.token_id, first.logprobs)
        self._on_engine(lambda engine: engine.admit(request_id, token))

    def on_given_up(self, cause: CloseCause, detail: str, *, quarantined: bool) -> None:
        """Compute the prompt here; a first token that the client has is kept."""
        self._release_held()
        active, first, request_id = self.active, self.machine.first, self.request_id
        logger.warning("request %s: prefilled locally (%s): %s", request_id, cause, detail)
        self._tools.metrics.handoff_closed(cause)
        active.span.end_handoff(cause)
        self._tools.own_prompts.add(request_id, self.num_uncached_tokens)
        token = None
        if self._first_was_sent and first is not None:
            token = SampledToken(first.token_id, first.logprobs)
        active.place_again(given_up(detail))
        self._on_engine(
            lambda engine: engine.prefill_locally(request_id, quarantined=quarantined, first=token)
        )

    def on_cancelled(self, *, quarantined: bool) -> None:
        self._release_held()
        request_id = self.request_id
        self._tools.metrics.handoff_closed(CloseCause.CANCELLED)
        self._tools.loop.post(lambda engine: engine.abort(request_id, quarantined=quarantined))

    def on_released(self, block_ids: list[int]) -> None:
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

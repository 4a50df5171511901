"""How the course of a handoff reaches its client and the engine."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.decode.admission import Decision, PrefillRate
from tandem.decode.config import DisaggConfig
from tandem.decode.metrics import DecodeMetrics
from tandem.decode.requests import ActiveRequest
from tandem.engine.engine import Engine
from tandem.engine.loop import EngineLoop
from tandem.engine.outputs import SequenceOutput
from tandem.engine.step.sampler import SampledToken
from tandem.runtime.errors import InternalError, NotFoundError
from tandem.runtime.messages import FirstToken, Instance
from tandem.runtime.plane.server import Responder
from tandem.transfer.handoff.decode import DecodeHandoff

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RemotePrefill:
    """One handoff with what it belongs to. `ended`: its blocks are ours alone again."""

    active: ActiveRequest
    machine: DecodeHandoff
    num_uncached_tokens: int
    cached_blocks: list[int]  # of the leading ordinals, which a prefill worker may READ
    claimant: Instance | None = None  # as etcd knew it when it claimed
    claim_stream: Responder | None = None
    first_was_sent: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None


class HandoffOutcomes:
    """The client sees each token once, whichever way its prompt was computed in the end."""

    def __init__(
        self,
        loop: EngineLoop,
        thresholds: Callable[[], DisaggConfig],
        metrics: DecodeMetrics,
        rate: PrefillRate,
    ) -> None:
        self._loop = loop
        self._thresholds = thresholds
        self._metrics = metrics
        self._rate = rate
        self._aio = asyncio.get_running_loop()

    def emit_first(self, remote: RemotePrefill, first: FirstToken) -> None:
        """The client gets its first token before the KV has landed, unless it ends the answer."""
        active = remote.active
        if active.seq.finish_reason_after(first.token_id) == "stop":
            return
        remote.first_was_sent = True
        logprobs = None if first.logprobs is None else [first.logprobs]
        active.send([first.token_id], logprobs)

    def admit(self, remote: RemotePrefill, first: FirstToken) -> None:
        """The prompt's KV is here and proven."""
        active = remote.active
        self._observe(remote)
        self._metrics.handoff_ended("admitted")
        request_id, token = active.request.request_id, SampledToken(first.token_id, first.logprobs)
        self._on_engine(remote, lambda engine: engine.admit(request_id, token))

    def prefill_locally(self, remote: RemotePrefill, reason: str, *, quarantined: bool) -> None:
        """The handoff was given up; a first token that the client has is kept."""
        active = remote.active
        request_id = active.request.request_id
        logger.warning("request %s: prefilled locally: %s", request_id, reason)
        self._observe(remote)
        self._metrics.handoff_ended(_end_of(reason))
        first = remote.machine.first
        token = None
        if remote.first_was_sent and first is not None:
            token = SampledToken(first.token_id, first.logprobs)
        elif not active.reported:
            active.decision = Decision("local", "fallback", f"remote failed: {reason}")
            active.prefill_instance = None
        self._on_engine(
            remote,
            lambda engine: engine.prefill_locally(request_id, quarantined=quarantined, first=token),
        )

    def _observe(self, remote: RemotePrefill) -> None:
        num_tokens = remote.num_uncached_tokens
        if num_tokens > self._thresholds().max_local_prefill_length:
            self._rate.observe(num_tokens, remote.active.timeline.elapsed_s())

    def abort(self, remote: RemotePrefill, *, quarantined: bool) -> None:
        """The request is not wanted any more."""
        request_id = remote.active.request.request_id
        self._metrics.handoff_ended("cancelled")
        self._loop.post(lambda engine: engine.abort(request_id, quarantined=quarantined))

    def release_quarantined(self, block_ids: list[int]) -> None:
        """No write can land in these any more."""
        self._loop.post(lambda engine: engine.release_quarantined(block_ids))

    def _on_engine(
        self, remote: RemotePrefill, act: Callable[[Engine], SequenceOutput | None]
    ) -> None:
        """Runs `act` on the engine thread, and emits what it says about the first token."""

        def run(engine: Engine) -> None:
            try:
                output = act(engine)
            except NotFoundError:
                return  # cancelled meanwhile
            except Exception:
                lost = InternalError("the engine could not take over the prompt")
                self._aio.call_soon_threadsafe(remote.active.fail, lost)
                raise
            if output is not None:
                self._aio.call_soon_threadsafe(self._emit_joined, remote, output)

        self._loop.post(run)

    def _emit_joined(self, remote: RemotePrefill, output: SequenceOutput) -> None:
        """The first token is counted; it is sent unless it was, and may be the last."""
        if not remote.first_was_sent:
            remote.active.emit(output)
        elif output.finish_reason is not None:
            remote.active.send([], None, output.finish_reason, output.stop_token_id)


def _end_of(reason: str) -> str:
    """A metric label for why a handoff was given up."""
    for words, label in (
        ("deadline", "deadline"),
        ("claimed it", "unclaimed"),
        ("checksum", "corrupt"),
        ("lost", "peer_lost"),
        ("gone", "peer_lost"),
        ("queue", "queue_lost"),
    ):
        if words in reason:
            return label
    return "failed"

"""Remote prefills of a decode worker: drives one DecodeHandoff each, and carries out its actions.

Runs on the event loop. The engine is reached through `post`, in order, so whatever a handoff says
about its blocks happens before anything that follows from it. What prefill workers say comes from
`tandem.decode.handoff_messages`.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping

from tandem.decode.admission import PrefillRate
from tandem.decode.config import DisaggConfig
from tandem.decode.liveness import is_dead, is_stopped
from tandem.decode.metrics import DecodeMetrics
from tandem.decode.outcomes import HandoffOutcomes, RemotePrefill
from tandem.decode.peer_health import PeerHealth
from tandem.decode.requests import ActiveRequest
from tandem.decode.verification import Verifier
from tandem.engine.loop import EngineLoop
from tandem.engine.outputs import Reservation
from tandem.queue.prefill_queue import PrefillQueue
from tandem.runtime.errors import ServiceError
from tandem.runtime.messages import (
    Claim,
    Claimed,
    ClaimRefused,
    FirstToken,
    Instance,
    PrefillJob,
    PrefixBlocks,
    PrefixRequest,
    Settled,
    encode,
    pack_tokens,
)
from tandem.runtime.node import Node
from tandem.runtime.plane.server import Responder
from tandem.transfer.config import TransferConfig
from tandem.transfer.group import TransferGroup
from tandem.transfer.handoff.actions import (
    Abort,
    Action,
    Admit,
    PrefillLocally,
    ReleaseQuarantined,
    Retract,
    Verify,
)
from tandem.transfer.handoff.decode import DecodeHandoff, HandoffState
from tandem.transfer.handoff.landed import Landed

logger = logging.getLogger(__name__)

CLAIMANT_CHECK_INTERVAL_S = 0.25  # between looks at the process that a quarantine is for
_UNCLAIMED = (HandoffState.ALLOCATED, HandoffState.QUEUED)
_ENDED = (HandoffState.ADMITTED, HandoffState.CLOSED)


class RemotePrefills:
    """The open handoffs of a decode worker, by handoff id."""

    def __init__(
        self,
        *,
        node: Node,
        queue: PrefillQueue,
        group: TransferGroup,
        loop: EngineLoop,
        thresholds: Callable[[], DisaggConfig],
        transfer: TransferConfig,
        deployment: str,
        prefill_instances: Mapping[str, Instance],
        metrics: DecodeMetrics,
        rate: PrefillRate,
    ) -> None:
        self._node = node
        self._queue = queue
        self._group = group
        self._outcomes = HandoffOutcomes(loop, thresholds, metrics, rate)
        self._thresholds = thresholds
        self._transfer = transfer
        self._deployment = deployment
        self._prefill_instances = prefill_instances
        self._metrics = metrics
        self._health = PeerHealth(transfer.exclude_after, transfer.exclude_for_s)
        self._verifier = Verifier(group, self._health, metrics)
        self._aio = asyncio.get_running_loop()
        self._open: dict[bytes, RemotePrefill] = {}
        self._by_request: dict[str, RemotePrefill] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_taken = 0  # handoffs that were claimed or given up; read by the engine thread

    @property
    def num_open(self) -> int:
        return len(self._open)

    def check_invariants(self) -> None:
        """Assert what must hold of every open handoff between any two events."""
        for handoff_id, remote in self._open.items():
            assert remote.machine.handoff_id == handoff_id
            remote.machine.check_invariants()

    def excluded(self) -> list[str]:
        """Prefill workers that get no work from here at the moment. From any thread."""
        return self._health.excluded(time.perf_counter())

    # ---- the way of a handoff -----------------------------------------------------------------

    def start(self, active: ActiveRequest, reservation: Reservation) -> None:
        """Offers the prompt of `active`, whose blocks are reserved, to the prefill workers."""
        config = self._thresholds()
        num_uncached = active.seq.num_given_tokens - reservation.num_cached_tokens
        timeout_ms = config.handoff_timeout_ms + round(
            config.handoff_timeout_ms_per_token * num_uncached
        )
        request = active.request
        grant = Claimed(
            secret=secrets.token_bytes(16),
            lease_ms=timeout_ms,
            token_ids=pack_tokens(active.seq.token_ids),
            sampling=request.sampling,
            stop=request.stop,
            fill=reservation.fill,
            cached_ordinals=reservation.cached_ordinals,
            cache_salt=request.cache_salt,
            num_generated=request.num_generated,
        )
        machine = DecodeHandoff(
            secrets.token_bytes(16),
            1,
            grant,
            deadline=time.perf_counter() + timeout_ms / 1e3,
            grace_ms=self._transfer.grace_ms,
            num_layers=self._group.layout.num_layers,
            tp_size=self._group.layout.tp_size,
            verify=self._transfer.verify,
        )
        cached_blocks = active.seq.block_table[: len(reservation.cached_ordinals)]
        remote = RemotePrefill(active, machine, num_uncached, cached_blocks)
        active.num_cached_tokens = reservation.num_cached_tokens
        active.handoff_id = machine.handoff_id.hex()
        self._open[machine.handoff_id] = self._by_request[request.request_id] = remote
        self._arm(remote)
        if active.done.done():
            self.run(remote, machine.cancel())
            return
        self._spawn(self._publish(remote, timeout_ms))
        self._aio.call_later(config.claim_timeout_ms / 1e3, self._give_up_unclaimed, remote)

    async def _publish(self, remote: RemotePrefill, timeout_ms: int) -> None:
        active, machine = remote.active, remote.machine
        job = PrefillJob(
            handoff_id=machine.handoff_id,
            attempt=machine.attempt,
            deployment=self._deployment,
            decode_instance=self._node.instance_id,
            decode_address=self._node.server.address,
            decode_epoch=self._node.epoch,
            num_tokens=active.seq.num_given_tokens,
            num_uncached_tokens=remote.num_uncached_tokens,
            deadline_ms=timeout_ms,
            trace=active.context.headers,
        )
        try:
            await self._queue.publish(job)
        except ServiceError as error:
            logger.warning("request %s: no ticket: %s", active.request.request_id, error)
            if machine.state in _UNCLAIMED:  # else the broker has it, and only its answer was late
                self.run(remote, machine.fail("the prefill queue is not reachable"))
            return
        active.timeline.mark("queued")
        machine.published()

    def find(self, handoff_id: bytes) -> RemotePrefill | None:
        return self._open.get(handoff_id)

    def cancel(self, request_id: str) -> None:
        """Ends the handoff of a request that is over, if it has one."""
        remote = self._by_request.get(request_id)
        if remote is not None:
            self.run(remote, remote.machine.cancel())

    async def close(self) -> None:
        """Retracts what is open. The engine must still run, the agent still be registered."""
        for remote in list(self._open.values()):
            self.run(remote, remote.machine.cancel())
            if remote.timer is not None:
                remote.timer.cancel()
            remote.ended.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def claim(self, remote: RemotePrefill, claim: Claim, stream: Responder) -> bool:
        """Answers a claim on its stream; False when it was refused."""
        now = time.perf_counter()
        if self._health.is_excluded((claim.prefill_instance, claim.prefill_epoch), now):
            stream.send(encode(ClaimRefused("excluded")))
            return False
        was_unclaimed = remote.machine.state in _UNCLAIMED
        granted = remote.machine.claim(claim, now)
        stream.send(encode(granted))
        if isinstance(granted, ClaimRefused):
            return False
        if was_unclaimed:
            self.num_taken += 1
            self._group.expect(+1)
            remote.active.timeline.mark("claimed")
        remote.active.prefill_instance = claim.prefill_instance
        remote.claimant = self._prefill_instances.get(claim.prefill_instance)
        remote.claim_stream = stream
        self._arm(remote)
        return True

    def first_token(self, remote: RemotePrefill, first: FirstToken) -> None:
        actions = remote.machine.first_token(first)
        if remote.machine.first is first:
            self._group.expect(0)
            remote.active.timeline.merge(first.timeline_ms, "claimed")
            self._outcomes.emit_first(remote, first)
        self.run(remote, actions)

    def landed(self, remote: RemotePrefill, notice: Landed, decode_rank: int) -> None:
        """One write is complete, says the transfer plane."""
        self.run(remote, remote.machine.landed(notice, time.perf_counter(), decode_rank))

    def settled(self, remote: RemotePrefill, settled: Settled) -> None:
        """Nothing of the claim can land any more."""
        remote.active.timeline.merge(settled.timeline_ms, "claimed")
        self.run(remote, remote.machine.settled(settled, time.perf_counter()))

    async def prefix_blocks(self, remote: RemotePrefill, request: PrefixRequest) -> PrefixBlocks:
        """Where the cached blocks are that the claimant wants to READ, and what they hold now."""
        machine = remote.machine
        num_cached = len(remote.cached_blocks)
        is_known = all(0 <= ordinal < num_cached for ordinal in request.ordinals)
        if machine.attempt != request.attempt or not machine.is_live or not is_known:
            return PrefixBlocks()
        blocks = [(ordinal, remote.cached_blocks[ordinal]) for ordinal in request.ordinals]
        layers = range(self._group.layout.num_layers)
        checksums = [
            await self._group.checksums(stream, layers, [block for _, block in blocks])
            for stream in self._group.rank_pairs_from(machine.claimant_tp_size)
        ]
        return PrefixBlocks(blocks, checksums)

    def stream_lost(self, remote: RemotePrefill, claim: Claim, stream: Responder) -> None:
        """The claim's stream ended before the handoff did."""
        if remote.claim_stream is not stream:
            return
        remote.claim_stream = None
        self.run(remote, remote.machine.peer_lost(claim.prefill_instance))

    async def _watch_claimant(self, remote: RemotePrefill) -> None:
        """Ends a quarantine early if the claimant is dead; holds it on while it stands still."""
        machine, claimant = remote.machine, remote.claimant
        while claimant is not None and not remote.ended.is_set():
            if is_dead(claimant):
                self.run(remote, machine.peer_gone(claimant.instance_id, claimant.epoch))
                return
            if is_stopped(claimant):
                machine.claimant_stopped(time.perf_counter())
                self._arm(remote)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLAIMANT_CHECK_INTERVAL_S):
                    await remote.ended.wait()

    # ---- what goes out ------------------------------------------------------------------------

    def run(self, remote: RemotePrefill, actions: list[Action]) -> None:
        """Carries out what the machine of `remote` asks for."""
        if remote.machine.all_landed:
            remote.active.timeline.mark("landed")
        if remote.machine.all_proven:
            remote.active.timeline.mark("verified")
        for action in actions:
            match action:
                case Verify():
                    self._spawn(self._verify(remote, action))
                case Admit(first):
                    self._outcomes.admit(remote, first)
                case Retract():  # its blocks are in quarantine
                    self._spawn(self._watch_claimant(remote))
                    if remote.claim_stream is not None:
                        remote.claim_stream.send(encode(action.message))
                case PrefillLocally(reason, quarantined):
                    self._outcomes.prefill_locally(remote, reason, quarantined=quarantined)
                case Abort(quarantined):
                    self._outcomes.abort(remote, quarantined=quarantined)
                case ReleaseQuarantined(block_ids):
                    self._outcomes.release_quarantined(list(block_ids))
        self._arm(remote)

    async def _verify(self, remote: RemotePrefill, verify: Verify) -> None:
        self.run(remote, await self._verifier.check(remote, verify))

    # ---- time ---------------------------------------------------------------------------------

    def _arm(self, remote: RemotePrefill) -> None:
        """Sets the timer for the machine's next tick, or closes the books on an ended handoff."""
        if remote.timer is not None:
            remote.timer.cancel()
            remote.timer = None
        machine = remote.machine
        if machine.state in _ENDED:
            self._close_books(remote)
            return
        next_tick = machine.next_tick
        assert next_tick is not None
        delay_s = max(0.0, next_tick - time.perf_counter()) + 1e-3
        remote.timer = self._aio.call_later(delay_s, self._tick, remote)

    def _tick(self, remote: RemotePrefill) -> None:
        remote.timer = None
        now = time.perf_counter()
        if remote.claimant is not None and is_stopped(remote.claimant):
            remote.machine.claimant_stopped(now)
        self.run(remote, remote.machine.tick(now))

    def _give_up_unclaimed(self, remote: RemotePrefill) -> None:
        if remote.machine.state in _UNCLAIMED:
            self.run(remote, remote.machine.fail("no prefill worker claimed it in time"))

    def _close_books(self, remote: RemotePrefill) -> None:
        if self._open.pop(remote.machine.handoff_id, None) is None:
            return
        request_id = remote.active.request.request_id
        if self._by_request.get(request_id) is remote:  # else its id is in use again
            del self._by_request[request_id]
        if remote.machine.claimant is None:
            self.num_taken += 1
        else:
            self._group.expect(-1)
        for reason, count in remote.machine.dropped.items():
            self._metrics.dropped(reason, count)
        remote.ended.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._aio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

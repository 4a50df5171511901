"""The open handoffs of a decode worker with Tandem's engine, and their tickets.

Runs on the event loop.
"""

import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping

from tandem.decode.admission import LOOK_AGAIN_S, MAX_WAYS_GIVEN
from tandem.decode.config import DisaggConfig, Policy
from tandem.decode.handoff import HandoffTools, RemotePrefill
from tandem.decode.metrics import DecodeMetrics
from tandem.decode.requests import ActiveRequest
from tandem.decode.transfer_cost import TransferCost
from tandem.engine.core.engine import Engine
from tandem.engine.core.loop import EngineLoop
from tandem.engine.schedule.outputs import Reservation
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import InvalidRequestError
from tandem.runtime.membership.node import Node
from tandem.runtime.plane.server import RequestServer, Responder
from tandem.runtime.wire.cluster_messages import Instance
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.handoff_messages import Ack, Claimed, FirstToken, PrefillJob
from tandem.runtime.wire.messages import encode, pack_tokens
from tandem.runtime.wire.request_bounds import check_token_id
from tandem.transfer.agents.group import TransferGroup
from tandem.transfer.config import TransferConfig
from tandem.transfer.handoff.causes import CloseCause
from tandem.transfer.handoff.table import OpenHandoffs
from tandem.worker.load_reports import OwnPrompts

logger = logging.getLogger(__name__)

_decode_first = decoder(FirstToken, InvalidRequestError)


class RemotePrefills(OpenHandoffs[RemotePrefill]):
    """The open handoffs of a decode worker, by handoff id."""

    def __init__(
        self,
        *,
        node: Node,
        publish: Callable[[PrefillJob], Awaitable[None]],
        group: TransferGroup,
        loop: EngineLoop,
        thresholds: Callable[[], DisaggConfig],
        transfer: TransferConfig,
        prefill_instances: Mapping[str, Instance],
        metrics: DecodeMetrics,
        transfer_cost: TransferCost,
        vocab_size: int,
        own_prompts: OwnPrompts,
        is_still_remote: Callable[[Engine, RemotePrefill], bool],  # on the engine thread
        gives_way: Callable[[RemotePrefill, str], bool],  # at the claim of an instance
    ) -> None:
        super().__init__(transfer, node, group, publish)
        self._thresholds = thresholds
        self._vocab_size = vocab_size
        self._is_still_remote = is_still_remote
        self._gives_way = gives_way
        self._tools = HandoffTools(
            group=group,
            health=self.health,
            prefill_instances=prefill_instances,
            spawn=self.spawn,
            loop=loop,
            metrics=metrics,
            transfer_cost=transfer_cost,
            taken=self._taken,
            remove=self.remove,
            own_prompts=own_prompts,
        )
        self._by_request: dict[str, RemotePrefill] = {}
        self.num_taken_tokens = 0  # as `num_taken`

    # ---- from a reservation to a ticket -------------------------------------------------------

    def start(self, active: ActiveRequest, reservation: Reservation) -> None:
        """Offer the prompt of `active`, whose blocks are reserved, to the prefill workers."""
        num_uncached = active.seq.num_given_tokens - reservation.num_cached_tokens
        config = self._thresholds()
        timeout_ms = config.handoff_timeout_of(num_uncached)
        grant = self._grant(active, reservation, timeout_ms)
        machine = self.machine(secrets.token_bytes(16), grant)
        table = active.seq.block_table
        cached_blocks = {ordinal: table[ordinal] for ordinal in reservation.cached_ordinals}
        remote = RemotePrefill(self._tools, active, machine, num_uncached, cached_blocks)
        active.num_cached_tokens = reservation.num_cached_tokens
        active.handoff_id = machine.handoff_id.hex()
        self._tools.own_prompts.discard(active.request.request_id)
        self.add(remote)
        self._by_request[active.request.request_id] = remote
        if active.done.done():
            remote.cancel()
            return
        decision = active.decision
        assert decision is not None
        self.begin(remote, decision.claim_timeout_ms or config.claim_timeout_ms)
        self.spawn(self._publish_ticket(remote))

    def _grant(self, active: ActiveRequest, reservation: Reservation, timeout_ms: int) -> Claimed:
        request = active.request
        return Claimed(
            secret=secrets.token_bytes(16),
            lease_ms=timeout_ms,
            token_ids=pack_tokens(active.seq.token_ids),
            sampling=request.sampling,
            stop=request.stop,
            fill=reservation.fill,
            cached_ordinals=reservation.cached_ordinals,
            cache_salt=request.cache_salt,
            num_generated=request.num_generated,
            grammar=request.grammar,
        )

    async def _publish_ticket(self, remote: RemotePrefill) -> None:
        active, num_uncached = remote.active, remote.num_uncached_tokens
        trace = active.span.begin_handoff()
        if await self.publish(remote, active.seq.num_given_tokens, num_uncached, trace):
            active.timeline.mark("queued")

    def unclaimed(self, receiver: RemotePrefill) -> None:
        """Give up a ticket that waits, unless another worker is still predicted to be better."""
        decision = receiver.active.decision
        if not receiver.is_unclaimed:
            return
        if decision is None or not decision.is_predicted:
            super().unclaimed(receiver)
            return

        def look(engine: Engine) -> None:
            waits = self._is_still_remote(engine, receiver)
            self._aio.call_soon_threadsafe(end_look, waits)

        def end_look(waits: bool) -> None:
            if waits:
                self._aio.call_later(LOOK_AGAIN_S, self.unclaimed, receiver)
            else:
                super(RemotePrefills, self).unclaimed(receiver)

        self._tools.loop.post(look)

    # ---- the end ------------------------------------------------------------------------------

    def cancel(self, request_id: str) -> None:
        """End the handoff of a request that is over, if it has one."""
        remote = self._by_request.get(request_id)
        if remote is not None:
            remote.cancel()

    def take_back(self, job: PrefillJob) -> bool:
        """Compute the prompt of an own ticket here; False where another worker was asked for."""
        remote = self.find(job.handoff_id)
        if remote is None or not remote.is_unclaimed:
            return True
        policy = self._thresholds().policy
        if remote.active.request.prefill_place == "remote" or policy is Policy.ALWAYS_REMOTE:
            return False
        remote.give_up_unclaimed(CloseCause.TAKEN_BACK, "this worker was the first to have room")
        return True

    def remove(self, receiver: RemotePrefill) -> None:
        super().remove(receiver)
        if self._by_request.get(receiver.request_id) is receiver:  # else the id is in use again
            del self._by_request[receiver.request_id]
        self._taken(receiver)

    def _taken(self, remote: RemotePrefill) -> None:
        self.num_taken_tokens += remote.num_unclaimed_tokens
        remote.num_unclaimed_tokens = 0

    def gives_way(self, receiver: RemotePrefill, prefill_instance: str) -> bool:
        """Return True if the ticket should be offered again later, a limited number of times."""
        decision = receiver.active.decision
        if decision is None or not decision.is_predicted:
            return False
        if receiver.num_ways_given == MAX_WAYS_GIVEN:
            return False
        is_late = self._gives_way(receiver, prefill_instance)
        receiver.num_ways_given += is_late
        return is_late

    # ---- the first token ----------------------------------------------------------------------

    def register(self, server: RequestServer) -> None:
        super().register(server)
        server.register("first_token", self._on_first_token)

    async def _on_first_token(
        self, payload: bytes, context: RequestContext, answer: Responder
    ) -> None:
        first = _decode_first(payload)
        check_token_id(first.token_id, self._vocab_size)
        if (remote := self.find(first.handoff_id)) is not None:
            remote.first_token(first)
        answer.send(encode(Ack()))

"""Handoffs into the blocks of a vLLM: offers, and the ends that vLLM is given."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

from tandem.decode.thresholds import LiveThresholds
from tandem.queue.prefill_queue import PrefillQueue
from tandem.runtime.context import RequestContext
from tandem.runtime.membership.node import Node
from tandem.runtime.plane.server import Responder
from tandem.runtime.wire.cluster_messages import Instance
from tandem.runtime.wire.handoff_messages import Claim, Claimed, FirstToken
from tandem.runtime.wire.messages import SamplingParams, pack_tokens
from tandem.transfer.agents.group import TransferGroup
from tandem.transfer.handoff.causes import CloseCause
from tandem.transfer.handoff.decode import DecodeHandoff
from tandem.transfer.handoff.receiver import HandoffReceiver, ReceiverTools
from tandem.transfer.handoff.table import OpenHandoffs, decode_claim
from tandem.transfer.peers import is_dead, is_stopped
from tandem.vllm.kv_layout import VllmPool
from tandem.vllm.settings import ConnectorSettings
from tandem.vllm.step_messages import Ends, LoadEnd, Offer, Released

logger = logging.getLogger(__name__)

OFFER_WAIT_S = 1.0  # less than a prefill worker waits for the answer to its claim


class VllmHandoff(HandoffReceiver):
    """One handoff of one request of vLLM's."""

    def __init__(self, handoffs: "VllmHandoffs", offer: Offer, machine: DecodeHandoff) -> None:
        super().__init__(handoffs.tools, offer.request_id, machine, {})
        self._handoffs = handoffs
        self._offer = offer
        self._is_quarantined = False
        self._began_at = time.perf_counter()

    def claim(self, claim: Claim, stream: Responder) -> bool:
        granted = super().claim(claim, stream)
        if not granted and not self._handoffs.has_tickets:  # no other prefill worker will claim it
            self.give_up_unclaimed(CloseCause.FAILED, "the claim of this rank was refused")
        return granted

    def on_claimed(self, prefill_instance: str) -> None:
        self._tools.spawn(self._watch_for_a_stop())

    def on_admitted(self, first: FirstToken | None) -> None:
        self._handoffs.ends.append(LoadEnd(self.request_id, self._offer.key))
        duration_ms = (time.perf_counter() - self._began_at) * 1e3
        key, name = self._offer.key, self.request_id
        logger.debug("request %s, ticket %s: loaded in %.1f ms", name, key, duration_ms)

    def on_given_up(self, cause: CloseCause, detail: str, *, quarantined: bool) -> None:
        logger.warning("request %s: prefilled locally (%s): %s", self.request_id, cause, detail)
        self._give_up(detail, quarantined=quarantined)

    def on_cancelled(self, *, quarantined: bool) -> None:
        self._give_up(None, quarantined=quarantined)

    def on_released(self, block_ids: list[int]) -> None:
        """Do nothing: `on_ended` comes at once, and vLLM's scheduler frees the blocks."""

    def on_ended(self) -> None:
        if self._is_quarantined:
            self._handoffs.ends.append(Released(self._offer.key))
        self._handoffs.remove(self)

    def _give_up(self, reason: str | None, *, quarantined: bool) -> None:
        self._is_quarantined = quarantined
        end = LoadEnd(self.request_id, self._offer.key, reason, quarantined)
        self._handoffs.ends.append(end)

    async def _watch_for_a_stop(self) -> None:
        """Give up once the claimant's process is dead or stopped, before its heartbeats tell."""
        claimant = self._claimant
        while claimant is not None and self.machine.is_live:
            if is_dead(claimant) or is_stopped(claimant):
                self.run(self.machine.peer_lost(claimant.instance_id))
                return
            await self._until_the_next_look()


class VllmHandoffs(OpenHandoffs[VllmHandoff]):
    """The open handoffs of a vLLM."""

    def __init__(
        self,
        *,
        node: Node,
        queue: PrefillQueue,
        group: TransferGroup,
        pool: VllmPool,
        settings: ConnectorSettings,
        thresholds: LiveThresholds,
        prefill_instances: Mapping[str, Instance],
        ends: Ends,
    ) -> None:
        super().__init__(settings.config.transfer, node, group, queue.publish)
        self.num_ended: Counter[str] = Counter()  # by the cause, "admitted" where all went well
        self.ends = ends
        self.has_tickets = settings.rank == 0
        self.tools = ReceiverTools(group, self.health, prefill_instances, self.spawn)
        self._pool, self._thresholds = pool, thresholds
        self._offered = asyncio.Event()  # any prompt

    def remove(self, receiver: VllmHandoff) -> None:
        super().remove(receiver)
        self.num_ended[receiver.machine.close_cause or "admitted"] += 1

    @property
    def num_unclaimed(self) -> int:
        return sum(handoff.is_unclaimed for handoff in self._open.values())

    async def _on_claim(self, payload: bytes, context: RequestContext, answer: Responder) -> None:
        """Answer a claim. Another rank's can come before vLLM's step brings the offer here."""
        if not self.has_tickets:
            handoff_id = decode_claim(payload).handoff_id
            with suppress(TimeoutError):
                async with asyncio.timeout(OFFER_WAIT_S):
                    while self.find(handoff_id) is None:
                        self._offered.clear()
                        await self._offered.wait()
        await super()._on_claim(payload, context, answer)

    def start(self, offer: Offer) -> None:
        """Await the claim of a prompt. The first rank publishes a ticket for those of all ranks."""
        config = self._thresholds.current
        num_uncached = len(offer.token_ids) - offer.num_cached_blocks * self._pool.layout.block_size
        grant = self._grant(offer, config.handoff_timeout_of(num_uncached))
        machine = self.machine(bytes.fromhex(offer.key), grant, awaits_first=False)
        handoff = VllmHandoff(self, offer, machine)
        self.add(handoff)
        self._offered.set()
        if self.has_tickets:
            self.begin(handoff, config.claim_timeout_ms)
            self.spawn(self.publish(handoff, len(offer.token_ids), num_uncached))
        else:  # vLLM's scheduler cancels it when the first rank's is given up
            handoff.run([])

    def cancel(self, key: str) -> None:
        """End the handoff of a request that is over; one that has ended is none."""
        if (handoff := self.find(bytes.fromhex(key))) is not None:
            handoff.cancel()

    def _grant(self, offer: Offer, timeout_ms: int) -> Claimed:
        num_cached = offer.num_cached_blocks * self._pool.layout.num_groups
        return Claimed(
            secret=secrets.token_bytes(16),
            lease_ms=timeout_ms,
            token_ids=pack_tokens(offer.token_ids),
            sampling=SamplingParams(),
            fill=list(enumerate(self._pool.table(offer.block_ids)))[num_cached:],
            cached_ordinals=[],  # records in vLLM's cache are not READ
            cache_salt=offer.cache_salt,
        )

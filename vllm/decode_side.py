"""Handoffs into the blocks of a vLLM: offers, and the ends that vLLM is given."""

import asyncio
import logging
import secrets
from collections import Counter

from tandem.decode.thresholds import LiveThresholds
from tandem.runtime.tasks import ends_within
from tandem.runtime.tracing.timeline import Timeline
from tandem.runtime.wire.cluster_messages import Instance
from tandem.runtime.wire.handoff_messages import Claimed, FirstToken
from tandem.runtime.wire.messages import SamplingParams, pack_tokens
from tandem.transfer.handoff.causes import CloseCause
from tandem.transfer.handoff.receiver import CLAIMANT_CHECK_INTERVAL_S
from tandem.transfer.handoff.server import HandoffServer
from tandem.transfer.peers import is_dead, is_stopped
from tandem.vllm.kv_layout import VllmPool
from tandem.vllm.step_messages import Ends, LoadEnd, Offer, Released

logger = logging.getLogger(__name__)


class VllmHandoff:
    """One handoff of one request of vLLM's: the `BlockOwner` of its blocks."""

    def __init__(self, handoffs: "VllmHandoffs", offer: Offer, grant: Claimed) -> None:
        self._handoffs = handoffs
        self._offer = offer
        self._is_quarantined = False
        self._timeline = Timeline()
        self.handoff = handoffs.server.open(
            self,
            grant,
            offer.request_id,
            self._timeline,
            handoff_id=bytes.fromhex(offer.key),
            awaits_first=False,
        )

    def defers(self, prefill_instance: str) -> bool:
        return False

    def on_claimed(self, claimant: Instance) -> None:
        self._handoffs.server.spawn(self._watch_for_a_stop(claimant))

    def on_mismatch(self, prefill_instance: str) -> None:
        """Do nothing: the handoff is given up, and counted by that."""

    def on_admitted(self, first: FirstToken | None) -> None:
        key, name = self._offer.key, self._offer.request_id
        self._handoffs.ends.append(LoadEnd(name, key))
        duration_ms = self._timeline.elapsed_s() * 1e3
        logger.debug("request %s, ticket %s: loaded in %.1f ms", name, key, duration_ms)

    def on_given_up(self, cause: CloseCause, detail: str, *, quarantined: bool) -> None:
        name = self._offer.request_id
        logger.warning("request %s: prefilled locally (%s): %s", name, cause, detail)
        self._give_up(detail, quarantined=quarantined)

    def on_cancelled(self, *, quarantined: bool) -> None:
        self._give_up(None, quarantined=quarantined)

    def on_released(self, block_ids: list[int]) -> None:
        """Do nothing: `on_ended` comes at once, and vLLM's scheduler frees the blocks."""

    def on_ended(self) -> None:
        if self._is_quarantined:
            self._handoffs.ends.append(Released(self._offer.key))
        self._handoffs.num_ended[self.handoff.machine.close_cause or "admitted"] += 1

    def _give_up(self, reason: str | None, *, quarantined: bool) -> None:
        self._is_quarantined = quarantined
        end = LoadEnd(self._offer.request_id, self._offer.key, reason, quarantined)
        self._handoffs.ends.append(end)

    async def _watch_for_a_stop(self, claimant: Instance) -> None:
        """Give up once the claimant's process is dead or stopped, before its heartbeats tell."""
        handoff = self.handoff
        while handoff.machine.is_live:
            if is_dead(claimant) or is_stopped(claimant):
                handoff.run(handoff.machine.peer_lost(claimant.instance_id))
                return
            await ends_within(handoff.ended.wait(), CLAIMANT_CHECK_INTERVAL_S)


class VllmHandoffs:
    """The handoffs into the blocks of a vLLM. `ends` gets their ends."""

    def __init__(
        self, server: HandoffServer, pool: VllmPool, thresholds: LiveThresholds, ends: Ends
    ) -> None:
        self.num_ended: Counter[str] = Counter()  # by the cause, "admitted" where all went well
        self.server = server
        self.ends = ends
        self._pool, self._thresholds = pool, thresholds
        self._aio = asyncio.get_running_loop()

    def start(self, offer: Offer) -> None:
        """Await the claim of a prompt. The first rank publishes a ticket for those of all ranks."""
        server, config = self.server, self._thresholds.current
        num_uncached = len(offer.token_ids) - offer.num_cached_blocks * self._pool.layout.block_size
        grant = self._grant(offer, config.handoff_timeout_of(num_uncached))
        handoff = VllmHandoff(self, offer, grant).handoff
        if server.has_tickets:  # else vLLM's scheduler cancels it when the first rank's is given up
            self._aio.call_later(config.claim_timeout_ms / 1e3, handoff.unclaimed)
            server.spawn(server.publish(handoff, len(offer.token_ids), num_uncached))

    def cancel(self, key: str) -> None:
        """End the handoff of a request that is over; one that has ended is none."""
        if (handoff := self.server.find(bytes.fromhex(key))) is not None:
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

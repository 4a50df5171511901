"""Proving that what landed is what was announced, before anything reads it."""

import logging
import time

from tandem.decode.metrics import DecodeMetrics
from tandem.decode.outcomes import RemotePrefill
from tandem.decode.peer_health import PeerHealth
from tandem.runtime.errors import TransferError
from tandem.transfer.group import TransferGroup
from tandem.transfer.handoff.actions import Action, Span, Verify
from tandem.transfer.layout import RankPair

logger = logging.getLogger(__name__)


class Verifier:
    """Carries out `Verify`; a prefill worker whose KV is wrong is counted, named and excluded."""

    def __init__(self, group: TransferGroup, health: PeerHealth, metrics: DecodeMetrics) -> None:
        self._group = group
        self._health = health
        self._metrics = metrics

    async def check(self, remote: RemotePrefill, verify: Verify) -> list[Action]:
        """What the handoff asks for once each block's checksum was compared."""
        span, machine = verify.span, remote.machine
        blocks = [block_id for _, block_id, _ in verify.blocks]
        try:
            found = await self._group.checksums(self._stream(remote, span), span.layers, blocks)
        except TransferError as error:
            return machine.fail(error.message)
        actions: list[Action] = []
        for (ordinal, _, announced), checksum in zip(verify.blocks, found, strict=True):
            if machine.is_live and announced != checksum:
                self._note_mismatch(remote, span, ordinal)
            actions += machine.verified(span, ordinal, announced == checksum)
        return actions

    def _stream(self, remote: RemotePrefill, span: Span) -> RankPair:
        return next(
            ranks
            for ranks in self._group.rank_pairs_from(remote.machine.claimant_tp_size)
            if (ranks.prefill_rank, ranks.decode_rank) == (span.prefill_rank, span.decode_rank)
        )

    def _note_mismatch(self, remote: RemotePrefill, span: Span, ordinal: int) -> None:
        claimant = remote.machine.claimant
        assert claimant is not None
        self._metrics.mismatched(claimant[0])
        logger.error(
            "request %s: block %d (%s) from %s is not what was announced",
            remote.active.request.request_id,
            ordinal,
            span,
            ".".join(claimant),
        )
        if self._health.failed(claimant, time.perf_counter()):
            logger.error("prefill worker %s gets no more work: its KV is corrupt", claimant[0])

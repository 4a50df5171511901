"""Taking over what the decode worker has cached of a prompt, where computing it takes longer."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from tandem.engine.loop import EngineLoop
from tandem.engine.schedule.sequence import Sequence
from tandem.runtime.errors import TandemError
from tandem.runtime.messages import Claimed, PrefixBlocks, PrefixRequest, encode
from tandem.transfer.group import TransferGroup
from tandem.transfer.link import Link

RATE_SMOOTHING = 0.2  # weight of the newest measurement

logger = logging.getLogger(__name__)

Ask = Callable[[str, bytes], Awaitable[bytes]]  # (endpoint of the decode worker, payload) -> answer


@dataclass(slots=True)
class ComputeRate:
    """Seconds per prompt token as this worker has computed them lately; None before the first."""

    s_per_token: float | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Takes in one finished prompt, of which `num_tokens` were computed."""
        sample = seconds / max(1, num_tokens)
        known = self.s_per_token
        self.s_per_token = sample if known is None else known + RATE_SMOOTHING * (sample - known)


@dataclass(frozen=True, slots=True)
class PrefixPuller:
    """Decides and carries out pulls for the jobs of one worker."""

    loop: EngineLoop
    group: TransferGroup
    rate: ComputeRate
    block_size: int

    async def pull(
        self, seq: Sequence, handoff: tuple[bytes, int], grant: Claimed, link: Link, ask: Ask
    ) -> int:
        """How many tokens were READ into our prefix cache, where `seq` finds them when added.

        0 when that would take longer than computing them, as measured, or did not work.
        """
        num_blocks = len(grant.cached_ordinals)
        if grant.cached_ordinals != list(range(num_blocks)):
            return 0
        num_hit_tokens = await self.loop.call(lambda engine: engine.prefix_hit(seq))
        num_missing = num_blocks - num_hit_tokens // self.block_size
        if num_missing <= 0 or not self._is_worth_it(num_missing, link):
            return 0
        fill = await self.loop.call(lambda engine: engine.reserve_prefix(seq, num_blocks))
        if not fill:
            return 0
        proven = False
        try:
            proven = await self._read(fill, handoff, link, ask)
        except TandemError as error:  # nothing of it can land any more
            logger.warning("request %s: prefix not pulled: %s", seq.request_id, error)
        except BaseException:  # a READ may still be under way
            self.loop.post(lambda engine: engine.abort(seq.request_id, quarantined=True))
            raise
        self.loop.post(lambda engine: engine.adopt_prefix(seq.request_id, proven=proven))
        return len(fill) * self.block_size if proven else 0

    def _is_worth_it(self, num_blocks: int, link: Link) -> bool:
        if link.rates is None or self.rate.s_per_token is None:
            return False
        compute_s = num_blocks * self.block_size * self.rate.s_per_token
        return link.rates.read_s(num_blocks * self.group.layout.block_bytes, num_blocks) < compute_s

    async def _read(
        self, fill: list[tuple[int, int]], handoff: tuple[bytes, int], link: Link, ask: Ask
    ) -> bool:
        """True when our blocks hold what the decode worker says that its hold."""
        ordinals = [ordinal for ordinal, _ in fill]
        request = PrefixRequest(*handoff, ordinals, self.group.layout.tp_size)
        answer = msgspec.msgpack.decode(
            await ask("prefix_blocks", encode(request)), type=PrefixBlocks
        )
        if [ordinal for ordinal, _ in answer.blocks] != ordinals:
            return False  # the claim does not stand any more
        pairs = [(ours, theirs) for (_, ours), (_, theirs) in zip(fill, answer.blocks, strict=True)]
        found = [await self.group.read(link, ranks, pairs) for ranks in link.rank_pairs]
        if found != answer.checksums:
            logger.error("prefix blocks READ from %s are not what it has", link.peer.instance_id)
            return False
        return True

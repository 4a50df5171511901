"""READs of a prompt's prefix from the decode worker's cache, where computing it takes longer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tandem.engine.core.loop import EngineLoop
from tandem.engine.schedule.sequence import Sequence
from tandem.runtime.address import new_id
from tandem.runtime.errors import TandemError, TransferError
from tandem.runtime.process.token_rate import TokenRate
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.handoff_messages import PrefixBlocks, PrefixRequest
from tandem.runtime.wire.messages import encode
from tandem.transfer.agents.group import TransferGroup
from tandem.transfer.agents.link import Link
from tandem.transfer.handoff.decode import LATE_BYTES_S
from tandem.transfer.handoff.prefill import PrefillHandoff

_decode_blocks = decoder(PrefixBlocks)

logger = logging.getLogger(__name__)

Ask = Callable[[str, bytes], Awaitable[bytes]]  # (decode worker's endpoint, payload)


@dataclass(frozen=True, slots=True)
class PrefixPuller:
    """Decides on pulls and carries them out, for all jobs of one worker."""

    loop: EngineLoop
    group: TransferGroup
    rate: TokenRate  # of computing here
    block_size: int

    async def pull(self, seq: Sequence, machine: PrefillHandoff, link: Link, ask: Ask) -> int:
        """READ the prefix into the own prefix cache, for `seq`; return the number of its tokens.

        0 if computing the prefix is faster, by measured rates, or if the READ failed.
        """
        grant = machine.grant
        cached = set(grant.cached_ordinals)
        num_blocks = max(cached, default=-1) // self.group.layout.num_groups + 1
        if not 0 < num_blocks * self.block_size < seq.num_tokens:
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
            if cached.issuperset(ordinal for ordinal, _ in fill):
                proven = await self._read(fill, machine, link, ask)
        except TransferError as error:
            logger.warning("request %s: prefix not pulled: %s", seq.request_id, error)
            self._set_aside(seq.request_id)
            return 0
        except TandemError as error:  # nothing was READ
            logger.warning("request %s: prefix not pulled: %s", seq.request_id, error)
        except BaseException:  # a READ may still be under way
            self.loop.post(lambda engine: engine.abort(seq.request_id, quarantined=True))
            raise
        self.loop.post(lambda engine: engine.adopt_prefix(seq.request_id, proven=proven))
        return num_missing * self.block_size if proven else 0

    def _set_aside(self, request_id: str) -> None:
        """Use the blocks again when nothing can land in them, as after a write that failed."""
        name = f"{request_id} {new_id()}"
        self.loop.post(lambda engine: engine.set_aside_prefix(request_id, name))

        def free() -> None:
            self.loop.post(lambda engine: engine.adopt_prefix(name, proven=False))

        asyncio.get_running_loop().call_later(LATE_BYTES_S, free)

    def _is_worth_it(self, num_blocks: int, link: Link) -> bool:
        if link.rates is None or self.rate.s_per_token is None:
            return False
        num_tokens = num_blocks * self.block_size
        num_bytes = round(num_tokens * self.group.layout.token_bytes)
        num_read = num_bytes // self.group.layout.block_bytes
        return link.rates.read_s(num_bytes, num_read) < num_tokens * self.rate.s_per_token

    async def _read(
        self, fill: list[tuple[int, int]], machine: PrefillHandoff, link: Link, ask: Ask
    ) -> bool:
        """READ the blocks; True if their checksums are those of the decode worker."""
        ordinals = [ordinal for ordinal, _ in fill]
        tp_size = self.group.layout.tp_size
        secret = machine.grant.secret
        request = PrefixRequest(machine.handoff_id, machine.attempt, secret, ordinals, tp_size)
        answer = _decode_blocks(await ask("prefix_blocks", encode(request)))
        if [ordinal for ordinal, _ in answer.blocks] != ordinals:
            return False  # the claim has ended
        pairs = [(ours, theirs) for (_, ours), (_, theirs) in zip(fill, answer.blocks, strict=True)]
        found = [await self.group.read(link, ranks, pairs) for ranks in link.read_pairs]
        if found != answer.checksums:
            logger.error("prefix blocks READ from %s have wrong checksums", link.peer.instance_id)
            return False
        return True

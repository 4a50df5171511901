"""Transfers of an emulated worker: bytes of its pool take the time of those that they stand for."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tandem.emulation.profile import Profile
from tandem.emulation.runner import LayersEvent
from tandem.transfer.agents.group import TransferGroup, WriteOrder
from tandem.transfer.agents.link import Link, LinkRates
from tandem.transfer.agents.link_probe import SpareLink, core_share
from tandem.transfer.handoff.landed import decode_landed
from tandem.transfer.layout import RankPair


class EmulatedGroup(TransferGroup):
    """A transfer group that holds what it sends, and what arrives, until its rate allows it.

    One transfer after another, in each direction: many senders to one worker share its rate.
    Transfers themselves are as always; their posts and the delivery of their notices are late.
    """

    def __init__(self, profile: Profile, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.byte_scale: float = profile.kv_bytes_per_token / self.layout.token_bytes
        self._latency_s = profile.link_latency_s
        self._s_per_byte = self.byte_scale / profile.link_bytes_per_s  # of the pool
        self._last_at = {"out": 0.0, "in": 0.0}  # perf_counter seconds of the last byte
        self._arriving: deque[Callable[[], None]] = deque()

    async def start(self, on_notification: Callable[[int, bytes], None]) -> None:
        """Register the pools; notifications come when the link has received what is before them."""
        await super().start(lambda rank, data: self._arrive(data, partial(on_notification, rank)))

    async def rates_between(self, spare: SpareLink, link: Link) -> LinkRates:
        """Return the profile's rates, for bytes of the pool."""
        await spare.write(1, spare.num_layers, checked=True)  # as ever, so that both ends connect
        return LinkRates(
            overhead_s=self._latency_s,
            descriptor_s=0.0,
            s_per_byte=self._s_per_byte,
            read_s_per_byte=self._s_per_byte,
            wire_bytes_per_s=1 / self._s_per_byte,
            core_share=core_share("VRAM"),
        )

    async def write(self, link: Link, order: WriteOrder) -> bytes:
        """Write blocks once the link has sent their bytes, and all earlier ones."""
        if isinstance(order.after, LayersEvent):
            await asyncio.sleep(order.after.due_at - time.perf_counter())
        await self._carry("out", len(order.blocks), order.layers)
        return await super().write(link, order)

    async def read(
        self, link: Link, ranks: RankPair, pairs: Sequence[tuple[int, int]]
    ) -> list[int]:
        """READ blocks once the link has moved their bytes, and all earlier ones."""
        await self._carry("in", len(pairs), range(self.layout.num_layers))
        return await super().read(link, ranks, pairs)

    async def _carry(self, way: str, num_blocks: int, layers: range) -> None:
        now, last_at = time.perf_counter(), self._last_at
        last_at[way] = max(now, last_at[way]) + self._seconds(num_blocks, layers)
        await asyncio.sleep(last_at[way] + self._latency_s - now)

    def _arrive(self, notice: bytes, deliver: Callable[[bytes], None]) -> None:
        """Deliver once the bytes of `notice` and all before them are received, in that order.

        They may have come since the sender began to send them: alone, nothing is late.
        """
        now, seconds = time.perf_counter(), 0.0
        if (landed := decode_landed(notice)) is not None:
            seconds = self._seconds(len(landed.blocks), landed.layers)
        self._last_at["in"] = max(self._last_at["in"], now - seconds) + seconds
        self._arriving.append(partial(deliver, notice))
        delay_s = max(0.0, self._last_at["in"] - now)
        asyncio.get_running_loop().call_later(delay_s, lambda: self._arriving.popleft()())

    def _seconds(self, num_blocks: int, layers: range) -> float:
        share = len(layers) / self.layout.num_layers
        return num_blocks * share * self.layout.block_bytes * self._s_per_byte

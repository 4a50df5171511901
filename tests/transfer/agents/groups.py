"""Groups of agents over the fixtures' pools, and whole writes between them."""

from collections.abc import Callable
from typing import Any

from tandem.transfer.agents.group import TransferGroup, WriteOrder
from tandem.transfer.agents.link import Link
from tandem.transfer.config import TransferConfig
from tests.transfer.pools import Pool

MakePool = Callable[..., Pool]
Start = Callable[..., Any]

LOOPBACK = TransferConfig(backend="loopback")


async def write(
    group: TransferGroup, link: Link, pairs: list[tuple[int, int]], notice: bytes
) -> bytes:
    layers = range(group.layout.num_layers)
    order = WriteOrder(link.rank_pairs[0], layers, pairs, lambda sums: notice)
    return await group.write(link, order)


async def loopback_pair(
    make_pool: MakePool, start_group: Start, num_spare_blocks: int = 4
) -> tuple[TransferGroup, TransferGroup]:
    pools = [make_pool(8, num_spare_blocks=num_spare_blocks) for _ in range(2)]
    p = await start_group("p", [pools[0]], config=LOOPBACK)
    return p, await start_group("d", [pools[1]], config=LOOPBACK)

"""A worker and its callers while etcd and NATS are away, and when etcd comes back empty."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from tandem.runtime.config import RuntimeConfig
from tests.sdk.kit_pair import PATIENCE_S, Pair, data_of
from tests.services import EtcdServer, NatsServer, eventually


async def count(request: Any) -> AsyncIterator[int]:
    for number in range(request):
        yield number
        await asyncio.sleep(0)


async def test_no_request_fails_while_etcd_is_away_and_the_worker_is_put_into_an_empty_one() -> (
    None
):
    with NatsServer() as nats, EtcdServer() as etcd:
        config = RuntimeConfig(nats_url=nats.url, etcd_endpoints=etcd.url, lease_ttl_s=4)
        async with Pair(config) as pair:
            client = await pair.serve(count)
            await pair.worker.put("/tandem/tandem/models/m/1", b"{}")
            asked = asyncio.create_task(ask_until_told(client))
            etcd.kill()
            nats.kill()
            await eventually(
                lambda: not (pair.worker.discovery.connected or pair.worker.nats.connected)
            )
            await asyncio.to_thread(etcd.restart, empty=True)
            await asyncio.to_thread(nats.start)
            await eventually(lambda: pair.worker.discovery.connected and pair.worker.nats.connected)
            again = pair.caller.discovery.watch("/tandem/")
            key = client.address.instance_key(pair.worker.instance_id)
            await again.wait_for(
                lambda items: key in items and "/tandem/tandem/models/m/1" in items, PATIENCE_S
            )
            asked.cancel()
            num_asked = await asked
            assert num_asked > 0 and client.instance_ids() == [pair.worker.instance_id]


async def ask_until_told(client: Any) -> int:
    """How many requests were answered in full before it was cancelled; raises the first error."""
    num_asked = 0
    try:
        while True:
            assert await data_of(await client.generate(3)) == [0, 1, 2]
            num_asked += 1
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        return num_asked

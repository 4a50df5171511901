"""The wait until decode workers know the prefill workers."""

import asyncio
from collections.abc import Sequence

from tandem.runtime.address import new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.membership.instance_report import ask_worker
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.wire.cluster_messages import Instance

KNOWN_RETRY_S = 0.05


async def until_known(runtime: RuntimeConfig, instances: Sequence[Instance]) -> None:
    """Wait until each decode worker knows all prefill workers among `instances`.

    Before that it would prefill every prompt itself, whatever its policy.
    """
    num_prefill = sum(instance.component == "prefill" for instance in instances)
    decodes = [instance for instance in instances if instance.component == "decode"]
    client = RequestClient(runtime, new_id())
    try:
        for decode in decodes:
            while not await _knows(client, decode, num_prefill):
                await asyncio.sleep(KNOWN_RETRY_S)
    finally:
        await client.close()


async def _knows(client: RequestClient, decode: Instance, num_prefill: int) -> bool:
    worker = (await ask_worker(client, decode)).worker
    if worker is None:
        return False
    return int(worker.details.get("num_prefill_instances", num_prefill)) >= num_prefill

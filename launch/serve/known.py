"""The wait until decode workers know the prefill workers."""

import asyncio
from collections.abc import Callable, Sequence

from tandem.runtime.address import new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.membership.instance_report import ask_worker
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.wire.cluster_messages import Instance

KNOWN_RETRY_S = 0.05


async def until_known(runtime: RuntimeConfig, members: Callable[[], Sequence[Instance]]) -> None:
    """Wait until each decode worker knows all prefill workers among the present members.

    Before that it would prefill every prompt itself, whatever its policy. One that has just died is
    a member until its lease ends.
    """
    client = RequestClient(runtime, new_id())
    try:
        while not await _know_all(client, members()):
            await asyncio.sleep(KNOWN_RETRY_S)
    finally:
        await client.close()


async def _know_all(client: RequestClient, members: Sequence[Instance]) -> bool:
    num_prefill = sum(member.component == "prefill" for member in members)
    for member in members:
        if member.component == "decode" and not await _knows(client, member, num_prefill):
            return False
    return True


async def _knows(client: RequestClient, decode: Instance, num_prefill: int) -> bool:
    worker = (await ask_worker(client, decode)).worker
    if worker is None:
        return False
    return int(worker.details.get("num_prefill_instances", num_prefill)) >= num_prefill

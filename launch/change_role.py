"""`tandem role`: change the role of a running worker, and see that the new one serves."""

import asyncio
from typing import get_args

import msgspec

from tandem.launch.config.model import EffectiveConfig
from tandem.launch.one_worker import one_worker
from tandem.runtime.address import EndpointAddress, new_id
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ConfigError, ServiceError
from tandem.runtime.messages import (
    GenerateRequest,
    Instance,
    RoleChange,
    SamplingParams,
    StopConditions,
    TokenDelta,
    WorkerRole,
    WorkerStatus,
    encode,
    pack_tokens,
    role_names,
)
from tandem.runtime.names import did_you_mean
from tandem.runtime.plane.client import RequestClient

CHANGE_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 10.0
PROBE_TOKENS = [0, 1]


def checked_role(role: str) -> WorkerRole:
    """Return `role`. Raises ConfigError for another name."""
    names: tuple[WorkerRole, ...] = get_args(WorkerRole)
    for name in names:
        if name == role:
            return name
    raise ConfigError(f"role {role!r} is none of a worker; {did_you_mean(role, names)}")


def run_change_role(effective: EffectiveConfig, instance_id: str, role: str) -> None:
    """Change the role and print a line. Raises ServiceError when the worker can't."""
    status = asyncio.run(change_role(effective, instance_id, checked_role(role)))
    print(f"worker {status.instance.instance_id} has the role {status.load.role}")


async def change_role(
    effective: EffectiveConfig, instance_id: str, role: WorkerRole
) -> WorkerStatus:
    """Change the role of the worker whose id begins with `instance_id`; return its status.

    Raises NotFoundError for no such worker, and the worker's own errors.
    """
    async with one_worker(effective, instance_id) as (client, instance):
        async with RequestContext(timeout_s=CHANGE_TIMEOUT_S) as context:
            change = encode(RoleChange(role))
            answer = await client.call(instance.address, "change_role", change, context)
        status = msgspec.msgpack.decode(answer, type=WorkerStatus)
        if "decode" in role_names(role):
            await _probe(client, instance)
        return status


async def _probe(client: RequestClient, instance: Instance) -> None:
    """Generate one token at the worker. Raises ServiceError if it can't."""
    request = GenerateRequest(
        request_id=new_id(),
        model=instance.model,
        token_ids=pack_tokens(PROBE_TOKENS),
        sampling=SamplingParams(temperature=0),
        stop=StopConditions(max_tokens=1, ignore_eos=True),
        prefill_place="local",
        deadline_ms=round(PROBE_TIMEOUT_S * 1e3),
    )
    endpoint = str(EndpointAddress(instance.namespace, "decode", "generate"))
    async with RequestContext(timeout_s=PROBE_TIMEOUT_S) as context:
        stream = await client.open(instance.address, endpoint, encode(request), context)
        async with stream:
            async for item in stream:
                if msgspec.msgpack.decode(item, type=TokenDelta).finish_reason is not None:
                    return
    raise ServiceError(f"worker {instance.instance_id} did not answer a request of one token")

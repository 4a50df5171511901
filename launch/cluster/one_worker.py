"""`tandem role` and `tandem control`: an operator's commands to one running worker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem.config.live import connected
from tandem.config.model import EffectiveConfig
from tandem.runtime.address import EndpointAddress, new_id
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import NotFoundError, ServiceError
from tandem.runtime.membership.instance_report import decode_status
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.store.discovery import Discovery, read_instances
from tandem.runtime.wire.cluster_messages import (
    ControlName,
    ControlOutcome,
    Instance,
    RoleChange,
    WorkerControl,
    WorkerRole,
    WorkerStatus,
    role_names,
)
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.messages import (
    GenerateRequest,
    SamplingParams,
    StopConditions,
    TokenDelta,
    encode,
    pack_tokens,
)

CHANGE_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 10.0
PROBE_TOKENS = [0, 1]
CONTROL_TIMEOUT_S = 60.0  # beyond the duration of a profile: its trace is written

_decode_delta = decoder(TokenDelta)
_decode_outcome = decoder(ControlOutcome)


def run_change_role(effective: EffectiveConfig, instance_id: str, role: WorkerRole) -> None:
    """Change the role and print a line. Raise ServiceError when the worker can't."""
    status = asyncio.run(change_role(effective, instance_id, role))
    print(f"worker {status.instance.instance_id} has the role {status.load.role}")


async def change_role(
    effective: EffectiveConfig, instance_id: str, role: WorkerRole
) -> WorkerStatus:
    """Change the role of the worker whose id begins with `instance_id`; return its status.

    Raise NotFoundError for no such worker, and the worker's own errors.
    """
    async with _one_worker(effective, instance_id) as (client, instance):
        async with RequestContext(timeout_s=CHANGE_TIMEOUT_S) as context:
            change = encode(RoleChange(role))
            answer = await client.call(instance.address, "change_role", change, context)
        status = decode_status(answer)
        if "decode" in role_names(role):
            await probe(client, instance)
        return status


async def probe(client: RequestClient, instance: Instance) -> None:
    """Generate one token at the worker. Raise ServiceError if it can't."""
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
                if _decode_delta(item).finish_reason is not None:
                    return
    raise ServiceError(f"worker {instance.instance_id} did not answer a request of one token")


def run_control(
    effective: EffectiveConfig, instance_id: str, name: ControlName, duration_s: float
) -> None:
    """Send a command to the worker's engine and print the outcome. Raise the worker's errors."""
    control = WorkerControl(name, round(duration_s * 1e3))
    print(asyncio.run(_send(effective, instance_id, control)).message)


async def _send(
    effective: EffectiveConfig, instance_id: str, control: WorkerControl
) -> ControlOutcome:
    async with (
        _one_worker(effective, instance_id) as (client, instance),
        RequestContext(timeout_s=CONTROL_TIMEOUT_S + control.duration_ms / 1e3) as context,
    ):
        answer = await client.call(instance.address, "control", encode(control), context)
        return _decode_outcome(answer)


# ---- the worker -------------------------------------------------------------------------------


@asynccontextmanager
async def _one_worker(
    effective: EffectiveConfig, instance_id: str
) -> AsyncIterator[tuple[RequestClient, Instance]]:
    """Yield a client, and the worker whose id begins with `instance_id`.

    Raise NotFoundError for none or several, and ServiceError where etcd is not reachable.
    """
    runtime = effective.config.runtime
    client = RequestClient(runtime, new_id())
    try:
        async with connected(effective) as discovery:
            instance = await _find(discovery, runtime.namespace, instance_id)
        yield client, instance
    finally:
        await client.close()


async def _find(discovery: Discovery, namespace: str, instance_id: str) -> Instance:
    workers = await read_instances(discovery, namespace, ("decode", "prefill"))
    found = [each for each in workers.values() if each.instance_id.startswith(instance_id)]
    if len(found) != 1:
        which = f"{len(found)} workers" if found else "no worker"
        raise NotFoundError(f"{which} of namespace {namespace} begin with {instance_id!r}")
    return found[0]

"""`tandem control`: a command to the engine of a running worker."""

import asyncio
from typing import get_args

import msgspec

from tandem.launch.config.model import EffectiveConfig
from tandem.launch.one_worker import one_worker
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ConfigError
from tandem.runtime.messages import ControlName, ControlOutcome, WorkerControl, encode
from tandem.runtime.names import did_you_mean

TIMEOUT_S = 60.0  # beyond the duration of a profile: its trace is written


def run_control(effective: EffectiveConfig, instance_id: str, name: str, duration_s: float) -> None:
    """Send the command and print its outcome. Raises the worker's own errors."""
    control = WorkerControl(_checked_name(name), round(duration_s * 1e3))
    print(asyncio.run(_send(effective, instance_id, control)).message)


async def _send(
    effective: EffectiveConfig, instance_id: str, control: WorkerControl
) -> ControlOutcome:
    async with (
        one_worker(effective, instance_id) as (client, instance),
        RequestContext(timeout_s=TIMEOUT_S + control.duration_ms / 1e3) as context,
    ):
        answer = await client.call(instance.address, "control", encode(control), context)
        return msgspec.msgpack.decode(answer, type=ControlOutcome)


def _checked_name(name: str) -> ControlName:
    names: tuple[ControlName, ...] = get_args(ControlName)
    for each in names:
        if each == name:
            return each
    raise ConfigError(f"control {name!r} is none of a worker; {did_you_mean(name, names)}")

"""An operator's commands to the engine of a worker, over the request plane."""

import asyncio
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tandem.engine.loop import EngineLoop
from tandem.runtime.cluster_messages import ControlOutcome, WorkerControl
from tandem.runtime.context import RequestContext
from tandem.runtime.decoding import decoder
from tandem.runtime.errors import InvalidRequestError, UnavailableError
from tandem.runtime.messages import encode
from tandem.runtime.plane.server import Responder

MAX_PROFILE_MS = 10_000  # a second of small steps is some ten megabytes of trace

_decode_control = decoder(WorkerControl, InvalidRequestError)


class Controls:
    """The `control` endpoint of a worker."""

    def __init__(self, loop: EngineLoop, instance_id: str) -> None:
        self._loop = loop
        self._instance_id = instance_id
        self._profiling = asyncio.Lock()

    async def serve(self, payload: bytes, context: RequestContext, answer: Responder) -> None:
        """Carry a command out. Raise InvalidRequestError naming the field of a bad one."""
        control = _decode_control(payload)
        if control.name == "profile":
            message = await self._profile(control.duration_ms)
        else:
            message = await self._clear_prefix_cache()
        answer.send(encode(ControlOutcome(message)))

    async def _clear_prefix_cache(self) -> str:
        num_blocks = await self._loop.call(lambda engine: engine.block_pool.clear_cache())
        return f"{num_blocks} cached blocks are free"

    async def _profile(self, duration_ms: int) -> str:
        """Record the engine thread with torch.profiler; return the path of the Chrome trace."""
        if not 1 <= duration_ms <= MAX_PROFILE_MS:
            raise InvalidRequestError(
                f"duration_ms: {duration_ms} is not between 1 and {MAX_PROFILE_MS}",
                param="duration_ms",
            )
        if self._profiling.locked():
            raise UnavailableError(f"{self._instance_id} is taking a profile already")
        async with self._profiling:
            profiler = _profiler()
            await self._loop.call(lambda _: profiler.start())
            try:
                await asyncio.sleep(duration_ms / 1e3)
            finally:
                await self._loop.call(lambda _: profiler.stop())
            path = Path(tempfile.mkdtemp(prefix="tandem-profile-")) / f"{self._instance_id}.json"
            await asyncio.to_thread(profiler.export_chrome_trace, str(path))
        return f"{duration_ms} ms of the engine are in {path}"


def _profiler() -> profile:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities)

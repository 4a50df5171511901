"""An operator's commands to the engine of a worker, over the request plane."""

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from tandem.engine.core.loop import EngineLoop
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import InvalidRequestError, UnavailableError
from tandem.runtime.plane.server import Responder
from tandem.runtime.wire.cluster_messages import ControlOutcome, WorkerControl
from tandem.runtime.wire.decoding import decoder
from tandem.runtime.wire.messages import encode

MAX_PROFILE_MS = 10_000  # a second of small steps is some ten megabytes of trace
# An end of recording and its export hold Python's lock for 4 microseconds an event, and each stream
# of the worker meanwhile: as long as the recording took where steps are small.
PART_MS = 50

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
            folder = Path(tempfile.mkdtemp(prefix="tandem-profile-"))
            parts = [folder / f"part-{start}.json" for start in range(0, duration_ms, PART_MS)]
            for index, part in enumerate(parts):
                await self._record(part, min(PART_MS, duration_ms - index * PART_MS))
            path = folder / f"{self._instance_id}.json"
            await asyncio.to_thread(_join_parts, parts, path)
        return f"{duration_ms} ms of the engine are in {path}"

    async def _record(self, part: Path, duration_ms: int) -> None:
        profiler = await asyncio.to_thread(_new_profiler)
        await self._loop.call(lambda _: profiler.__enter__())
        try:
            await asyncio.sleep(duration_ms / 1e3)
        finally:
            await self._loop.call(lambda _: profiler.__exit__(None, None, None))
        await asyncio.to_thread(profiler.export_chrome_trace, str(part))


def _new_profiler() -> Any:
    # Imported here: an emulated worker has no torch. Not torch.profiler, which imports for a second
    import torch
    from torch.autograd.profiler import profile

    return profile(use_device="cuda" if torch.cuda.is_available() else None)


def _join_parts(parts: list[Path], path: Path) -> None:
    """Write the events of all parts to `path`, and remove the parts. Their clock is the same."""
    with path.open("w") as file:
        for part in parts:
            trace = json.loads(part.read_bytes())
            events = ",".join(map(json.dumps, trace.pop("traceEvents")))
            if part == parts[0]:
                file.write(json.dumps(trace)[:-1] + ', "traceEvents": [')
            elif events:
                file.write(",\n")
            file.write(events)
            part.unlink()
        file.write("]}")

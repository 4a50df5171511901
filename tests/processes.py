"""Output of child processes that were started with pipes."""

import asyncio

from tandem.launch.supervise.child_process import ChildProcess


async def output_of(child: ChildProcess) -> tuple[bytes, bytes]:
    """Return what a child still writes to its two pipes, once it has ended."""

    async def rest(reader: asyncio.StreamReader | None) -> bytes:
        return b"" if reader is None else await reader.read()

    out, err = await asyncio.gather(rest(child.stdout), rest(child.stderr))
    await child.wait()
    return out, err

"""`tandem serve` as a user runs it."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from tandem.runtime.local.child_process import ChildProcess
from tests.services import free_port

READY_TIMEOUT_S = 120.0


@contextlib.asynccontextmanager
async def serving(topology: str, folder: Path, *flags: str) -> AsyncIterator[str]:
    """Serve the bundled model by a topology, or a file of one; yield the URL once it is ready.

    Its processes log in `folder` / "run".
    """
    port = free_port()
    command = [sys.executable, "-P", "-m", "tandem.launch", "serve", "bundled"]
    command += [
        "--topology",
        topology,
        "--port",
        str(port),
        "--run-dir",
        str(folder / "run"),
        *flags,
    ]
    environment = os.environ | {"XDG_STATE_HOME": str(folder / "state")}
    child = await ChildProcess.start(command, folder / "serve.log", env=environment)
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while "ready: http" not in (folder / "serve.log").read_text():
                assert child.exit_code is None, child.log_tail()
                await asyncio.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        await child.stop(30.0)

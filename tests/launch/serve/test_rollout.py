"""The rollout of a `tandem serve`: its socket, and a successor that does not come to serve."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tandem.launch.serve.control import Control, Say, command
from tandem.launch.serve.rollout import Rollout
from tandem.launch.supervise.managed_process import ManagedProcess
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ServiceError
from tandem.runtime.store.discovery import WatchView


@asynccontextmanager
async def serving(control: Control) -> AsyncIterator[Path]:
    await control.start()
    try:
        yield control.path
    finally:
        await control.close()


async def test_a_client_gets_every_line_and_the_folder_is_gone_at_the_end() -> None:
    async def roll_out(say: Say, argument: str) -> str:
        say("one")
        say(argument)
        return "three"

    said: list[str] = []
    async with serving(Control({"rollout": roll_out})) as path:
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert await command(path, "rollout two words", said.append) == "three"
        with pytest.raises(ServiceError, match="the command is not known"):
            await command(path, "roll out")
    assert said == ["one", "two words", "three"]
    assert not path.parent.exists()
    with pytest.raises(ServiceError, match="no `tandem serve` answers"):
        await command(path, "rollout")


async def test_one_command_runs_at_a_time_and_a_lost_client_does_not_end_it() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()
    ended = asyncio.Event()

    async def roll_out(_: Say, argument: str) -> str:
        begun.set()
        await may_end.wait()
        ended.set()
        return "over"

    async with serving(Control({"rollout": roll_out})) as path:
        first = asyncio.create_task(command(path, "rollout"))
        await begun.wait()
        with pytest.raises(ServiceError, match="`rollout` is under way"):
            await command(path, "rollout")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        may_end.set()
        await asyncio.wait_for(ended.wait(), 60)


async def test_the_end_of_the_server_is_an_error_of_its_client() -> None:
    begun = asyncio.Event()

    async def roll_out(_: Say, argument: str) -> str:
        begun.set()
        await asyncio.Event().wait()
        return "over"

    async with serving(Control({"rollout": roll_out})) as path:
        client = asyncio.create_task(command(path, "rollout"))
        await begun.wait()
    with pytest.raises(ServiceError, match="ended during `rollout`"):
        await asyncio.wait_for(client, 60)


async def test_a_successor_that_ends_leaves_its_elder_alone(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, time\n"
        "first = pathlib.Path(sys.argv[1])\n"
        "if first.exists(): sys.exit('the model is gone')\n"
        "first.touch()\n"
        "time.sleep(600)\n"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "first")]
    child = ManagedProcess("worker-0", "worker", words, {}, tmp_path, placement="CPU")
    await child.start()
    try:
        async with asyncio.timeout(60):
            while not (tmp_path / "first").exists():
                await asyncio.sleep(0.01)
        elder = child.child
        view = WatchView("", lambda _: None)
        rollout = Rollout([child], view, RuntimeConfig(), 60.0, 1.0, print)
        with pytest.raises(ServiceError, match=r"worker-0 exited with 1; .*\n.*the model is gone"):
            await rollout.run()
        assert child.child is elder and elder.exit_code is None
    finally:
        child.kill()
        await child.child.wait()

"""The command `tandem top`: readings on one side, keys on the other, and a screen of both."""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.live import Live

from tandem.config.model import EffectiveConfig
from tandem.launch.cluster.one_worker import change_role
from tandem.launch.top.board import Board
from tandem.launch.top.collect import read
from tandem.launch.top.keyboard import keys
from tandem.launch.top.roles import RoleChanges, Worker
from tandem.launch.top.screen import View, draw
from tandem.runtime.errors import ConfigError, TandemError
from tandem.runtime.tasks import ends_within
from tandem.runtime.wire.cluster_messages import WorkerRole

REDRAW_S = 1.0
Load = Callable[[], EffectiveConfig]
CLOSE_S = 1.0  # for the connections of a reading that is cut off


def run_top(load: Load, api_key_env: str | None, interval_s: float) -> None:
    """Show the cluster until `q`. Raise ConfigError without a terminal or without the key.

    The config is loaded for each reading: a cluster that starts later is found.
    """
    load()
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("tandem top needs a terminal; tandem status --json is for programs")
    headers = _headers(api_key_env)
    logging.disable()  # a line of a log would tear the screen; the screen has the problems
    asyncio.run(_Top(load, headers, interval_s).run())


def _headers(api_key_env: str | None) -> dict[str, str]:
    if api_key_env is None:
        return {}
    if not (key := os.environ.get(api_key_env)):
        raise ConfigError(f"${api_key_env} is not set", param="--api-key-env")
    return {"Authorization": f"Bearer {key}"}


class _Top:
    """One session at a terminal."""

    def __init__(self, load: Load, headers: Mapping[str, str], interval_s: float) -> None:
        self._load = load
        self._headers = headers
        self._interval_s = interval_s
        self._board = Board()
        self._view = View()
        self._is_ended = False
        self._changed = asyncio.Event()
        self._roles = RoleChanges(self._change_role, self._changed.set)

    async def run(self) -> None:
        """Draw at every key and reading, and once a second, until the end."""
        reading = asyncio.create_task(self._read())
        reading.add_done_callback(lambda _: self._changed.set())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_key, "q")
        try:
            console = Console(highlight=False)
            with keys(self._on_key), Live(console=console, screen=True, auto_refresh=False) as live:
                while not self._is_ended and not reading.done():
                    self._changed.clear()
                    now_s = time.perf_counter()
                    note = self._roles.note(now_s)
                    shown = draw(self._board, self._view, now_s, console.height, note)
                    live.update(shown, refresh=True)
                    await ends_within(self._changed.wait(), REDRAW_S)
        finally:
            self._roles.close()
            reading.cancel()
            done, _ = await asyncio.wait({reading}, timeout=CLOSE_S)
        for task in done:
            if not task.cancelled():
                task.result()

    async def _read(self) -> None:
        """Read the cluster at every interval; a reading that fails is a line on the screen."""
        while True:
            try:
                found = await read(self._load(), self._headers)
                if not self._view.is_paused:
                    self._board.add(time.perf_counter(), found)
            except TandemError as error:
                self._board.problems = (error.message,)
            self._changed.set()
            await asyncio.sleep(self._interval_s)

    async def _change_role(self, instance_id: str, role: WorkerRole) -> None:
        await change_role(self._load(), instance_id, role)

    def _selected(self) -> Worker | None:
        """Return the selected process if it is a worker that has answered."""
        member = self._board.members.get(self._view.selected)
        if member is None or member.last is None:
            return None
        return Worker(self._view.selected, member.last.load.role)

    def _on_key(self, name: str) -> None:
        if self._roles.press(name, self._selected()):
            pass
        elif name == "q":
            self._is_ended = True
        elif name == " ":
            self._view.is_paused = not self._view.is_paused
        elif name in ("up", "down"):
            self._view.move(self._board, 1 if name == "down" else -1)
        self._changed.set()

"""UCX transports for the tests: one in this process, one in another."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tandem.runtime.local.child_process import DEATHWATCH
from tandem.transfer.transport import BlockGrid, Parts
from tandem.transfer.ucx.transport import UcxTransport
from tests.services import stands_still

BLOCK = 4096
WHOLE: Parts = ((0, BLOCK),)


class Side:
    """A transport over a pool of random bytes (or zeros), and what it has heard."""

    def __init__(self, name: str, num_blocks: int = 64, *, zeros: bool = False) -> None:
        generator = np.random.default_rng(len(name))
        self.blocks = generator.integers(0, 256, (num_blocks, BLOCK), np.uint8)
        if zeros:
            self.blocks[:] = 0
        self.grid = BlockGrid(self.blocks.ctypes.data, BLOCK, num_blocks, "DRAM", 0)
        self.transport = UcxTransport(name)
        self.transport.register(self.grid)
        self.heard: list[tuple[str, bytes]] = []

    def listen(self) -> None:
        self.heard += self.transport.notifications()

    def add(self, peer: "Side", local: Parts = WHOLE, remote: Parts = WHOLE) -> object:
        name = self.transport.add_peer(peer.transport.metadata(), peer.grid)
        return self.transport.prepare(name, local, remote)


def until(condition: Callable[[], bool], *sides: Side, timeout_s: float = 60) -> None:
    deadline = time.perf_counter() + timeout_s
    while not condition():
        assert time.perf_counter() < deadline, "the condition never held"
        for side in sides:
            side.listen()


def rounds(*sides: Side, count: int = 200) -> None:
    for _ in range(count):
        for side in sides:
            side.listen()


def finish(source: Side, handle: object, *others: Side) -> None:
    try:
        until(lambda: source.transport.poll(handle), source, *others)
    finally:
        source.transport.release(handle)


class Peer:
    """A running ucx_peer.py."""

    def __init__(self, name: str, num_blocks: int, block_bytes: int) -> None:
        script = Path(__file__).with_name("peer.py")
        peer = [sys.executable, str(script), name, str(num_blocks), str(block_bytes)]
        # A stopped peer would outlive a test process that dies, and keep the run's stderr open.
        self.process = subprocess.Popen(
            [sys.executable, str(DEATHWATCH), str(os.getpid()), *peer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        metadata, address = self.line()
        self.metadata = bytes.fromhex(metadata)
        self.grid = BlockGrid(address, block_bytes, num_blocks, "DRAM", 0)

    def line(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            until(lambda: stands_still(self.process.pid))

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def sides() -> Iterator[Callable[..., Side]]:
    """Makes sides, as `Side(...)` does, and closes them all at the end."""
    made: list[Side] = []

    def make(name: str, num_blocks: int = 64, *, zeros: bool = False) -> Side:
        made.append(Side(name, num_blocks, zeros=zeros))
        return made[-1]

    yield make
    for side in made:
        side.transport.close()


@contextmanager
def peers() -> Iterator[Callable[..., Peer]]:
    """Starts peers, as `Peer(...)` does, and kills them all at the end."""
    started: list[Peer] = []

    def spawn(name: str, num_blocks: int) -> Peer:
        started.append(Peer(name, num_blocks, BLOCK))
        return started[-1]

    yield spawn
    for peer in started:
        peer.kill()

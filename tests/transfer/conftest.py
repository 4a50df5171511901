"""Pools, groups and peer processes for the transfer tests."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.launch.supervise.child_process import PIPE, ChildProcess
from tandem.runtime.messages import RankMetadata, TransferMetadata
from tandem.transfer.config import TransferConfig
from tandem.transfer.group import TransferGroup
from tandem.transfer.layout import KvLayout
from tests.transfer import pools
from tests.transfer.pools import Pool

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, block_size=16, head_dim=32, dtype="bfloat16")
TIMEOUT_S = 60


@pytest.fixture
def layout() -> KvLayout:
    return LAYOUT


@pytest.fixture
def make_pool() -> Callable[..., Pool]:
    """One rank's pool: `make_pool(num_blocks, layout, fill="zero", num_spare_blocks=0)`."""

    def make(num_blocks: int, layout: KvLayout = LAYOUT, **options: Any) -> Pool:
        return pools.make_pool(num_blocks, layout, **options)

    return make


@pytest.fixture
async def start_group() -> AsyncIterator[Callable[..., Any]]:
    """Started TransferGroups, closed at the end; `heard` gets (rank, message)."""
    groups: list[TransferGroup] = []

    async def start(
        instance_id: str,
        pools: Sequence[Pool],
        layout: KvLayout = LAYOUT,
        *,
        epoch: str = "e1",
        config: TransferConfig | None = None,
        heard: "asyncio.Queue[tuple[int, bytes]] | None" = None,
    ) -> TransferGroup:
        group = TransferGroup(config or TransferConfig(), layout, pools, instance_id, epoch)
        groups.append(group)
        inbox: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue() if heard is None else heard
        await group.start(lambda rank, data: inbox.put_nowait((rank, data)))
        return group

    yield start
    for group in groups:
        await group.close()


class PeerProcess:
    """A running peer_process.py."""

    def __init__(
        self, process: ChildProcess, layout: KvLayout, num_blocks: int, num_spare_blocks: int
    ) -> None:
        self.process = process
        self.notifications: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self.ranks: dict[str, RankMetadata] = {}  # "instance.rank" |-> how to reach it
        self._layout = layout
        self._num_blocks = num_blocks
        self._num_spare_blocks = num_spare_blocks
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    async def started(self) -> None:
        raw = await asyncio.wait_for(self._answers.get(), 60)
        self.ranks = msgspec.convert(raw, dict[str, RankMetadata])

    async def ask(self, command: str, **fields: object) -> Any:
        """The answer to one of peer_process.py's commands."""
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode({"type": command, **fields}) + b"\n")
        return await asyncio.wait_for(self._answers.get(), TIMEOUT_S)

    async def ask_bytes(self, command: str, **fields: object) -> bytes:
        """`ask`, where the answer is bytes."""
        return msgspec.convert(await self.ask(command, **fields), bytes)

    def metadata(self, instance_id: str, epoch: str = "e1") -> TransferMetadata:
        """The metadata of a worker all of whose ranks live here."""
        own = [key for key in self.ranks if key.rpartition(".")[0] == instance_id]
        return TransferMetadata(
            instance_id=instance_id,
            epoch=epoch,
            layout_hash=self._layout.digest(),
            layout=self._layout.describe(),
            transport="nixl",
            memory="DRAM",
            block_bytes=self._layout.block_bytes // len(own),
            num_blocks=self._num_blocks,
            num_spare_blocks=self._num_spare_blocks,
            ranks=[self.ranks[f"{instance_id}.{rank}"] for rank in range(len(own))],
        )

    async def notification(self) -> tuple[str, bytes]:
        """("instance.rank", message) of the next one that came."""
        return await asyncio.wait_for(self.notifications.get(), TIMEOUT_S)

    async def stop(self) -> None:
        """SIGSTOP; returns once every thread stands still."""
        os.kill(self.process.pid, signal.SIGSTOP)
        while set(thread_states(self.process.pid)) != {"T"}:
            await asyncio.sleep(0.002)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()
        await self._reader

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            message = msgspec.json.decode(line)
            if "heard" in message:
                data = msgspec.convert(message["data"], bytes)
                self.notifications.put_nowait((message["heard"], data))
            else:
                self._answers.put_nowait(message["answer"])


def thread_states(pid: int) -> list[str]:
    """One letter per thread; a process counts as stopped before all of its threads are."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return [stat.rpartition(")")[2].split()[0] for stat in stats]


@pytest.fixture
async def spawn_ranks() -> AsyncIterator[Callable[..., Any]]:
    """Starts peer processes that hold ranks of workers; all are killed at the end.

    `await spawn_ranks([("d", "e1", 2, 0), ...])`: (instance, epoch, tp_size, rank).
    """
    peers: list[PeerProcess] = []

    async def start(
        ranks: Sequence[tuple[str, str, int, int]],
        num_blocks: int = 64,
        layout: KvLayout = LAYOUT,
        *,
        fill: str = "zero",
        num_spare_blocks: int = 0,
    ) -> PeerProcess:
        fields = {
            "ranks": ranks,
            "num_blocks": num_blocks,
            "num_spare_blocks": num_spare_blocks,
            "fill": fill,
            "layout": asdict(layout),
        }
        process = await ChildProcess.start_piped(
            [sys.executable, "-m", "tests.transfer.peer_process", json.dumps(fields)],
            stdin=PIPE,
            stdout=PIPE,
            limit=2**26,  # an answer may be a whole pool
        )
        peer = PeerProcess(process, layout, num_blocks, num_spare_blocks)
        peers.append(peer)
        await peer.started()
        return peer

    yield start
    for peer in peers:
        await peer.kill()


@pytest.fixture
def spawn_peer(spawn_ranks: Callable[..., Any]) -> Callable[..., Any]:
    """A worker of one rank in a process: `await spawn_peer(instance_id, epoch)`."""

    async def start(instance_id: str, epoch: str = "e1", num_spare_blocks: int = 0) -> PeerProcess:
        rank = (instance_id, epoch, 1, 0)
        peer: PeerProcess = await spawn_ranks([rank], num_spare_blocks=num_spare_blocks)
        return peer

    return start

"""Pools, groups and peer processes for the transfer tests."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import pytest

from tandem.runtime.local.child_process import PIPE, ChildProcess
from tandem.runtime.wire.cluster_messages import TransferMetadata
from tandem.transfer.agents.group import TransferGroup
from tandem.transfer.config import TransferConfig
from tandem.transfer.layout import KvLayout
from tests.services import stands_still
from tests.transfer import pools
from tests.transfer.pools import LAYOUT, Pool

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

    metadata: TransferMetadata

    def __init__(self, process: ChildProcess) -> None:
        self.process = process
        self._heard: asyncio.Queue[bytes] = asyncio.Queue()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    async def started(self) -> None:
        answer = await asyncio.wait_for(self._answers.get(), TIMEOUT_S)
        self.metadata = msgspec.convert(answer, TransferMetadata)

    async def checksums(self, block_ids: list[int]) -> list[int]:
        """The checksums of whole blocks of its pool."""
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(block_ids) + b"\n")
        sums: list[int] = await asyncio.wait_for(self._answers.get(), TIMEOUT_S)
        return sums

    async def notification(self) -> bytes:
        """The next message that came."""
        return await asyncio.wait_for(self._heard.get(), TIMEOUT_S)

    async def stop(self) -> None:
        """SIGSTOP; returns once every thread stands still."""
        os.kill(self.process.pid, signal.SIGSTOP)
        while not stands_still(self.process.pid):
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
                self._heard.put_nowait(msgspec.convert(message["heard"], bytes))
            else:
                self._answers.put_nowait(message["answer"])


@pytest.fixture
async def spawn_peer() -> AsyncIterator[Callable[..., Any]]:
    """Starts workers of one rank in processes of their own; all are killed at the end."""
    peers: list[PeerProcess] = []

    async def start(instance_id: str, epoch: str = "e1", num_spare_blocks: int = 0) -> PeerProcess:
        arguments = [instance_id, epoch, str(num_spare_blocks)]
        process = await ChildProcess.start_piped(
            [sys.executable, "-m", "tests.transfer.peer_process", *arguments],
            stdin=PIPE,
            stdout=PIPE,
        )
        peer = PeerProcess(process)
        peers.append(peer)
        await peer.started()
        return peer

    yield start
    for peer in peers:
        await peer.kill()

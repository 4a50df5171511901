"""Pools and peers for the transfer tests."""

import asyncio
import base64
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tandem.runtime.messages import TransferMetadata
from tandem.transfer.agent import KvPoolView
from tandem.transfer.layout import KvLayout

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, block_size=16, head_dim=32, dtype="bfloat16")


@pytest.fixture
def layout() -> KvLayout:
    return LAYOUT


@pytest.fixture
def make_pool() -> Callable[..., KvPoolView]:
    def make(num_blocks: int, layout: KvLayout = LAYOUT, *, fill: str = "random") -> KvPoolView:
        shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size)
        dtype = getattr(torch, layout.dtype)
        empty = torch.zeros(*shape, layout.head_dim, dtype=dtype)
        if fill == "random":
            raw = empty.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
        return KvPoolView(empty, empty.data_ptr(), layout.block_bytes, num_blocks, "DRAM", 0)

    return make


class PeerProcess:
    """A running peer_process.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.notifications: asyncio.Queue[bytes] = asyncio.Queue()
        self.sums: asyncio.Queue[list[int]] = asyncio.Queue()
        self.metadata: asyncio.Future[TransferMetadata] = asyncio.get_running_loop().create_future()
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            message: dict[str, Any] = json.loads(line)
            if "metadata" in message:
                raw = base64.b64decode(message["metadata"])
                self.metadata.set_result(msgspec.msgpack.decode(raw, type=TransferMetadata))
            elif "notification" in message:
                self.notifications.put_nowait(base64.b64decode(message["notification"]))
            else:
                self.sums.put_nowait(message["sums"])

    async def checksums(self, block_ids: list[int]) -> list[int]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"sum": block_ids}).encode() + b"\n")
        return await asyncio.wait_for(self.sums.get(), 20)

    async def notification(self) -> bytes:
        return await asyncio.wait_for(self.notifications.get(), 20)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()
        await self.reader


@pytest.fixture
async def spawn_peer() -> AsyncIterator[Callable[..., Any]]:
    """Starts peer processes: `await spawn_peer(instance_id, epoch)`; all are killed at the end."""
    peers: list[PeerProcess] = []

    async def spawn(
        instance_id: str, epoch: str, num_blocks: int = 64, layout: KvLayout = LAYOUT
    ) -> PeerProcess:
        fields = {"id": instance_id, "epoch": epoch, "num_blocks": num_blocks}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("peer_process.py")),
            json.dumps({**fields, "layout": asdict(layout)}),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        peer = PeerProcess(process)
        peers.append(peer)
        await asyncio.wait_for(asyncio.shield(peer.metadata), 60)
        return peer

    yield spawn
    for peer in peers:
        await peer.kill()

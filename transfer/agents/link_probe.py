"""Measuring the link to a new peer, and warning if it is far slower than its memory allows."""

import os
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from tandem.transfer.agents.link import LinkRates
from tandem.transfer.checksum import host_bytes
from tandem.transfer.transport import KvMemory, Memory

NUM_SAMPLES = 5
SLOW_FRACTION = 0.1  # of the rate of the memory's kind; slower links are warned of
MIN_JUDGED_BYTES = 1 << 20  # of spare blocks: fewer bytes are too quick to show a rate

# The rate of GPU memory over the slowest link that is meant for it: a PCIe 5 x16 slot, or one
# 400 Gbit/s network card.
VRAM_BYTES_PER_S = 50e9

# A copy within the newest GPU's memory, or within a host's: a difference of two measurements that
# gives more was of the host's jitter.
FASTEST_BYTES_PER_S: dict[Memory, float] = {"VRAM": 4e12, "DRAM": 4e11}

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


class SpareLink(Protocol):
    """Transfers between the spare blocks of two workers, which hold no request's KV."""

    num_blocks: int
    block_bytes: int
    num_layers: int

    async def write(self, num_blocks: int, num_layers: int, *, checked: bool) -> None:
        """Write that many layers of blocks; `checked`: with the checksums of both sides."""

    async def read(self, num_blocks: int) -> None:
        """READ blocks and checksum them."""


async def measure(link: SpareLink, memory: Memory) -> LinkRates:
    """Measure a few transfers and return the rates that explain them; none is negative.

    The transfers are of one block, of all spare blocks (which are adjacent), and of half of the
    layers of all spare blocks (which are not).
    """
    num_blocks, cut = link.num_blocks, max(1, link.num_layers // 2)
    large_bytes = num_blocks * link.block_bytes
    one_s = await _best_s(lambda: link.write(1, link.num_layers, checked=True))
    adjacent_s = await _best_s(lambda: link.write(num_blocks, link.num_layers, checked=True))
    scattered_s = await _best_s(lambda: link.write(num_blocks, cut, checked=True))
    wire_s = await _best_s(lambda: link.write(num_blocks, link.num_layers, checked=False))
    read_s = await _best_s(lambda: link.read(num_blocks))
    fastest_s_per_byte = 1 / FASTEST_BYTES_PER_S[memory]
    s_per_byte = max((adjacent_s - one_s) / (large_bytes - link.block_bytes), fastest_s_per_byte)
    one_descriptor_s = one_s - link.block_bytes * s_per_byte
    expected_s = one_descriptor_s + large_bytes * cut / link.num_layers * s_per_byte
    descriptor_s = max(0.0, (scattered_s - expected_s) / (num_blocks - 1))
    overhead_s = max(1e-7, one_descriptor_s - descriptor_s)
    return LinkRates(
        overhead_s=overhead_s,
        descriptor_s=descriptor_s,
        s_per_byte=s_per_byte,
        read_s_per_byte=max(
            max(read_s - overhead_s - descriptor_s, read_s / 10) / large_bytes, fastest_s_per_byte
        ),
        wire_bytes_per_s=min(
            large_bytes / max(wire_s - overhead_s - descriptor_s, wire_s / 10),
            FASTEST_BYTES_PER_S[memory],
        ),
        core_share=core_share(memory),
    )


async def _best_s(transfer: Callable[[], Awaitable[None]]) -> float:
    """Return the quickest of a few: workers connect when they start, on a busy machine."""
    await transfer()  # warms the link up
    samples = []
    for _ in range(NUM_SAMPLES):
        started_at = time.perf_counter()
        await transfer()
        samples.append(time.perf_counter() - started_at)
    return min(samples)


def core_share(memory: Memory) -> float:
    """Return the share of a transfer's time that computing loses, which shares the host's cores."""
    if memory == "VRAM":
        return 0.1  # only the post runs on the host
    import torch  # here: a worker that only emulates has none

    return min(1.0, torch.get_num_threads() / (os.cpu_count() or 1))


def expected_bytes_per_s(pool: KvMemory, num_bytes: int) -> float:
    """Return the rate that a link between such pools should reach: in host memory, a copy's."""
    if pool.memory == "VRAM":
        return VRAM_BYTES_PER_S
    source = np.frombuffer(host_bytes(pool.tensor), np.uint8)[-num_bytes:]
    target = np.zeros_like(source)
    samples = []
    for _ in range(NUM_SAMPLES):
        started_at = time.perf_counter()
        np.copyto(target, source)
        samples.append(time.perf_counter() - started_at)
    return num_bytes / min(samples)


def complaint_about(
    name: str, rates: LinkRates, memory: Memory, expected: float, environ: Mapping[str, str]
) -> str:
    """Return a warning if a link has less than a tenth of the `expected` bytes per second."""
    if rates.wire_bytes_per_s >= SLOW_FRACTION * expected:
        return ""
    return (
        f"KV from {name} goes at {rates.wire_bytes_per_s / 1e9:.2f} GB/s, and {memory} should "
        f"give {expected / 1e9:.0f}; likely cause: {likely_cause(memory, environ)}"
    )


def likely_cause(memory: Memory, environ: Mapping[str, str]) -> str:
    """Return the likely cause of a slow link, from this process's environment."""
    wanted = {"cuda_ipc", "cuda"} if memory == "VRAM" else {"sm", "shm", "cma"}
    if _leaves_out(environ.get("UCX_TLS", "all"), wanted):
        return f"UCX_TLS={environ['UCX_TLS']} leaves out {'cuda_ipc' if memory == 'VRAM' else 'sm'}"
    if memory == "VRAM":
        if "expandable_segments:True" in environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            return "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True"
        return "no NVLink or GPUDirect RDMA between the two, so that KV moves through host memory"
    if _YAMA.exists() and _YAMA.read_text().strip() not in ("0", "1"):
        return f"{_YAMA} is {_YAMA.read_text().strip()}: cross-memory attach is not permitted"
    return "the two share no memory (other hosts, or containers without a common IPC namespace)"


def _leaves_out(ucx_tls: str, wanted: set[str]) -> bool:
    """Return True if UCX_TLS excludes `wanted`: it lists allowed transports or, after ^, others."""
    listed = {name.strip() for name in ucx_tls.removeprefix("^").split(",")}
    if ucx_tls.startswith("^"):
        return bool(listed & wanted)
    return not listed & {"all", *wanted}

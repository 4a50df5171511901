"""Measuring the way to a peer when it is met, and saying so when it is far below its kind."""

import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from tandem.transfer.link import LinkRates
from tandem.transfer.transport import Memory

NUM_SAMPLES = 5
SLOW_FRACTION = 0.1  # of what the memory's kind gives, below which somebody has to look
MIN_JUDGED_BYTES = 1 << 20  # of spare blocks: less is over before a rate shows

# What GPU memory should give over the slowest way that is meant for it: a PCIe 5 x16 slot, or one
# 400 Gbit/s network card.
VRAM_BYTES_PER_S = 50e9

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")

logger = logging.getLogger(__name__)


class SpareLink(Protocol):
    """Transfers between the spare blocks of two workers, which nobody else reads."""

    num_blocks: int
    block_bytes: int
    num_layers: int

    async def write(self, num_blocks: int, num_layers: int, *, checked: bool) -> None:
        """Write that many layers of blocks; `checked` checksums them as both sides would."""

    async def read(self, num_blocks: int) -> None:
        """READ blocks and checksum them."""


async def measure(link: SpareLink, memory: Memory) -> LinkRates:
    """The rates that explain a few transfers; none is negative.

    One block, all the spare ones whole (which are adjacent) and all of them by half of their
    layers (which are not) are told apart.
    """
    num_blocks, cut = link.num_blocks, max(1, link.num_layers // 2)
    large_bytes = num_blocks * link.block_bytes
    one_s = await _best_s(lambda: link.write(1, link.num_layers, checked=True))
    adjacent_s = await _best_s(lambda: link.write(num_blocks, link.num_layers, checked=True))
    scattered_s = await _best_s(lambda: link.write(num_blocks, cut, checked=True))
    wire_s = await _best_s(lambda: link.write(num_blocks, link.num_layers, checked=False))
    read_s = await _best_s(lambda: link.read(num_blocks))
    s_per_byte = max(adjacent_s - one_s, 1e-9) / (large_bytes - link.block_bytes)
    one_descriptor_s = one_s - link.block_bytes * s_per_byte
    expected_s = one_descriptor_s + large_bytes * cut / link.num_layers * s_per_byte
    descriptor_s = max(0.0, (scattered_s - expected_s) / (num_blocks - 1))
    overhead_s = max(1e-7, one_descriptor_s - descriptor_s)
    return LinkRates(
        overhead_s=overhead_s,
        descriptor_s=descriptor_s,
        s_per_byte=s_per_byte,
        read_s_per_byte=max(read_s - overhead_s - descriptor_s, read_s / 10) / large_bytes,
        wire_bytes_per_s=large_bytes / max(wire_s - overhead_s - descriptor_s, wire_s / 10),
        core_share=core_share(memory),
    )


async def _best_s(transfer: Callable[[], Awaitable[None]]) -> float:
    """The quickest of a few: workers meet when they start, and then the machine is busy."""
    await transfer()  # the first warms the way up
    samples = []
    for _ in range(NUM_SAMPLES):
        started_at = time.perf_counter()
        await transfer()
        samples.append(time.perf_counter() - started_at)
    return min(samples)


def core_share(memory: Memory) -> float:
    """How much of a transfer's time computing loses: in host memory they share the cores."""
    if memory == "VRAM":
        return 0.1  # only the posting is the host's
    return min(1.0, torch.get_num_threads() / (os.cpu_count() or 1))


def expected_bytes_per_s(pool: torch.Tensor, num_bytes: int) -> float:
    """What a way between pools like this one should give: for host memory, what a copy does."""
    if pool.device.type == "cuda":
        return VRAM_BYTES_PER_S
    source = pool.view(-1).view(torch.uint8)[-num_bytes:]
    target = torch.empty_like(source)
    samples = []
    for _ in range(NUM_SAMPLES):
        started_at = time.perf_counter()
        target.copy_(source)
        samples.append(time.perf_counter() - started_at)
    return num_bytes / min(samples)


def complaint_about(
    way: str, rates: LinkRates, memory: Memory, expected: float, environ: Mapping[str, str]
) -> str:
    """What to warn of, if a way gives less than a tenth of the `expected` bytes per second."""
    if rates.wire_bytes_per_s >= SLOW_FRACTION * expected:
        return ""
    return (
        f"KV from {way} goes at {rates.wire_bytes_per_s / 1e9:.2f} GB/s, and {memory} should give "
        f"{expected / 1e9:.0f}; likely cause: {likely_cause(memory, environ)}"
    )


def likely_cause(memory: Memory, environ: Mapping[str, str]) -> str:
    """Why a way may be slow, by what this process can see of itself."""
    wanted = {"cuda_ipc", "cuda"} if memory == "VRAM" else {"sm", "shm", "cma"}
    if _leaves_out(environ.get("UCX_TLS", "all"), wanted):
        return f"UCX_TLS={environ['UCX_TLS']} leaves out {'cuda_ipc' if memory == 'VRAM' else 'sm'}"
    if memory == "VRAM":
        if "expandable_segments:True" in environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            return "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True"
        return "no NVLink or GPUDirect RDMA between the two, so that it goes through host memory"
    if _YAMA.exists() and _YAMA.read_text().strip() not in ("0", "1"):
        return f"{_YAMA} is {_YAMA.read_text().strip()}: cross-memory attach is not permitted"
    return "the two share no memory (other hosts, or containers without a common IPC namespace)"


def _leaves_out(ucx_tls: str, wanted: set[str]) -> bool:
    """UCX_TLS lists the transports that may be used or, behind a ^, those that may not."""
    listed = {name.strip() for name in ucx_tls.removeprefix("^").split(",")}
    if ucx_tls.startswith("^"):
        return bool(listed & wanted)
    return not listed & {"all", *wanted}

from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.transfer.agents import link_probe as self_test
from tandem.transfer.agents.link import LinkRates
from tandem.transfer.agents.link_probe import (
    NUM_SAMPLES,
    complaint_about,
    core_share,
    expected_bytes_per_s,
    likely_cause,
    measure,
)
from tandem.transfer.transport import Memory
from tests.transfer.pools import LAYOUT, make_pool

RATES = LinkRates(1e-4, 1e-6, 1e-10, 1e-10, 1e9, 0.5)


class ScriptedLink:
    """A way whose transfers take what its numbers say, by a clock of its own."""

    def __init__(self, num_blocks: int, block_bytes: int, num_layers: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.num_layers = num_layers
        self.overhead_s = 2e-4
        self.descriptor_s = 3e-6
        self.s_per_byte = 4e-10
        self.wire_s_per_byte = 1e-10
        self.read_s_per_byte = 7e-10
        self.now = 1000.0
        self.num_transfers = 0
        self.stalls: list[float] = []  # of the next transfers

    async def write(self, num_blocks: int, num_layers: int, *, checked: bool) -> None:
        num_bytes = num_blocks * self.block_bytes * num_layers // self.num_layers
        num_descriptors = 1 if num_layers == self.num_layers else num_blocks
        self._take(num_bytes, num_descriptors, self.s_per_byte if checked else self.wire_s_per_byte)

    async def read(self, num_blocks: int) -> None:
        self._take(num_blocks * self.block_bytes, 1, self.read_s_per_byte)

    def _take(self, num_bytes: int, num_descriptors: int, s_per_byte: float) -> None:
        self.num_transfers += 1
        self.now += self.overhead_s + num_descriptors * self.descriptor_s + num_bytes * s_per_byte
        if self.stalls:
            self.now += self.stalls.pop(0)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedLink:
    link = ScriptedLink(64, 65_536, 4)
    monkeypatch.setattr(self_test, "time", SimpleNamespace(perf_counter=lambda: link.now))
    return link


@pytest.mark.parametrize(("num_blocks", "num_layers"), [(2, 2), (64, 4), (256, 7), (16, 1)])
async def test_a_measurement_finds_the_rates_that_a_way_has(
    scripted: ScriptedLink, num_blocks: int, num_layers: int
) -> None:
    scripted.num_blocks, scripted.num_layers = num_blocks, num_layers
    if num_layers == 1:
        scripted.descriptor_s = 0.0  # one layer can't be cut: not told apart from the overhead
    rates = await measure(scripted, "DRAM")
    assert rates.s_per_byte == pytest.approx(scripted.s_per_byte, rel=0.01)
    assert rates.descriptor_s == pytest.approx(scripted.descriptor_s, rel=0.01, abs=1e-12)
    assert rates.overhead_s == pytest.approx(scripted.overhead_s, rel=0.01)
    assert rates.read_s_per_byte == pytest.approx(scripted.read_s_per_byte, rel=0.01)
    if num_blocks > 2:  # else the wire is lost in the overhead
        assert rates.wire_bytes_per_s == pytest.approx(1 / scripted.wire_s_per_byte, rel=0.01)
    assert 0 < rates.core_share <= 1


async def test_a_stall_now_and_then_and_a_cold_start_change_nothing(scripted: ScriptedLink) -> None:
    undisturbed = await measure(scripted, "DRAM")
    per_kind = 1 + NUM_SAMPLES
    scripted.stalls = [0.5, 0.0, 0.02, 0.0, 0.3, 0.0] * (scripted.num_transfers // per_kind)
    assert per_kind == 6, "the cold one and two of five stall"
    disturbed = await measure(scripted, "DRAM")
    assert astuple(disturbed) == pytest.approx(astuple(undisturbed))


@settings(max_examples=30)
@given(
    st.lists(st.floats(0, 1e-2), min_size=40, max_size=40),
    st.integers(2, 300),
    st.integers(1, 4096),
    st.integers(1, 64),
)
async def test_no_rate_is_negative_or_without_end_whatever_is_measured(
    stalls: list[float], num_blocks: int, block_bytes: int, num_layers: int
) -> None:
    link = ScriptedLink(num_blocks, block_bytes, num_layers)
    link.stalls = list(stalls)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_test, "time", SimpleNamespace(perf_counter=lambda: link.now))
        rates = await measure(link, "DRAM")
    assert rates.descriptor_s >= 0
    for rate in (rates.overhead_s, rates.s_per_byte, rates.read_s_per_byte, rates.wire_bytes_per_s):
        assert 0 < rate < float("inf")


@pytest.mark.parametrize("memory", ["DRAM", "VRAM"])
async def test_no_link_is_measured_to_be_faster_than_memory(
    scripted: ScriptedLink, memory: Memory
) -> None:
    """On a GPU the wire takes less time than the host's jitter, and the difference may be none."""
    scripted.s_per_byte = scripted.wire_s_per_byte = scripted.read_s_per_byte = 0.0
    scripted.stalls = [1e-3] * (1 + NUM_SAMPLES)  # a block takes longer than all of them
    rates = await measure(scripted, memory)
    fastest = self_test.FASTEST_BYTES_PER_S[memory]
    assert rates.s_per_byte >= 1 / fastest and rates.read_s_per_byte >= 1 / fastest
    assert rates.wire_bytes_per_s <= fastest


async def test_a_slow_start_does_not_make_what_follows_free(scripted: ScriptedLink) -> None:
    scripted.stalls = [0.5] * (
        1 + NUM_SAMPLES
    )  # the writes of one block, that all else is held against
    rates = await measure(scripted, "DRAM")
    num_bytes = scripted.num_blocks * scripted.block_bytes
    assert num_bytes * rates.read_s_per_byte > 0.0001
    assert rates.wire_bytes_per_s < 1e12


def test_computing_loses_its_cores_to_transfers_in_host_memory_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for num_cpus, share in ((2, 1.0), (8, 0.25), (1, 1.0), (None, 1.0)):
        monkeypatch.setattr(self_test.os, "cpu_count", lambda num_cpus=num_cpus: num_cpus)
        assert core_share("DRAM") == share
        assert core_share("VRAM") == 0.1


def test_host_memory_should_give_what_a_copy_within_it_does() -> None:
    pool = make_pool(64, LAYOUT)
    assert 1e6 < expected_bytes_per_s(pool, 1 << 18) < 1e13


def test_a_tenth_of_what_the_memory_gives_is_complained_of_with_the_likely_cause() -> None:
    complaint = complaint_about("p to d", RATES, "DRAM", 11e9, {"UCX_TLS": "tcp"})
    assert complaint == (
        "KV from p to d goes at 1.00 GB/s, and DRAM should give 11; "
        "likely cause: UCX_TLS=tcp leaves out sm"
    )
    assert complaint_about("p to d", RATES, "DRAM", 10e9, {"UCX_TLS": "tcp"}) == ""


@pytest.mark.parametrize(
    ("memory", "environ", "cause"),
    [
        ("DRAM", {"UCX_TLS": "tcp"}, "UCX_TLS=tcp leaves out sm"),
        ("DRAM", {"UCX_TLS": "tcp,self,cuda_ipc"}, "leaves out sm"),
        ("DRAM", {"UCX_TLS": "^sm"}, "UCX_TLS=^sm leaves out sm"),
        ("DRAM", {"UCX_TLS": "^tcp"}, "share no memory"),
        ("DRAM", {"UCX_TLS": "tcp, cma"}, "share no memory"),
        ("DRAM", {"UCX_TLS": "sm,tcp"}, "share no memory"),
        ("DRAM", {}, "share no memory"),
        ("VRAM", {"UCX_TLS": "sm,tcp"}, "UCX_TLS=sm,tcp leaves out cuda_ipc"),
        ("VRAM", {"UCX_TLS": "^cuda_ipc,tcp"}, "leaves out cuda_ipc"),
        ("VRAM", {"UCX_TLS": "^tcp"}, "no NVLink or GPUDirect RDMA"),
        ("VRAM", {"UCX_TLS": "cuda,sm"}, "no NVLink or GPUDirect RDMA"),
        (
            "VRAM",
            {"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection:0.8,expandable_segments:True"},
            "has expandable_segments:True",
        ),
        ("VRAM", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "no NVLink"),
    ],
)
def test_the_likely_cause_is_what_the_process_can_see_of_itself(
    memory: str,
    environ: dict[str, str],
    cause: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(self_test, "_YAMA", tmp_path / "no such file")
    assert cause in likely_cause(memory, environ)


@pytest.mark.parametrize(("scope", "is_cause"), [("0", False), ("1", False), ("2", True)])
def test_a_kernel_that_forbids_cross_memory_attach_is_named(
    scope: str, is_cause: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ptrace_scope").write_text(f"{scope}\n")
    monkeypatch.setattr(self_test, "_YAMA", tmp_path / "ptrace_scope")
    cause = f"ptrace_scope is {scope}: cross-memory attach is not permitted"
    assert (cause in likely_cause("DRAM", {})) == is_cause

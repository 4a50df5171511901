import asyncio
from pathlib import Path

import msgspec
import pytest

from tandem.bench.handoff.__main__ import main
from tandem.bench.handoff.plan import QUICK
from tandem.bench.handoff.served import (
    BLOCK_BYTES,
    CHUNK_TOKENS,
    Course,
    both_topologies,
    in_turns,
    last_chunk_tokens,
    share_while_waiting,
)
from tandem.bench.handoff.served_figures import ServedResults, served_figures
from tandem.bench.handoff.wire import adjacent, check_arrival, in_runs, wire
from tandem.bench.handoff.wire_figures import WireResults
from tandem.runtime.errors import TransferError


def a_course(num_tokens: int, **stages_ms: float) -> Course:
    return Course(num_tokens, stages_ms, ttft_ms=20.0, step_ms=0.5)


def wire_results() -> WireResults:
    results = WireResults(checksum_bytes_per_s=[10e9])
    for num_blocks, seconds in ((1, 1e-4), (32, 1e-3)):
        results.small_writes[num_blocks * BLOCK_BYTES] = [seconds]
    return results


def test_the_last_step_of_a_prompt_has_what_the_others_leave() -> None:
    assert last_chunk_tokens(256) == 256
    assert last_chunk_tokens(CHUNK_TOKENS) == CHUNK_TOKENS
    assert last_chunk_tokens(CHUNK_TOKENS + 1) == 1
    assert last_chunk_tokens(4 * CHUNK_TOKENS) == CHUNK_TOKENS


def test_wire_time_grows_with_the_bytes_and_is_never_more_than_was_measured() -> None:
    wires = wire_results()
    assert wires.wire_ms(BLOCK_BYTES) == pytest.approx(0.1)
    assert wires.wire_ms(BLOCK_BYTES / 2) == pytest.approx(0.05)
    assert wires.wire_ms(31 * BLOCK_BYTES) == pytest.approx(0.1)
    assert wires.wire_ms(64 * BLOCK_BYTES) == pytest.approx(1.0)


def test_runs_name_every_block_once_at_both_ends() -> None:
    pairs = in_runs(64, 16)
    assert sorted(local for local, _ in pairs) == sorted(remote for _, remote in pairs)
    assert pairs[:17] == [*((i, 48 + i) for i in range(16)), (16, 32)]


def test_the_handover_is_what_is_left_without_the_wire() -> None:
    results = ServedResults()
    stages = {"computed": 10.0, "landed": 12.0, "verified": 12.5, "first_step": 14.0}
    for streaming in ("by layers", "whole"):
        results.courses[streaming, 256] = [[a_course(256, **stages)]]
    found = {figure.name: figure for figure in served_figures(results, wire_results())}
    # 16 blocks in 4 layers: at least 4 blocks' bytes were left
    assert found["handover_256_p50_ms"].value == pytest.approx(2.5 - 0.1)
    assert found["handover_to_step_256_p50_ms"].value == pytest.approx(4.0 - 0.5 - 0.1)
    assert found["handover_p99_ms"].value == found["handover_p50_ms"].value
    assert found["verification_256_percent"].value == pytest.approx(2.5)
    assert found["exposed_whole_256_ms"].value == pytest.approx(2.5)
    assert found["streaming_256_ratio"].value == pytest.approx(1.0)


@pytest.mark.slow
async def test_what_did_not_arrive_gives_no_figure() -> None:
    async with wire(QUICK.shape) as between:
        await between.write(adjacent(4), checked=True)
        await check_arrival(between, adjacent(4))
        with pytest.raises(TransferError, match="other bytes than were sent"):
            await check_arrival(between, [(0, 1)])
        with pytest.raises(TransferError, match="the far end"):
            await check_arrival(between, [(0, 10_000)])


@pytest.mark.slow
def test_a_quick_run_writes_figures_with_command_commit_and_machine(tmp_path: Path) -> None:
    path = tmp_path / "handoff.json"
    assert main(["--quick", "--no-served", "--output", str(path)]) == 0
    whole = msgspec.json.decode(path.read_bytes())
    assert whole["commit"] and whole["command"] and whole["machine"]["num_cpus"] > 0
    figures = whole["figures"]
    rates = [each["value"] for name, each in figures.items() if name.startswith("bandwidth")]
    trips = [each["value"] for name, each in figures.items() if name.startswith("round_trip")]
    assert len(rates) == 15 and all(0 < rate < 1e4 for rate in rates)
    assert len(trips) == 6 and all(1 < trip < 10e6 for trip in trips)
    assert 0 <= figures["agent_idle_percent"]["value"] < 100


@pytest.mark.slow
async def test_served_prompts_go_by_handoffs_and_tell_their_course(tmp_path: Path) -> None:
    async with both_topologies(tmp_path, ["by layers"]) as topologies:
        (courses,) = (await in_turns(topologies, 300, 2)).values()
        share, long = await share_while_waiting(topologies["by layers"], 1500, 5.0)
    for course in (*courses, long):
        assert 0 < course.handover_ms <= course.second_token_ms
        assert course.second_token_ms < course.stages_ms["first_step"]
    assert 0 <= share < 2
    assert asyncio.all_tasks() == {asyncio.current_task()}

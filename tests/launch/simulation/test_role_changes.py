"""Roles that change under load, by hand and by the planner."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from tandem.bench.load.options import BenchOptions
from tandem.config.planner import PlannerConfig
from tandem.decode.config import DisaggConfig, Policy
from tandem.launch.simulation.cluster import VirtualCluster
from tandem.launch.simulation.load import PlannedLoad
from tandem.launch.simulation.planned import WORKER, Options, PlannedCluster, rows
from tandem.runtime.wire.cluster_messages import WorkerRole
from tests.launch.simulation.setups import layout, load_of, setup_of, write_trace

GPU = msgspec.structs.replace(WORKER, max_num_seqs=128)


def steady() -> PlannedLoad:
    return load_of(request_rate=6.0, num_requests=120, input_tokens=600, output_tokens=60)


def run_with_changes(
    cluster: VirtualCluster, load: PlannedLoad, *changes: tuple[float, int, WorkerRole]
) -> list[int]:
    """Run a load while roles change at their seconds; return the tokens of each answer."""
    for at_s, index, role in changes:
        cluster._clock.at(at_s, partial(cluster.change_role, cluster.workers[index], role))
    outcome = cluster.run(load, lambda num_finished: None)
    for worker in cluster.workers:
        worker.scheduler.check_invariants()
        assert worker.pool.num_held == 0 and not worker.own_prompts
    assert all(not record.unfinished for record in outcome.records)
    for record in outcome.records:
        assert record.output_times_s == sorted(record.output_times_s)
    return [len(record.output_times_s) for record in outcome.records]


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("1P 3D", Policy.ADAPTIVE),
        ("2P 2D", Policy.ALWAYS_REMOTE),
        ("workers", Policy.ADAPTIVE),
        ("workers", Policy.ALWAYS_REMOTE),
        ("workers", Policy.ALWAYS_LOCAL),
    ],
)
def test_no_token_is_lost_or_repeated_while_roles_change(name: str, policy: Policy) -> None:
    setup = setup_of(DisaggConfig.model_validate({"policy": policy}))
    changes: list[tuple[float, int, WorkerRole]] = [
        (2.0, 3, "prefill"),
        (2.1, 0, "decode"),
        (5.0, 2, "prefill"),
        (5.2, 3, "decode"),
        (9.0, 2, "both"),
        (9.1, 2, "decode"),
        (12.0, 1, "both"),
    ]
    cluster = VirtualCluster(layout(name, 4), setup)
    counts = run_with_changes(cluster, steady(), *changes)
    assert counts == [60] * 120


@pytest.mark.parametrize("name", ["2P 2D", "workers"])
def test_no_token_is_lost_or_repeated_while_workers_come_and_go(name: str) -> None:
    cluster = VirtualCluster(layout(name, 4), setup_of())
    last: WorkerRole = "both" if name == "workers" else "decode"
    cluster._clock.at(2.0, lambda: cluster.add(last))
    cluster._clock.at(3.0, lambda: cluster.remove(cluster.workers[3]))
    cluster._clock.at(6.0, lambda: cluster.remove(cluster.workers[2]))
    assert run_with_changes(cluster, steady()) == [60] * 120
    assert len(cluster.workers) == 5


def test_the_planner_starts_workers_for_a_load_and_ends_them_after_it() -> None:
    busy = load_of(request_rate=30.0, num_requests=900, input_tokens=600, output_tokens=20)
    quiet = load_of(request_rate=0.5, num_requests=60, input_tokens=600, output_tokens=20)
    arrivals = list(busy.arrivals())
    end_s = arrivals[-1][1]
    arrivals += [
        (replace(request, index=1000 + request.index), end_s + at_s)
        for request, at_s in quiet.arrivals()
    ]
    config = PlannerConfig(max_workers=4)
    planned = PlannedCluster(layout("workers", 1), setup_of(), config, start_s=5.0)
    records = planned.replay(arrivals).records
    assert all(not record.unfinished for record in records)
    kinds = [change.kind for _, change in planned.moves]
    assert kinds[0] == "start" and kinds[-1] == "stop"
    most = 1 + sum(change.count for _, change in planned.moves if change.kind == "start")
    assert 2 <= most <= 4
    assert kinds.count("stop") == most - 1


def test_an_answer_that_moves_waits_for_its_tokens_to_be_computed_anew() -> None:
    setup = setup_of(DisaggConfig.model_validate({"policy": Policy.ALWAYS_LOCAL}))
    one = load_of(request_rate=1.0, num_requests=1, input_tokens=600, output_tokens=400)
    cluster = VirtualCluster(layout("unsplit", 2), setup)
    outcome = cluster.run(one, lambda num_finished: None)
    [undisturbed] = outcome.records
    moved_from = max(range(2), key=lambda index: outcome.busy_s[index])
    start_s = undisturbed.output_times_s[0]
    cluster = VirtualCluster(layout("unsplit", 2), setup)
    counts = run_with_changes(cluster, one, (start_s + 1.0, moved_from, "prefill"))
    assert counts == [400]
    [record] = cluster._records
    # 0.5 s of patience, then about 600 + 136 tokens of 0.1 ms
    gaps_s = [b - a for a, b in zip(record.output_times_s, record.output_times_s[1:], strict=False)]
    assert 0.07 < max(gaps_s) < 0.12
    assert record.end_s > undisturbed.end_s


def swinging(path: Path) -> PlannedLoad:
    """Return 20 s of long answers, then 20 s of long prompts with short answers."""
    entries: list[tuple[float, int, int, list[int]]] = []
    entries += [(each * 40.0, 128, 800, []) for each in range(500)]
    entries += [(20_000 + each * 60.0, 4000, 8, []) for each in range(333)]
    trace = write_trace(path / "swing.jsonl", *entries)
    return PlannedLoad(BenchOptions(trace=trace), 0, GPU.block_size, GPU.max_tokens)


def share_in_time(cluster: VirtualCluster, load: PlannedLoad) -> float:
    """Return the share of the requests within the targets."""
    records = cluster.run(load, lambda num_finished: None).records
    in_time = [
        record for record in records if (record.ttft_s or 0) <= 1.0 and (record.tpot_s or 0) <= 0.02
    ]
    return len(in_time) / len(records)


@pytest.mark.slow
def test_the_planner_follows_a_swinging_load(tmp_path: Path) -> None:
    targets = DisaggConfig.model_validate({"itl_target_ms": 20, "ttft_target_ms": 1000})
    setup, load = setup_of(targets, figures=GPU), swinging(tmp_path)
    fixed = share_in_time(VirtualCluster(layout("3P 1D", 4), setup), load)
    planned = PlannedCluster(layout("3P 1D", 4), setup, PlannerConfig.model_validate({}))
    share = share_in_time(planned, load)
    roles = [change.role for _, change in planned.moves]
    assert roles[0] == "decode" and "prefill" in roles
    assert share > fixed, (share, fixed)


@pytest.mark.slow
def test_the_planner_pays_where_a_load_swings() -> None:
    """Three workers, of which two compute prompts and then two answer, for half a minute each."""
    options = Options(load="swinging", workers=3, seconds=60, phase=30)
    (_, planned, moves), *fixed = rows(options, lambda line: None)
    assert "prefill" in moves and "decode" in moves
    assert len(fixed) == 2
    assert planned > 1.08 * max(share for _, share, _ in fixed), (planned, fixed)


def test_the_planner_leaves_a_steady_load_alone() -> None:
    planned = PlannedCluster(layout("2P 2D", 4), setup_of(), PlannerConfig.model_validate({}))
    planned.run(steady(), lambda num_finished: None)
    assert planned.moves == []

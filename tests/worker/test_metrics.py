"""The load of a worker's engine, for planners and under the names that gateways read."""

import pytest
from prometheus_client import REGISTRY

from tandem.engine.schedule.outputs import LoadStats
from tandem.runtime.address import new_id
from tandem.worker.metrics import WorkerMetrics

LOAD = LoadStats(
    num_running=3,
    num_waiting=2,
    num_remote=1,
    num_waiting_tokens=131,
    num_blocks=50,
    num_free_blocks=20,
    num_cached_blocks=10,
    num_quarantined_blocks=5,
    num_preemptions=0,
    num_running_prompt_tokens=30,
    num_waiting_prompt_tokens=100,
    num_remote_prompt_tokens=70,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_requests_running", 3),
        ("num_requests_waiting", 3),
        ("kv_cache_usage_perc", 0.4),
        ("gpu_cache_usage_perc", 0.4),
    ],
)
def test_a_gateway_finds_the_load_under_the_names_of_vllm(name: str, value: float) -> None:
    model = new_id()
    WorkerMetrics(model, 16).loaded(LOAD)
    labels = {"model_name": model, "engine": "0"}
    assert REGISTRY.get_sample_value(f"vllm:{name}", labels) == pytest.approx(value)


def test_a_gateway_finds_the_size_of_the_pool_in_labels() -> None:
    model = new_id()
    WorkerMetrics(model, 32).loaded(LOAD)
    labels = {"model_name": model, "engine": "0", "block_size": "32", "num_gpu_blocks": "50"}
    assert REGISTRY.get_sample_value("vllm:cache_config_info", labels) == 1


def test_a_planner_finds_the_prompt_tokens_by_state() -> None:
    model = new_id()
    WorkerMetrics(model, 16).loaded(LOAD)
    found = {
        state: REGISTRY.get_sample_value(
            "tandem_worker_prompt_tokens", {"model": model, "state": state}
        )
        for state in ("running", "waiting", "remote")
    }
    assert found == {"running": 30, "waiting": 100, "remote": 70}


def test_the_lateness_of_an_emulated_device_has_series_of_its_own() -> None:
    model = new_id()
    metrics = WorkerMetrics(model, 16)
    names = ("tandem_worker_emulated_late_share", "tandem_worker_emulated_worst_late_seconds")
    assert [REGISTRY.get_sample_value(name, {"model": model}) for name in names] == [None, None]
    metrics.emulated(0.02, 0.25)
    assert [REGISTRY.get_sample_value(name, {"model": model}) for name in names] == [0.02, 0.25]


def test_the_width_of_a_worker_and_the_waits_of_its_ranks_are_told() -> None:
    model = new_id()
    metrics = WorkerMetrics(model, 16, num_ranks=2)
    assert REGISTRY.get_sample_value("tandem_worker_ranks", {"model": model}) == 2
    metrics.waited([0.5, 0.25])
    waits = [
        REGISTRY.get_sample_value("tandem_worker_rank_wait_seconds", {"model": model, "rank": rank})
        for rank in ("0", "1")
    ]
    assert waits == [0.5, 0.25]

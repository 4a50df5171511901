"""`tandem plan` as a command."""

import json
from pathlib import Path

import msgspec
import pytest

from tandem.config.topology import parse_topology
from tandem.launch.simulation import command
from tandem.runtime.process import progress
from tests.launch.conftest import Tandem
from tests.launch.simulation.setups import FIGURES

LOAD = ("--request-rate", "8", "--num-requests", "40", "--input-tokens", "1500")


@pytest.fixture
def costs(tmp_path: Path) -> tuple[str, str]:
    file = tmp_path / "costs.json"
    file.write_bytes(msgspec.json.encode(FIGURES))
    return "--costs", str(file)


def test_layouts_are_shown_side_by_side_and_progress_goes_to_standard_error(
    tandem: Tandem, costs: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)  # it takes under a second
    monkeypatch.setattr(command, "PROGRESS_EVERY", 1)
    code, output, errors = tandem("plan", *costs, *LOAD, "--workers", "3")
    assert code == 0
    for name in ("unsplit", "1P 2D", "2P 1D", "workers"):
        assert sum(line.startswith(name) for line in output.splitlines()) == 1
        assert f", {name}: 1 requests" in errors
        assert f"places of prompts with {name}, the commonest reasons:" in output
    assert "x local: policy always_local" in output and "x remote: " in output
    assert "plan: " in errors and "plan: " not in output


def test_the_best_layout_is_written_for_tandem_serve(
    tandem: Tandem, costs: tuple[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "best.yaml"
    code, output, _ = tandem(
        *("plan", *costs, *LOAD, "--json", "--output", str(file)),
        *("--ttft-target-ms", "400", "--itl-target-ms", "60", "--engine.max_num_seqs=9"),
    )
    found = json.loads(output)
    assert code == 0
    assert found["targets_ms"] == {"ttft": 400, "tpot": 60}
    assert found["worker"]["max_num_seqs"] == 9
    best = next(each for each in found["layouts"] if each["name"] == found["best"])
    most = max(each["goodput_per_s"] for each in found["layouts"])
    assert 0 < most <= best["requests_per_s"] * 1.01
    assert best["goodput_per_s"] >= 0.99 * most
    assert all(len(each["utilization"]) == 2 for each in found["layouts"])
    assert all(0 < len(each["reasons"]) <= 3 for each in found["layouts"])
    topology = parse_topology(file)
    assert topology.description.startswith(found["best"])
    settings = {setting.key: setting.value for setting in topology.settings}
    assert settings["disagg.ttft_target_ms"] == 400
    assert settings["engine.max_num_seqs"] == 9


@pytest.mark.slow  # matplotlib
def test_every_layout_is_drawn(tandem: Tandem, costs: tuple[str, str], tmp_path: Path) -> None:
    plot = tmp_path / "plan.png"
    assert tandem("plan", *costs, *LOAD, "--plot", str(plot))[0] == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_layouts_of_an_emulated_device_are_planned_without_a_worker(tandem: Tandem) -> None:
    words = ("plan", "--emulate", "h100/llama-3.1-8b", *LOAD, "--json")
    code, output, _ = tandem(*words)
    found = json.loads(output)
    assert code == 0 and found["worker"]["block_size"] == 64
    fastest, slowest = 0.021e-3 * 1500, 0.03e-3 * 1500  # seconds of products; with attention
    (unsplit,) = (each for each in found["layouts"] if each["name"] == "unsplit")
    assert 1e3 * fastest < unsplit["ttft_p50_ms"] < 2e3 * slowest
    code, _, errors = tandem(*words, "--model", "mine")
    assert code == 2 and "--emulate and --model exclude each other" in errors


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--input-tokens", "9000"], "request 0 has 9064 tokens, and a worker's KV pool holds"),
        (["--concurrency", "2", "--request-rate", "2"], "choose a concurrency"),
        (["--trace", "/no/such/trace"], "trace /no/such/trace"),
        (["--ttft-target-ms", "-1"], "disagg.ttft_target_ms"),
        (["--request-rate", "1", "--duration", "0"], "above 0"),
        (["--engine.num_blocks=0"], "engine.num_blocks"),
    ],
)
def test_a_load_that_cannot_be_planned_is_one_line(
    words: list[str], reason: str, tandem: Tandem, costs: tuple[str, str]
) -> None:
    code, _, errors = tandem("plan", *costs, *words)
    line = errors.strip().splitlines()[-1]
    assert code == 2
    assert line.startswith("error: ")
    assert reason in line

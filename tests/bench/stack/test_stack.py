from pathlib import Path

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tandem.bench.load.metrics import RequestRecord, summarize
from tandem.bench.stack.__main__ import (
    TARGETS,
    Measured,
    Target,
    latency_figures,
    results_json,
    short_figures,
    stream_figures,
)
from tandem.bench.stack.near_zero import write_near_zero_model


def measured(num_requests: int, **cpu_s: float) -> Measured:
    records = [
        RequestRecord(index, 0.0, 0.0, 2.0, [0.5, 1.0], num_output_tokens=4, has_usage=True)
        for index in range(num_requests)
    ]
    return Measured(summarize(records, {}), cpu_s)


def test_a_tokens_cost_is_the_cpu_time_over_all_tokens() -> None:
    figures = stream_figures(measured(10, frontend=0.0004, decode=0.004, client=0.0002))
    assert figures["streamed_tokens_per_s"] == 20.0
    assert figures["frontend_us_per_token"] == pytest.approx(10.0)
    assert figures["frontend_us_per_event"] == pytest.approx(20.0)  # two tokens per event
    assert figures["decode_us_per_token"] == pytest.approx(100.0)
    assert figures["client_us_per_token"] == pytest.approx(5.0)


def test_a_short_requests_cost_is_the_cpu_time_over_all_requests() -> None:
    figures = short_figures(measured(10, frontend=0.001, client=0.0005))
    assert figures["short_requests_per_s"] == 5.0
    assert figures["frontend_us_per_request"] == pytest.approx(100.0)
    assert figures["client_us_per_request"] == pytest.approx(50.0)


def test_every_figure_has_a_target_entry_and_the_median_decides() -> None:
    one = measured(2)
    figures = {
        **latency_figures("agg", one),
        **latency_figures("disagg", one),
        **stream_figures(one),
        **short_figures(one),
        "disagg_remote_share": 1.0,
    }
    assert figures.keys() == TARGETS.keys()
    rounds = [{**figures, "agg_ttft_p50_ms": value} for value in (1.0, 9.0, 1.9)]
    results = results_json(rounds)["figures"]
    assert results["agg_ttft_p50_ms"]["median"] == 1.9
    assert results["agg_ttft_p50_ms"]["is_met"] is True
    assert results["short_requests_per_s"]["is_met"] is False
    assert results["agg_ttft_p99_ms"]["is_met"] is None


def test_a_target_is_met_at_its_limit() -> None:
    assert Target("x", "ms", 2.0).is_met_by(2.0)
    assert Target("x", "1/s", 1500.0, "at least").is_met_by(1500.0)
    assert not Target("x", "1/s", 1500.0, "at least").is_met_by(1499.9)


def test_the_near_zero_model_can_only_answer_in_plain_characters(tmp_path: Path) -> None:
    folder = write_near_zero_model(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].abs().sum(dim=1)
    speaking = {token_id for token_id, weight in enumerate(rows.tolist()) if weight > 0}
    assert {tokenizer.decode([token_id]) for token_id in speaking} == {
        chr(code) for code in range(32, 127)
    }

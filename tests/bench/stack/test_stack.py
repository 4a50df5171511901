from pathlib import Path

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tandem.bench.client.record import RequestRecord
from tandem.bench.load.metrics import summarize
from tandem.bench.stack.__main__ import (
    FIGURES,
    Measured,
    latency_values,
    paced_values,
    short_values,
    stream_values,
    write_paced_profile,
)
from tandem.bench.stack.near_zero import write_near_zero_model
from tandem.emulation.profile import load_profile
from tandem.engine.schedule.step_cost import StepWork


def measured(num_requests: int, **cpu_s: float) -> Measured:
    records = [
        RequestRecord(index, 0.0, 0.0, 2.0, [0.5, 1.0], num_output_tokens=4, has_usage=True)
        for index in range(num_requests)
    ]
    return Measured(summarize(records, {}), cpu_s)


def test_a_tokens_cost_is_the_cpu_time_over_all_tokens() -> None:
    figures = stream_values(measured(10, frontend=0.0004, decode=0.004, client=0.0002))
    assert figures["streamed_tokens_per_s"] == 20.0
    assert figures["frontend_us_per_token"] == pytest.approx(10.0)
    assert figures["frontend_us_per_event"] == pytest.approx(20.0)  # two tokens per event
    assert figures["decode_us_per_token"] == pytest.approx(100.0)
    assert figures["client_us_per_token"] == pytest.approx(5.0)


def test_a_short_requests_cost_is_the_cpu_time_over_all_requests() -> None:
    figures = short_values(measured(10, frontend=0.001, client=0.0005))
    assert figures["short_requests_per_s"] == 5.0
    assert figures["frontend_us_per_request"] == pytest.approx(100.0)
    assert figures["client_us_per_request"] == pytest.approx(50.0)


def test_a_round_has_a_value_for_every_figure() -> None:
    one = measured(2)
    values = {
        **latency_values("agg", one),
        **latency_values("disagg", one),
        **stream_values(one),
        **paced_values(one),
        **short_values(one),
        "disagg_remote_share": 1.0,
    }
    assert values.keys() == {figure.name for figure in FIGURES}


def test_every_step_of_the_paced_device_takes_as_long(tmp_path: Path) -> None:
    profile = load_profile(str(write_paced_profile(tmp_path / "paced.yaml")))
    for work, num_rows in ((StepWork(num_decodes=1), 1), (StepWork(num_prompt_tokens=2048), 100)):
        assert profile.step_seconds(work, num_rows, 0) == pytest.approx(0.05, rel=1e-3)


def test_the_near_zero_model_can_only_answer_in_plain_characters(tmp_path: Path) -> None:
    folder = write_near_zero_model(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].abs().sum(dim=1)
    speaking = {token_id for token_id, weight in enumerate(rows.tolist()) if weight > 0}
    assert {tokenizer.decode([token_id]) for token_id in speaking} == {
        chr(code) for code in range(32, 127)
    }

"""The connector's settings: the environment's, overlaid with vLLM's own config."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.runtime.address import new_id
from tandem.runtime.errors import ConfigError
from tandem.vllm import settings as room
from tandem.vllm.settings import connector_settings


@pytest.fixture(autouse=True)
def vllm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "check_version", lambda: "0.32.0")
    monkeypatch.setenv("NATS_SERVER", "nats://here:1")
    monkeypatch.setenv("ETCD_ENDPOINTS", "http://here:2")


def vllm_config(model: str = "org/model", role: str = "kv_consumer", **extra: Any) -> Any:
    transfer = SimpleNamespace(
        kv_role=role,
        is_kv_consumer=role in ("kv_consumer", "kv_both"),
        is_kv_producer=role in ("kv_producer", "kv_both"),
        kv_connector_extra_config=extra,
    )
    model_config = SimpleNamespace(
        model=model, revision=None, served_model_name=["name", "alias"], dtype="float32",
        quantization=None, hf_overrides={}, max_model_len=8192,
    )  # fmt: skip
    parallel = SimpleNamespace(rank=0, world_size=1)
    return SimpleNamespace(
        kv_transfer_config=transfer, model_config=model_config, parallel_config=parallel
    )


def test_values_of_the_connectors_own_config_go_before_the_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TANDEM_DISAGG__MAX_LOCAL_PREFILL_LENGTH", "77")
    monkeypatch.setenv("TANDEM_TRANSFER__GRACE_MS", "5000")
    found = connector_settings(
        vllm_config(disagg={"claim_timeout_ms": 5}, transfer={"grace_ms": 6000})
    )
    disagg = found.config.disagg
    assert disagg.max_local_prefill_length == 77 and disagg.claim_timeout_ms == 5
    assert found.config.transfer.grace_ms == 6000
    assert found.config.runtime.nats_url == "nats://here:1"
    assert found.max_prompt_tokens == 8191
    assert found.model == "name" and found.offers and not found.takes


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"disag": {}}, "disag"),
        ({"disagg": 5}, "disagg"),
        ({"disagg": {"policy": "sometimes"}}, "disagg.policy"),
        ({"transfer": {"graze_ms": 1}}, "transfer.graze_ms"),
    ],
)
def test_a_wrong_field_is_named(extra: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        connector_settings(vllm_config(**extra))
    assert caught.value.param == f"kv_connector_extra_config.{param}"
    assert caught.value.param in caught.value.message


def test_a_prefill_worker_that_no_engine_of_tandem_serves_is_refused() -> None:
    with pytest.raises(ConfigError, match="--disaggregation-mode prefill"):
        connector_settings(vllm_config(role="kv_producer"))
    assert connector_settings(vllm_config(role="kv_producer", prompts="/socket")).takes


def test_other_weights_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    found = []
    for content in (b"a", b"b"):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(content)
        found.append(connector_settings(vllm_config(str(tmp_path))).weights)
    assert found[0] != found[1]
    assert connector_settings(vllm_config()).weights == "org/model@None"


def test_ranks_pair_with_those_of_the_same_place_and_width_alone() -> None:
    found = []
    for rank, width in ((0, 1), (0, 2), (1, 2), (1, 4)):
        config = vllm_config()
        config.kv_transfer_config.engine_id = "an id of vLLM's"
        config.parallel_config = SimpleNamespace(rank=rank, world_size=width)
        found.append(connector_settings(config))
    assert len({each.kv_form for each in found}) == 4
    alone, first, second, _ = found
    assert alone.engine != first.engine == second.engine
    assert [first.instance_id, second.instance_id] == [f"{first.engine}00", f"{first.engine}01"]
    assert len(first.instance_id) == len(new_id())

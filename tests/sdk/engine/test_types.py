"""What needs no cluster: configs, errors, ranks, health payloads, text, spans, metrics."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.parser import text_string_to_metric_families

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError, InvalidRequestError, from_code
from tandem.sdk import (
    Context,
    DisaggregationMode,
    EngineConfig,
    GenerateChunk,
    LlmRegistration,
    ModelInput,
    WorkerConfig,
    exceptions,
    telemetry,
)
from tandem.sdk.dynamo.dp_rank import forced_dp_rank, validate_global_dp_rank
from tandem.sdk.engine.health_check import (
    HEALTH_CHECK_KEY,
    bos_token_id_or,
    build_health_check_payload,
    is_probe,
    parse_health_check_payload_cli,
)
from tandem.sdk.engine.metrics import EngineMetrics, register_engine_registry
from tandem.sdk.engine_worker.ending import ShutdownBudget
from tandem.sdk.engine_worker.text import openai_logprobs, text_request
from tandem.sdk.health.system_server import system_port

# ---- WorkerConfig -----------------------------------------------------------------------------


def test_a_text_engine_has_no_part_to_play_in_disaggregation() -> None:
    config = WorkerConfig(
        "pipe", model_input=ModelInput.Text, disaggregation_mode=DisaggregationMode.DECODE
    )
    with pytest.raises(ConfigError, match=r"WorkerConfig\.model_input"):
        config.check()


def test_a_prefill_engine_is_served_as_prefill_whatever_its_component() -> None:
    config = WorkerConfig("pipe", "backend", disaggregation_mode=DisaggregationMode.PREFILL)
    assert config.served_component == "prefill"


def test_the_token_fields_may_be_given_apart() -> None:
    apart = LlmRegistration(context_length=2048, total_kv_blocks=1000, data_parallel_size=2)
    config = EngineConfig(model="m", context_length=4096, runtime_data={"a": 1}, llm=apart)
    assert config.card_data() == {"a": 1, "data_parallel_size": 2}
    assert (config.context_length, config.total_kv_blocks) == (4096, 1000)


def test_the_time_to_end_is_divided_and_the_environment_may_shorten_a_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TANDEM_SHUTDOWN_GRACE_S")
    config = RuntimeConfig(drain_timeout_s=40.0)
    assert ShutdownBudget.of(config) == ShutdownBudget(40.0, 0.25, 10.0, 5.0)
    monkeypatch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "5")
    monkeypatch.setenv("TANDEM_PREFILL_DRAIN_TIMEOUT_S", "2")
    assert ShutdownBudget.of(config) == ShutdownBudget(40.0, 5.0, 2.0, 5.0)
    monkeypatch.setenv("TANDEM_SHUTDOWN_GRACE_S", "soon")
    with pytest.raises(ConfigError, match="TANDEM_SHUTDOWN_GRACE_S"):
        ShutdownBudget.of(config)


@pytest.mark.parametrize(("text", "port"), [("9123", 9123), ("-1", None)])
def test_the_system_port_comes_from_the_config_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str, port: int | None
) -> None:
    assert system_port(RuntimeConfig()) is None
    monkeypatch.setenv("DYN_SYSTEM_PORT", text)
    assert system_port(RuntimeConfig()) == port
    assert system_port(RuntimeConfig(metrics_port=7)) == 7
    monkeypatch.setenv("TANDEM_SYSTEM_PORT", "many")
    with pytest.raises(ConfigError, match="TANDEM_SYSTEM_PORT"):
        system_port(RuntimeConfig())


# ---- errors, ranks, health ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [name for name in exceptions.__all__ if name not in ("EngineShutdown", "PrefillResultMissing")],
)
def test_an_error_is_caught_under_its_name_also_when_it_came_over_the_wire(name: str) -> None:
    kind = getattr(exceptions, name)
    with pytest.raises(kind, match="why"):
        raise from_code(kind.code, "why")


def test_an_engine_that_shut_down_sends_callers_elsewhere() -> None:
    over_the_wire = from_code(exceptions.EngineShutdown.code, "gone")
    assert isinstance(over_the_wire, exceptions.WorkerUnavailable)


def test_a_rank_is_used_only_by_the_worker_that_hosts_it(caplog: pytest.LogCaptureFixture) -> None:
    assert forced_dp_rank({"token_ids": []}) is None
    assert forced_dp_rank({"token_ids": [], "routing": {"dp_rank": "2"}}) == 2
    assert [validate_global_dp_rank(rank, 2, 4, "it") for rank in (None, 2, 5)] == [None, 2, 5]
    assert validate_global_dp_rank(0, 0, 1, "it") is None
    assert not caplog.records
    assert validate_global_dp_rank(7, 2, 4, "it") is None
    assert "outside [2, 6)" in caplog.text


def test_the_health_payload_is_the_engines_unless_the_operator_has_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    payload = build_health_check_payload(5, extras={"more": 1})
    assert is_probe(payload)
    assert (payload["token_ids"], payload["more"]) == ([5], 1)
    assert payload["stop_conditions"]["max_tokens"] == 1
    assert not is_probe({HEALTH_CHECK_KEY: "true"})

    path = tmp_path / "payload.json"
    path.write_text(json.dumps({"prompt": "hello"}))
    monkeypatch.setenv("DYN_HEALTH_CHECK_PAYLOAD", f"@{path}")
    assert build_health_check_payload(5) == {"prompt": "hello", HEALTH_CHECK_KEY: True}
    for wrong in ("not json", "[1]", f"@{tmp_path}/missing"):
        assert parse_health_check_payload_cli(wrong) is None
    assert len(caplog.records) == 3


def test_the_first_token_of_a_text_is_found_in_a_tokenizer_or_its_wrapper() -> None:
    tokenizer = SimpleNamespace(bos_token_id=7)
    assert bos_token_id_or(tokenizer) == bos_token_id_or(SimpleNamespace(tokenizer=tokenizer)) == 7
    assert bos_token_id_or(None, default=3) == 3


# ---- text -------------------------------------------------------------------------------------


def test_an_openai_body_becomes_the_engines_request() -> None:
    body = {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5,
        "max_tokens": 9, "stop": "END", "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    request = text_request(body, "id")
    assert request["messages"] == body["messages"]
    assert request["sampling_options"] == {"temperature": 0.5}
    assert request["stop_conditions"]["max_tokens"] == 9
    assert request["stop_conditions"]["stop"] == ["END"]
    assert request["output_options"] == {"logprobs": 2}
    assert text_request({"prompt": "x", "logprobs": 0}, "id")["output_options"] == {"logprobs": 0}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "x", "n": 2}, "n"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_body_that_a_text_engine_cannot_have_is_an_error_naming_the_field(
    body: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        text_request(body, "id")
    assert caught.value.param == field


def test_logprobs_of_text_take_openais_form_or_none_at_all() -> None:
    best = [{"rank": 1, "token_id": 4, "token": "a", "logprob": -0.1}]
    best.append({"rank": 2, "token_id": 5, "token": "b", "logprob": -0.2})
    chunk: GenerateChunk = {"token_ids": [5], "index": 0, "text": "b", "log_probs": [-0.2]}
    chunk["top_logprobs"] = [best]
    chat = openai_logprobs(chunk, is_chat=True)
    assert chat is not None
    assert chat["content"][0]["token"] == "b"
    assert chat["content"][0]["bytes"] == [98]
    assert [each["token"] for each in chat["content"][0]["top_logprobs"]] == ["a", "b"]
    assert openai_logprobs(chunk, is_chat=False) == {
        "tokens": ["b"],
        "token_logprobs": [-0.2],
        "top_logprobs": [{"a": -0.1, "b": -0.2}],
    }
    nameless: GenerateChunk = {"token_ids": [5, 6], "index": 0, "log_probs": [-0.2, -0.3]}
    assert openai_logprobs(nameless, is_chat=True) is None


# ---- metrics and spans --------------------------------------------------------------------------


def test_an_engines_registry_gets_our_labels_and_keeps_its_own() -> None:
    registry = CollectorRegistry()
    Counter("vllm:requests", "help", ["model"], registry=registry).labels("its own").inc(3)
    Gauge("python_other", "help", registry=registry).set(1)
    metrics = EngineMetrics({"model": "ours", "worker_id": "w"})
    register_engine_registry(metrics, registry, prefix_filters=["vllm:"])
    metrics.register_prometheus_expfmt_callback(lambda: "# TYPE extra gauge\nextra 4.0\n")

    def broken() -> str:
        raise RuntimeError("no text")

    metrics.register_prometheus_expfmt_callback(broken)
    families = {
        family.name: family for family in text_string_to_metric_families(metrics.render().decode())
    }
    sample = families["vllm:requests"].samples[0]
    assert (sample.labels, sample.value) == ({"model": "its own", "worker_id": "w"}, 3.0)
    assert "python_other" not in families
    assert families["extra"].samples[0].value == 4.0


def test_spans_do_nothing_outside_a_trace_and_headers_go_on_as_they_came() -> None:
    trace_parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    context = Context(headers={"traceparent": trace_parent, "other": "x"})
    assert telemetry.engine_trace_kwargs(context) == {
        "trace_headers": {"traceparent": trace_parent}
    }
    assert telemetry.engine_trace_kwargs(context, enabled=False) == {}
    assert telemetry.engine_trace_kwargs(Context()) == {}
    with telemetry.start_span(context, "load_kv", num_blocks=8) as span:
        span.set_attribute("a", 1)
        span.add_event("landed", {"b": 2}, c=3)
        span.set_status("error", "why")
    telemetry.current_span(context).set_attribute("d", 4)


def test_a_requests_span_is_the_callers_child_and_the_engines_parent(exported: Any) -> None:
    trace_id = "ab" * 16
    context = Context(headers={"traceparent": f"00-{trace_id}-{'cd' * 8}-01"})
    with telemetry.request_span(context, "engine.generate", {"num_prompt_tokens": 3}):
        telemetry.current_span(context).add_event("first_token")
        with (
            pytest.raises(RuntimeError, match="lost"),
            telemetry.start_span(context, "load_kv") as child,
        ):
            child.set_attribute("num_blocks", 8)
            raise RuntimeError("lost")
        onwards = telemetry.trace_headers(context)
    load_kv, generate = exported.get_finished_spans()
    assert f"{generate.context.trace_id:032x}" == trace_id
    assert generate.parent.span_id == int("cd" * 8, 16)
    assert load_kv.parent.span_id == generate.context.span_id
    assert load_kv.attributes["num_blocks"] == 8
    assert load_kv.status.status_code.name == "ERROR"
    assert onwards is not None
    assert f"{generate.context.span_id:016x}" in onwards["traceparent"]

"""Dynamo's WorkerConfig: fields that Tandem does not support, and configs made from others."""

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.runtime.errors import ConfigError
from tandem.runtime.wire.cluster_messages import AnswerRules
from tandem.sdk import DisaggregationMode, ModelInput
from tandem.sdk.dynamo.worker_config import WorkerConfig
from tandem.sdk.engine.health_check import HEALTH_CHECK_KEY


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_call_parser", "jamba"),
        ("reasoning_parser", "granite"),
        ("structural_tag", {"a": 1}),
        ("route_to_encoder", True),
        ("media_decoder", object()),
        ("kv_state_endpoint", "a.b.c"),
        ("discovery_backend", "kubernetes"),
        ("request_plane", "nats"),
        ("response_plane", "quic"),
        ("event_plane", "zmq"),
        ("disaggregation_mode", DisaggregationMode.ENCODE),
    ],
)
def test_a_field_that_tandem_does_not_support_is_an_error_that_names_it(
    field: str, value: Any
) -> None:
    config = WorkerConfig(**{"namespace": "pipe", field: value})
    with pytest.raises(ConfigError, match=rf"WorkerConfig\.{field}: ") as caught:
        config.check()
    assert caught.value.param == field


class TheirMode(Enum):
    DECODE = "some other value"


def test_a_runtime_config_gives_the_fields_it_has() -> None:
    theirs = SimpleNamespace(
        namespace="pipe",
        component=None,
        endpoint="generate",
        discovery_backend="etcd",
        request_plane="tcp",
        event_plane=None,
        dyn_reasoning_parser="qwen3",
        dyn_enable_structural_tag=True,
        structural_tag_scope="always",
        disaggregation_mode=TheirMode.DECODE,
        health_check_payload='{"token_ids": [7]}',
    )
    config = WorkerConfig.from_runtime_config(theirs, "folder", "name", component="mine")
    assert (config.namespace, config.component, config.endpoint) == ("pipe", "mine", "generate")
    assert (config.model_name, config.served_model_name) == ("folder", "name")
    assert config.model_input is ModelInput.Tokens
    assert config.reasoning_parser == "qwen3"
    assert config.answer_rules() == AnswerRules(reasoning_format="think", guided_calls="always")
    assert config.disaggregation_mode is DisaggregationMode.DECODE
    assert config.health_check_payload == {"token_ids": [7], HEALTH_CHECK_KEY: True}
    assert config.served_component == "mine"


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        (SimpleNamespace(), "namespace"),
        (SimpleNamespace(namespace="pipe", disaggregation_mode="agg"), "disaggregation_mode"),
    ],
)
def test_a_runtime_config_that_does_not_do_is_refused(theirs: object, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        WorkerConfig.from_runtime_config(theirs, "folder")
    assert caught.value.param == field


def test_the_first_arguments_may_be_positional_as_in_dynamo() -> None:
    config = WorkerConfig("pipe", "backend", "generate", "m", "name", ModelInput.Tokens, "chat")
    config.check()
    assert (config.served_model_name, config.endpoint_types) == ("name", "chat")
    with pytest.raises(TypeError):
        WorkerConfig("pipe", "backend", "generate", "m", "n", ModelInput.Tokens, "chat", "etcd")  # type: ignore[misc]

"""Dynamo's `WorkerConfig`: Tandem's, and the arguments that only Dynamo's constructor has."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Self

from tandem.runtime.errors import ConfigError
from tandem.runtime.wire.cluster_messages import AnswerRules
from tandem.sdk.engine import worker_config
from tandem.sdk.engine.disaggregation import DisaggregationMode
from tandem.sdk.engine.health_check import parse_health_check_payload_cli
from tandem.sdk.worker.models import ModelInput

# field |-> its only supported values
_CHOICES: dict[str, tuple[object, ...]] = {
    "discovery_backend": ("etcd",),
    "request_plane": ("tcp",),
    "response_plane": ("tcp",),
    "event_plane": (None, "nats"),
}
_UNSUPPORTED = (
    "route_to_encoder", "media_decoder", "media_fetcher", "kv_state_endpoint",
    "default_thinking_mode",
)  # fmt: skip
# Fields that a runtime config may have, some of them with `dyn_` before the name
_SHARED = (
    "component", "endpoint", "endpoint_types", "discovery_backend", "request_plane",
    "response_plane", "event_plane", "use_kv_events", "custom_jinja_template",
    "exclude_tools_when_tool_choice_none", "enable_local_indexer", "enable_kv_routing",
    "structural_tag", "structural_tag_mode", "structural_tag_scope", "structural_tag_schema",
    "route_to_encoder", "kv_state_endpoint", "tool_call_parser", "reasoning_parser",
    "default_thinking_mode",
)  # fmt: skip
_OTHER_NAMES = {"structural_tag_mode": "enable_structural_tag"}
_STRUCTURAL_TAG = ("scope", "schema")  # its keys


@dataclass(kw_only=True)
class WorkerConfig(worker_config.WorkerConfig):
    """Tandem's settings, and Dynamo's further ones; `check` refuses those not in Tandem by name.

    `use_kv_events` and `enable_local_indexer` are accepted and change nothing. `structural_tag` is
    the later form of the three fields `structural_tag_mode`, `_scope` and `_schema`. Arguments
    after `endpoint_types` are given by name.
    """

    discovery_backend: str = "etcd"
    request_plane: str = "tcp"
    response_plane: str = "tcp"
    event_plane: str | None = None
    use_kv_events: bool = False
    enable_local_indexer: bool = True
    default_thinking_mode: str | None = None
    structural_tag: bool | dict[str, Any] | None = None
    route_to_encoder: bool = False
    media_decoder: object = None
    media_fetcher: object = None
    kv_state_endpoint: str | None = None

    @classmethod
    def from_runtime_config(
        cls,
        runtime_cfg: object,
        model_name: str,
        served_model_name: str | None = None,
        model_input: ModelInput | None = None,
        **overrides: Any,
    ) -> Self:
        """Return the fields that `runtime_cfg` has, with `overrides` over them.

        Its role may be a member of any enum with the names of DisaggregationMode. Raise
        ConfigError if it has no `namespace` or an unknown role.
        """
        values: dict[str, Any] = {"namespace": getattr(runtime_cfg, "namespace", None)}
        for name in _SHARED:
            for source in (_OTHER_NAMES.get(name, name), name):
                for prefix in ("", "dyn_"):
                    if (value := getattr(runtime_cfg, prefix + source, None)) is not None:
                        values[name] = value
        if "disaggregation_mode" not in overrides:
            mode = getattr(
                runtime_cfg, "disaggregation_mode", getattr(runtime_cfg, "serving_mode", None)
            )
            values["disaggregation_mode"] = _mode(mode)
        if model_input is not None:
            values["model_input"] = model_input
        values["health_check_payload"] = parse_health_check_payload_cli(
            getattr(runtime_cfg, "health_check_payload", None)
        )
        values |= {"model_name": model_name, "served_model_name": served_model_name} | overrides
        if not values["namespace"]:
            raise ConfigError("WorkerConfig.namespace: must not be empty", param="namespace")
        return cls(**values)

    def check(self) -> None:
        """Raise ConfigError that names the first field that Tandem does not support."""
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                known = " or ".join(repr(choice) for choice in choices)
                raise worker_config.refused(
                    name, f"{getattr(self, name)!r} is not available, use {known}"
                )
        for name in _UNSUPPORTED:
            if getattr(self, name):
                raise worker_config.refused(name, "is not supported, leave it out")
        super().check()

    def answer_rules(self) -> AnswerRules:
        tag = self.structural_tag
        if tag is None:
            return super().answer_rules()
        if not isinstance(tag, bool | dict):
            raise worker_config.refused("structural_tag", "is no boolean, and no dict")
        given = tag if isinstance(tag, dict) else {}
        for key in given:
            if key not in _STRUCTURAL_TAG and given[key]:
                raise worker_config.refused("structural_tag", f"{key!r} is not supported")
        one_by_one = replace(
            self,
            structural_tag=None,
            structural_tag_mode=tag is not False,
            structural_tag_scope=given.get("scope") or "always",
            structural_tag_schema=given.get("schema"),
        )
        return one_by_one.answer_rules()


def _mode(value: object) -> DisaggregationMode:
    """Return the member that has the name of `value`, a member of any enum."""
    if value is None:
        return DisaggregationMode.AGGREGATED
    if isinstance(value, DisaggregationMode):
        return value
    if isinstance(value, Enum) and value.name in DisaggregationMode.__members__:
        return DisaggregationMode[value.name]
    known = ", ".join(DisaggregationMode.__members__)
    raise worker_config.refused(
        "disaggregation_mode", f"{value!r} is not an enum member named {known}"
    )

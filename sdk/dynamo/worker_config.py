"""Dynamo's `WorkerConfig`: Tandem's, and the arguments that only Dynamo's constructor has."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

from tandem.runtime.errors import ConfigError
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
    "tool_call_parser", "reasoning_parser", "structural_tag", "structural_tag_mode",
    "structural_tag_scope", "structural_tag_schema", "route_to_encoder", "media_decoder",
    "media_fetcher", "kv_state_endpoint", "default_thinking_mode",
)  # fmt: skip
# Fields that a runtime config has under the same name, and under another one.
_SHARED = (
    "component", "endpoint", "endpoint_types", "discovery_backend", "request_plane",
    "response_plane", "event_plane", "use_kv_events", "custom_jinja_template",
    "exclude_tools_when_tool_choice_none", "enable_local_indexer", "enable_kv_routing",
    "structural_tag", "structural_tag_mode", "structural_tag_scope", "structural_tag_schema",
    "route_to_encoder", "kv_state_endpoint",
)  # fmt: skip
_RENAMED = {
    "tool_call_parser": "dyn_tool_call_parser",
    "reasoning_parser": "dyn_reasoning_parser",
    "default_thinking_mode": "dyn_default_thinking_mode",
}


@dataclass(kw_only=True)
class WorkerConfig(worker_config.WorkerConfig):
    """Tandem's settings, and Dynamo's further ones; `check` refuses those not in Tandem by name.

    `use_kv_events`, `enable_local_indexer` and `exclude_tools_when_tool_choice_none` are accepted
    and change nothing. Arguments after `endpoint_types` are given by name.
    """

    discovery_backend: str = "etcd"
    request_plane: str = "tcp"
    response_plane: str = "tcp"
    event_plane: str | None = None
    use_kv_events: bool = False
    enable_local_indexer: bool = True
    exclude_tools_when_tool_choice_none: bool = True
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    default_thinking_mode: str | None = None
    structural_tag: dict[str, object] | None = None
    structural_tag_mode: str | None = None
    structural_tag_scope: str | None = None
    structural_tag_schema: object = None
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
        for name, source in (dict(zip(_SHARED, _SHARED, strict=True)) | _RENAMED).items():
            if (value := getattr(runtime_cfg, source, None)) is not None:
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

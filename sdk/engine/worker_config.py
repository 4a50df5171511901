"""How a worker presents an engine: its address, its model's names, its role."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tandem.runtime.errors import ConfigError
from tandem.sdk.engine.disaggregation import DisaggregationMode
from tandem.sdk.engine.health_check import parse_health_check_payload_cli
from tandem.sdk.worker.models import ModelInput

# field |-> the only values there are
_CHOICES: dict[str, tuple[object, ...]] = {
    "discovery_backend": ("etcd",),
    "request_plane": ("tcp",),
    "response_plane": ("tcp",),
    "event_plane": (None, "nats"),
}
# Whatever they would do is done nowhere: set, they are errors rather than silence.
_UNSUPPORTED = (
    "tool_call_parser", "reasoning_parser", "structural_tag", "structural_tag_mode",
    "structural_tag_scope", "structural_tag_schema", "route_to_encoder", "media_decoder",
    "media_fetcher", "kv_state_endpoint", "default_thinking_mode",
)  # fmt: skip
# What a runtime config is asked for under the very name it has here, and under another one.
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


@dataclass
class WorkerConfig:
    """What a worker needs beside the engine. Fields keep the order that positional callers know.

    `endpoint_types` is `chat`, `completions` or both by comma. A prefill engine is served at
    `{namespace}.prefill.{endpoint}` whatever `component` says. `use_kv_events`,
    `enable_local_indexer` and `exclude_tools_when_tool_choice_none` are accepted and change
    nothing.
    """

    namespace: str
    component: str = "backend"
    endpoint: str = "generate"
    model_name: str = ""  # a folder, a hub id, or the name of the model
    served_model_name: str | None = None  # None: the engine's, else model_name
    model_input: ModelInput = ModelInput.Tokens
    endpoint_types: str = "chat,completions"
    discovery_backend: str = "etcd"
    request_plane: str = "tcp"
    event_plane: str | None = None
    use_kv_events: bool = False
    custom_jinja_template: str | None = None  # a file with the chat template
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = True
    enable_local_indexer: bool = True
    enable_kv_routing: bool = True  # False: no KV events and no load reports leave this worker
    metrics_labels: list[tuple[str, str]] = field(default_factory=list)  # on all engine metrics
    disaggregation_mode: DisaggregationMode = DisaggregationMode.AGGREGATED
    health_check_payload: dict[str, Any] | None = None  # instead of the engine's
    structural_tag: dict[str, object] | None = None
    route_to_encoder: bool = False
    media_decoder: object = None
    media_fetcher: object = None
    kv_state_endpoint: str | None = None
    default_thinking_mode: str | None = None
    response_plane: str = "tcp"
    structural_tag_mode: str | None = None
    structural_tag_scope: str | None = None
    structural_tag_schema: object = None

    @classmethod
    def from_runtime_config(
        cls,
        runtime_cfg: object,
        model_name: str,
        served_model_name: str | None = None,
        model_input: ModelInput | None = None,
        **overrides: Any,
    ) -> "WorkerConfig":
        """Takes what `runtime_cfg` has of these fields, with `overrides` over it.

        Its role may be any enum with our names. Raises ConfigError where `namespace` is missing or
        the role is none of ours.
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
        """Raises ConfigError that names the field which no worker here can serve."""
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                known = " or ".join(repr(choice) for choice in choices)
                raise _refused(name, f"{getattr(self, name)!r} is not available, use {known}")
        for name in _UNSUPPORTED:
            if getattr(self, name):
                raise _refused(name, "is not supported, leave it out")
        if self.disaggregation_mode is DisaggregationMode.ENCODE:
            raise _refused("disaggregation_mode", "encode engines are not supported")
        is_apart = self.disaggregation_mode is not DisaggregationMode.AGGREGATED
        if is_apart and self.model_input is ModelInput.Text:
            raise _refused("model_input", "text engines compute prompts and answers together")
        types = [each.strip() for each in self.endpoint_types.split(",")]
        if not types or not set(types) <= {"chat", "completions"}:
            raise _refused("endpoint_types", f"{self.endpoint_types!r} is not chat,completions")

    @property
    def served_component(self) -> str:
        """The component that the engine is served under."""
        is_prefill = self.disaggregation_mode is DisaggregationMode.PREFILL
        return "prefill" if is_prefill else self.component


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError(f"WorkerConfig.{name}: {reason}", param=name)


def _mode(value: object) -> DisaggregationMode:
    """Enums of other packages go by their member's name, which is the same where values differ."""
    if value is None:
        return DisaggregationMode.AGGREGATED
    if isinstance(value, DisaggregationMode):
        return value
    if isinstance(value, Enum) and value.name in DisaggregationMode.__members__:
        return DisaggregationMode[value.name]
    known = ", ".join(DisaggregationMode.__members__)
    raise _refused("disaggregation_mode", f"{value!r} is not an enum member named {known}")

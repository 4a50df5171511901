"""The worker's side of an engine: its address, its model's names, its role."""

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from tandem.runtime.errors import ConfigError
from tandem.sdk.engine.disaggregation import DisaggregationMode
from tandem.sdk.worker.models import ModelInput


@dataclass
class WorkerConfig:
    """The settings of a worker that do not concern its engine.

    A prefill engine is served at `{namespace}.prefill.{endpoint}`, whatever `component` is.
    """

    namespace: str
    component: str = "backend"
    endpoint: str = "generate"
    model_name: str = ""  # a folder, a hub id, or the name of the model
    served_model_name: str | None = None  # None: the engine's, else model_name
    model_input: ModelInput = ModelInput.Tokens
    endpoint_types: str = "chat,completions"  # one of these, or both
    _: KW_ONLY
    custom_jinja_template: str | None = None  # a file with the chat template
    enable_kv_routing: bool = True  # False: no KV events and no load reports leave this worker
    metrics_labels: list[tuple[str, str]] = field(default_factory=list)  # on all engine metrics
    disaggregation_mode: DisaggregationMode = DisaggregationMode.AGGREGATED
    health_check_payload: dict[str, Any] | None = None  # instead of the engine's

    def check(self) -> None:
        """Raise ConfigError that names the first field with an unsupported value."""
        if self.disaggregation_mode is DisaggregationMode.ENCODE:
            raise refused("disaggregation_mode", "encode engines are not supported")
        is_apart = self.disaggregation_mode is not DisaggregationMode.AGGREGATED
        if is_apart and self.model_input is ModelInput.Text:
            raise refused("model_input", "text engines compute prompts and answers together")
        types = [each.strip() for each in self.endpoint_types.split(",")]
        if not types or not set(types) <= {"chat", "completions"}:
            raise refused("endpoint_types", f"{self.endpoint_types!r} is not chat,completions")

    @property
    def served_component(self) -> str:
        """The component that the engine is served under."""
        is_prefill = self.disaggregation_mode is DisaggregationMode.PREFILL
        return "prefill" if is_prefill else self.component


def refused(name: str, reason: str) -> ConfigError:
    """Return the error of a field of a WorkerConfig."""
    return ConfigError(f"WorkerConfig.{name}: {reason}", param=name)

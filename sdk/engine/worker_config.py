"""The worker's side of an engine: its address, its model's names, its role."""

from collections.abc import Hashable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

from tandem.runtime.errors import ConfigError
from tandem.runtime.wire.cluster_messages import AnswerRules
from tandem.sdk.engine.answer_names import (
    REASONING_PARSERS,
    REASONS_FIRST,
    SCHEMAS,
    SCOPES,
    STRUCTURAL_TAG_MODES,
    TOOL_PARSERS,
)
from tandem.sdk.engine.disaggregation import DisaggregationMode
from tandem.sdk.worker.models import ModelInput

T = TypeVar("T")


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
    endpoint_types: str = "chat,completions"  # and embeddings, rerank; an engine may say its own
    _: KW_ONLY
    custom_jinja_template: str | None = None  # a file with the chat template
    enable_kv_routing: bool = True  # False: no KV events and no load reports leave this worker
    metrics_labels: list[tuple[str, str]] = field(default_factory=list)  # on all engine metrics
    disaggregation_mode: DisaggregationMode = DisaggregationMode.AGGREGATED
    health_check_payload: dict[str, Any] | None = None  # instead of the engine's
    tool_call_parser: str | None = None  # the format of calls; None: by the chat template
    reasoning_parser: str | None = None  # the format of reasoning, in the same way
    exclude_tools_when_tool_choice_none: bool = True  # from the prompt
    structural_tag_mode: str | bool | None = None  # on: calls follow a grammar, where they may
    structural_tag_scope: str | None = None  # auto, or always: also with `tool_choice` "auto"
    structural_tag_schema: str | None = None  # auto, or strict: as if every tool were `strict`

    def check(self) -> None:
        """Raise ConfigError that names the first field with an unsupported value."""
        if self.disaggregation_mode is DisaggregationMode.ENCODE:
            raise refused("disaggregation_mode", "encode engines are not supported")
        is_apart = self.disaggregation_mode is not DisaggregationMode.AGGREGATED
        if is_apart and self.model_input is ModelInput.Text:
            raise refused("model_input", "text engines compute prompts and answers together")
        types = {each.strip() for each in self.endpoint_types.split(",")}
        if not types <= {"chat", "completions", "embeddings", "rerank"}:
            reason = f"{self.endpoint_types!r}: known are chat, completions, embeddings and rerank"
            raise refused("endpoint_types", reason)
        if self.model_input is ModelInput.Text and types & {"embeddings", "rerank"}:
            raise refused("endpoint_types", "embeddings and rerank are for engines of tokens")
        self.answer_rules()

    def answer_rules(self) -> AnswerRules:
        """Return what frontends are to know of the model's answers. Raise as `check` does."""
        tool_parser, reasoning_parser = self.tool_call_parser, self.reasoning_parser
        is_guided = self._known("structural_tag_mode", STRUCTURAL_TAG_MODES)
        return AnswerRules(
            tool_format=self._known("tool_call_parser", TOOL_PARSERS) if tool_parser else "",
            reasoning_format=(
                self._known("reasoning_parser", REASONING_PARSERS) if reasoning_parser else ""
            ),
            reasons_first=reasoning_parser in REASONS_FIRST,
            shows_unused_tools=not self.exclude_tools_when_tool_choice_none,
            guided_calls=self._known("structural_tag_scope", SCOPES) if is_guided else "",
            are_calls_strict=is_guided and self._known("structural_tag_schema", SCHEMAS),
        )

    def _known(self, name: str, choices: Mapping[Any, T]) -> T:
        value = getattr(self, name)
        if not isinstance(value, Hashable) or value not in choices:
            known = ", ".join(str(choice) for choice in choices if isinstance(choice, str))
            raise refused(name, f"{value!r} is not known; known are {known}")
        return choices[value]

    @property
    def served_component(self) -> str:
        """The component that the engine is served under."""
        is_prefill = self.disaggregation_mode is DisaggregationMode.PREFILL
        return "prefill" if is_prefill else self.component


def refused(name: str, reason: str) -> ConfigError:
    """Return the error of a field of a WorkerConfig."""
    return ConfigError(f"WorkerConfig.{name}: {reason}", param=name)

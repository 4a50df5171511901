"""The switches of a model's reasoning, under the names that servers of open models have."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.bodies.typed import Effort
from tandem.frontend.chat.body import RequestBody
from tandem.frontend.config import FrontendConfig


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True):
    """`thinking` of DeepSeek, GLM and Anthropic; budgets have no effect."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None

    @property
    def is_on(self) -> bool | None:
        """True or False where it says so; adaptive is as the model's template has it."""
        return {"enabled": True, "disabled": False}.get(self.type or "")


class Reasoning(msgspec.Struct, frozen=True, omit_defaults=True):
    """`reasoning` of OpenRouter; `max_tokens` above 0 turns it on, and is no limit."""

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None

    def for_chat(self) -> "Reasoning":
        """Return the fields that a chat knows."""
        return Reasoning(self.effort, self.enabled, self.exclude, self.max_tokens)


class ThinkingFields(RequestBody, frozen=True, kw_only=True):
    """The fields of a chat that turn reasoning on and off, or hide it; the first that is given."""

    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking: bool | Thinking | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None

    def check(self, config: FrontendConfig, ignored: Ignored) -> None:
        super().check(config, ignored)
        if self.separate_reasoning is False:
            ignored.add("separate_reasoning")

    @property
    def hides_reasoning(self) -> bool:
        """True if the answer leaves out what the model thought."""
        excluded = self.reasoning is not None and self.reasoning.exclude
        return bool(excluded) or self.include_reasoning is False

    def thinking_variables(self) -> dict[str, Any]:
        """Return the variables of a chat template; it knows the switch under two names."""
        reasoning = self.reasoning or Reasoning()
        thinking = self.thinking
        effort = self.reasoning_effort or reasoning.effort
        given = (
            None if effort is None else effort != "none",
            self.enable_thinking,
            thinking.is_on if isinstance(thinking, Thinking) else thinking,
            reasoning.enabled,
            None if reasoning.max_tokens is None else reasoning.max_tokens > 0,
        )
        thinks = next((each for each in given if each is not None), None)
        variables: dict[str, Any] = {}
        if thinks is not None:
            variables["enable_thinking"] = variables["thinking"] = thinks
        if effort is not None and thinks:
            variables["reasoning_effort"] = effort
        return variables

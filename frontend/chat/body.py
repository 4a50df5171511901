"""The fields that the bodies of chat and completions requests have in common, and their checks."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.frontend.bodies.ignored import Ignored
from tandem.frontend.bodies.invalid import invalid_field
from tandem.frontend.bodies.typed import Count, Natural
from tandem.frontend.chat.constraints import ConstraintFields
from tandem.frontend.chat.sampling import TokenId
from tandem.frontend.config import FrontendConfig
from tandem.runtime.wire.bounds import LARGEST_INT

_MAX_LOGIT_BIAS = 100
_MAX_TOKEN_LIST = 1024  # entries of logit_bias and of stop_token_ids


class StreamOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """`include_usage` adds a last chunk with the token counts; the other, counts in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; none is added


class RequestBody(ConstraintFields, frozen=True, kw_only=True):
    """The fields that chat and completions have in common."""

    model: str
    max_tokens: Count | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    logit_bias: Annotated[dict[str, Any], Meta(max_length=_MAX_TOKEN_LIST)] | None = None

    # Beyond OpenAI, as SamplingFields.
    min_tokens: Natural | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=_MAX_TOKEN_LIST)] | None = None
    prompt_logprobs: Natural | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=LARGEST_INT)] | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings, as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def token_biases(self) -> dict[int, float]:
        """`logit_bias` by token id. Raises InvalidRequestError for a wrong key or value."""
        biases: dict[int, float] = {}
        for key, value in (self.logit_bias or {}).items():
            is_number = type(value) in (int, float)
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise invalid_field(
                    "logit_bias", f"has the key {key[:32]!r}, which is not a token id"
                )
            if not is_number or not -_MAX_LOGIT_BIAS <= value <= _MAX_LOGIT_BIAS:
                raise invalid_field(
                    "logit_bias",
                    f"of token {key} must be a number from -{_MAX_LOGIT_BIAS} to {_MAX_LOGIT_BIAS}",
                )
            biases[int(key)] = float(value)
        return biases

    @property
    def include_usage(self) -> bool:
        """True when the stream ends with a usage chunk."""
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        """True when every chunk of the stream has the token counts so far."""
        options = self.stream_options
        return self.include_usage and bool(options and options.continuous_usage_stats)

    def check(self, config: FrontendConfig, ignored: Ignored) -> None:
        """Raise InvalidRequestError for values that the types allow and the frontend does not."""
        if (self.n or 1) > config.max_n:
            raise invalid_field("n", f"is {self.n}, the most is {config.max_n}")
        if self.stream_options is not None and not self.stream:
            raise invalid_field("stream_options", "is only allowed when `stream` is true")
        continuous = self.stream_options and self.stream_options.continuous_usage_stats
        if continuous and not self.include_usage:
            raise invalid_field("stream_options.continuous_usage_stats", "needs `include_usage`")
        if self.truncate_prompt_tokens == 0:
            raise invalid_field("truncate_prompt_tokens", "must be -1, or 1 and more")
        if self.prompt_logprobs is not None:
            self._check_prompt_logprobs(self.prompt_logprobs, config)
        if self.stop is not None:
            self._check_stop(config)

    def _check_prompt_logprobs(self, num: int, config: FrontendConfig) -> None:
        if self.stream:
            raise invalid_field("prompt_logprobs", "is only allowed when `stream` is false")
        if num > config.max_top_logprobs:
            raise invalid_field(
                "prompt_logprobs", f"is {num}, the most is {config.max_top_logprobs}"
            )

    def _check_stop(self, config: FrontendConfig) -> None:
        stops, field = self.stop_strings, self.origins.stop
        if len(stops) > config.max_stop_strings:
            raise invalid_field(
                field, f"has {len(stops)} strings, the most is {config.max_stop_strings}"
            )
        if "" in stops:
            raise invalid_field(field, "must not have an empty string")

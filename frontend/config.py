"""The frontend's config: its address, and the limits on requests."""

from functools import cache
from typing import Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tandem.frontend.parsers.formats import REASONING_FORMATS, TOOL_FORMATS


@cache
def model_formats(text: str) -> dict[str, str]:
    """Return model |-> format."""
    pairs = (pair.strip().rpartition("=") for pair in text.split(";") if pair.strip())
    return {model.strip(): format.strip() for model, _, format in pairs}


class FrontendConfig(BaseModel):
    """Address and limits of the HTTP server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address to listen on; loopback by default")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    tls_cert_file: str | None = Field(
        None, description="certificate of the HTTP server (PEM, with its chain); null: no TLS"
    )
    tls_key_file: str | None = Field(None, description="key of `tls_cert_file` (PEM)")
    api_keys: str = Field(
        "",
        description="API keys, `NAME SHA256 [requests_per_minute=N] [tokens_per_minute=N] "
        "[metrics]` each, `;` between several; none and no file: no key is asked for",
    )
    api_keys_file: str | None = Field(
        None, description="file with more of them, one per line; read again after a change"
    )
    cors_origins: str = Field(
        "",
        description="origins of web pages that may call from a browser, commas between several; "
        "`*` is every page",
    )
    tool_formats: str = Field(
        "",
        description="formats of tool calls, `MODEL=FORMAT` each, `;` between several; that of "
        "another model is found by its chat template",
    )
    reasoning_formats: str = Field(
        "", description="formats of reasoning, in the same way; `none` is none"
    )
    max_body_bytes: int = Field(
        8 * 1024 * 1024, ge=1024, description="largest request body (bytes); above it 413"
    )
    body_timeout_s: float = Field(
        60.0, gt=0, description="longest time for a request's body to arrive (s); after it 408"
    )
    max_open_body_bytes: int = Field(
        64 * 1024 * 1024,
        ge=1024,
        description="most bytes of request bodies at one time (bytes), of each body those beyond "
        "its first 16 KiB, until it is tokenized; above it 429 with Retry-After",
    )
    max_inflight_requests: int = Field(
        4096,
        ge=1,
        description="most requests that are answered at one time, those that wait for a worker "
        "included; above it 429 with Retry-After",
    )
    max_head_bytes: int = Field(
        64 * 1024,
        ge=1024,
        description="largest head of a request, its line and headers (bytes); above it 431",
    )
    head_timeout_s: float = Field(
        10.0, gt=0, description="longest time for a request's head to arrive (s); after it 408"
    )
    generation_config: Literal["auto", "ignore"] = Field(
        "auto",
        description="auto: temperature, top_p, top_k, min_p and repetition_penalty of a model's "
        "generation_config.json count where a request leaves them out; ignore: they do not",
    )
    max_n: int = Field(16, ge=1, description="largest `n` of a request")
    max_sequences: int = Field(
        256, ge=1, description="most choices of one request: its prompts times `n`"
    )
    max_top_logprobs: int = Field(
        20, ge=0, description="largest `top_logprobs` (chat) and `logprobs` (completions)"
    )
    max_stop_strings: int = Field(16, ge=1, description="most stop strings of a request")
    max_stored_responses: int = Field(
        1024,
        ge=0,
        description="most responses that are kept for `previous_response_id`, those used last; 0 "
        "keeps none",
    )
    max_stored_response_bytes: int = Field(
        64 * 1024 * 1024, ge=0, description="most memory of these responses (bytes)"
    )
    request_timeout_s: float = Field(
        600.0, gt=0, description="longest time from a request's arrival to its last token (s)"
    )
    migration_limit: int = Field(
        3,
        ge=0,
        description="most times that another worker resumes an answer whose worker failed; answers "
        "that a stopping worker, or one that changes its role, hands over do not count; 0 is "
        "never. A model's own limit takes precedence",
    )
    migration_wait_s: float = Field(
        10.0,
        ge=0,
        description="time an answer that has begun waits for a worker to register or to answer "
        "again when none is left to resume it (s); then it ends with an error",
    )
    return_wait_s: float = Field(
        10.0,
        ge=0,
        description="time after the loss of a model's last worker in which its new requests wait "
        "for a worker to register or to answer again (s); after it 503 with Retry-After",
    )
    max_waiting_requests: int = Field(
        256,
        ge=0,
        description="most new requests, each of their choices counted, that wait so at one time; "
        "above it 503 with Retry-After",
    )
    model_grace_s: float = Field(
        60.0,
        ge=0,
        description="time a model without a worker is still known (s): its requests get 503 with "
        "Retry-After; after it, 404",
    )
    exclude_s: float = Field(
        2.0, ge=0, description="time without new requests for a worker that failed (s)"
    )
    keep_alive_s: int = Field(75, ge=1, description="time an idle HTTP connection is kept (s)")
    max_pages: int = Field(
        16,
        ge=0,
        le=1000,
        description="most open pages of `/ui` at one time; above it 429 with Retry-After; 0 turns "
        "the page off",
    )
    tokenizer_threads: int = Field(
        2, ge=1, description="threads that tokenize long prompts beside the event loop"
    )

    @model_validator(mode="after")
    def _files_come_together(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file come together")
        return self

    @field_validator("tool_formats", "reasoning_formats")
    @classmethod
    def _formats_are_known(cls, text: str, info: ValidationInfo) -> str:
        known = TOOL_FORMATS if info.field_name == "tool_formats" else REASONING_FORMATS
        for model, format in model_formats(text).items():
            if not model or format not in (*known, "none"):
                raise ValueError(f"{model}={format}: the formats are {', '.join(known)} and none")
        return text

    def format_of(self, formats: str, model: str) -> str | None:
        """Return the format that `tool_formats` or `reasoning_formats` names for a model."""
        return model_formats(formats).get(model) if formats else None

    @property
    def scheme(self) -> str:
        """The scheme of the server's URL."""
        return "http" if self.tls_cert_file is None else "https"

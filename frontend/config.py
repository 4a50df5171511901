"""The frontend's config: its address, and the limits on requests."""

import re
import secrets
from functools import cache
from typing import Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tandem.frontend.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from tandem.runtime.wire.messages import MAX_IMAGES

ANY = "*"  # in a list of hosts or origins
_HOST = re.compile(r"[a-z0-9._-]+|\*")
_PAGE_KEY = re.compile(r"[A-Za-z0-9._~-]{16,256}")


def new_page_key() -> SecretStr:
    """Return a random key for the live page."""
    return SecretStr(secrets.token_urlsafe(24))


def listed(text: str) -> frozenset[str]:
    """Return the entries of a list with commas."""
    return frozenset(entry.strip() for entry in text.split(",") if entry.strip())


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
    listen_fd: int | None = Field(
        None,
        ge=3,
        description="inherited file descriptor of a socket that listens, in place of `host` and "
        "`port`: processes that share it follow one another without a refused connection",
    )
    share_limits: bool = Field(
        False,
        description="the limits of an API key are for all frontends with this key set together: "
        "each tells the others ten times a second, over NATS, what it has spent",
    )
    tls_cert_file: str | None = Field(
        None, description="certificate of the HTTP server (PEM, with its chain); null: no TLS"
    )
    tls_key_file: str | None = Field(None, description="key of `tls_cert_file` (PEM)")
    api_keys: str = Field(
        "",
        description="API keys, `NAME SHA256 [requests_per_minute=N] [tokens_per_minute=N] "
        "[operator] [metrics]` each, `;` between several; none and no file: no key is asked for",
    )
    api_keys_file: str | None = Field(
        None, description="file with more of them, one per line; read again after a change"
    )
    allowed_hosts: str = Field(
        "",
        description="names of this frontend that requests may have in `Host`, commas between "
        "several, beside addresses and `localhost`; `*` is every name. Empty: no other name on a "
        "loopback address without API keys, else every name",
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
    unknown_fields: Literal["warn", "refuse"] = Field(
        "warn",
        description="fields, tools and items of a request that are not known here: `warn` leaves "
        "them out and names them in the header `x-tandem-ignored` and in the log, `refuse` is 400",
    )
    images_as_text: bool = Field(
        True,
        description="images and files in results of tools, and in messages before the last answer, "
        "become a line of text for a model that reads text only; false: 400",
    )
    max_images: int = Field(
        16, ge=0, le=MAX_IMAGES, description="most images of one request, for models that see them"
    )
    max_image_bytes: int = Field(
        4 * 1024 * 1024, ge=1, description="largest image of a request (bytes), without its base64"
    )
    clamp_max_tokens: bool = Field(
        True,
        description="a `max_tokens` beyond what the prompt leaves of the context is cut to it; "
        "false: 400, but for messages in Anthropic's shape, where it is always cut",
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
        "its first 16 KiB, until it is tokenized; above it 429 with Retry-After. One API key has "
        "at most as much as it leaves, or one body",
    )
    max_inflight_requests: int = Field(
        4096,
        ge=1,
        description="most requests that are answered at one time, those that wait for a worker "
        "included; above it 429 with Retry-After. One API key has at most as many as it leaves",
    )
    max_head_bytes: int = Field(
        64 * 1024,
        ge=1024,
        description="largest head of a request, its line and headers (bytes); above it 431",
    )
    head_timeout_s: float = Field(
        10.0,
        gt=0,
        description="longest time for a request's head to arrive, and for the first one of a "
        "connection to begin (s); after it 408, or the end of the connection",
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
    max_inputs: int = Field(
        2048,
        ge=1,
        description="most texts of an embeddings request, documents of a rerank one, and "
        "pairs of a score one",
    )
    max_top_logprobs: int = Field(
        20, ge=0, description="largest `top_logprobs` (chat) and `logprobs` (completions)"
    )
    max_stop_strings: int = Field(16, ge=1, description="most stop strings of a request")
    max_stored_responses: int = Field(
        1024,
        ge=0,
        description="most responses that are kept for `previous_response_id`, those used last; "
        "where room is short, the API key with most of it loses its own; 0 keeps none",
    )
    max_stored_response_bytes: int = Field(
        64 * 1024 * 1024, ge=0, description="most memory of these responses (bytes)"
    )
    share_responses: bool = Field(
        False,
        description="show, continue and delete the stored responses of all frontends with this key "
        "set, each asked of the one that has it; it listens on the request plane then, as workers "
        "do (`runtime.host`, `runtime.port`)",
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
        30.0,
        ge=0,
        description="time an answer that has begun waits for a worker to register or to answer "
        "again when none is left to resume it (s); then it ends with an error",
    )
    return_wait_s: float = Field(
        30.0,
        ge=0,
        description="time after the loss of a model's last worker in which its new requests wait "
        "for a worker to register or to answer again (s); after it 503 with Retry-After",
    )
    max_waiting_requests: int = Field(
        256,
        ge=0,
        description="most new requests, each of their choices counted, that wait so at one time; "
        "above it 503 with Retry-After. One API key has at most as many as it leaves",
    )
    model_grace_s: float = Field(
        60.0,
        ge=0,
        description="time a model without a worker is still known (s): its requests get 503 with "
        "Retry-After; after it, 404. So do all requests of a frontend that has just started, until "
        "it knows a worker",
    )
    exclude_s: float = Field(
        2.0, ge=0, description="time without new requests for a worker that failed (s)"
    )
    comment_interval_s: float = Field(
        0.0,
        ge=0,
        description="time between comments in a stream that has no event yet (s), for proxies that "
        "end quiet responses; a later error is an event then; 0 sends none",
    )
    keep_alive_s: int = Field(
        75, ge=1, description="time an HTTP connection is kept between two requests (s)"
    )
    max_pages: int = Field(
        16,
        ge=0,
        le=1000,
        description="most open pages of `/ui` at one time; above it 429 with Retry-After; 0 turns "
        "the page off",
    )
    page_key: SecretStr | None = Field(
        None,
        description="key that opens `/ui` where there are no API keys, 16 to 256 of A-Z a-z 0-9 . "
        "_ ~ -; null: a random one, in the link that `tandem serve` prints, or else in the "
        "frontend's log",
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

    @property
    def allowed_origins(self) -> list[str]:
        """The origins of `cors_origins`."""
        return [each.strip() for each in self.cors_origins.split(",") if each.strip()]

    def format_of(self, formats: str, model: str) -> str | None:
        """Return the format that `tool_formats` or `reasoning_formats` names for a model."""
        return model_formats(formats).get(model) if formats else None

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts_are_names(cls, text: str) -> str:
        for name in listed(text.lower()):
            if not _HOST.fullmatch(name):
                raise ValueError(f"{name!r} is not a name, without scheme and port, or `*`")
        return text.lower()

    @field_validator("page_key")
    @classmethod
    def _page_key_fits_a_link(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and not _PAGE_KEY.fullmatch(key.get_secret_value()):
            raise ValueError("a key of the page has 16 to 256 of A-Z a-z 0-9 . _ ~ -")
        return key

    @property
    def asks_for_keys(self) -> bool:
        """True where requests need an API key."""
        return bool(self.api_keys or self.api_keys_file)

    @property
    def needs_page_key(self) -> bool:
        """True where only a key that is still to be drawn can open the live page."""
        return bool(self.max_pages) and self.page_key is None and not self.asks_for_keys

    def page_url(self, base: str) -> str:
        """Return the link of the live page at a server's URL, with the key that opens it."""
        if self.page_key is None or self.asks_for_keys:
            return f"{base}/ui"
        return f"{base}/ui#key={self.page_key.get_secret_value()}"

    @property
    def scheme(self) -> str:
        """The scheme of the server's URL."""
        return "http" if self.tls_cert_file is None else "https"

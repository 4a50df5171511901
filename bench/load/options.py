"""What a bench run is asked to do: the command line's options as one checked value."""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from tandem.bench.load.arrivals import Arrival
from tandem.bench.load.load import LoadPlan
from tandem.bench.load.openai_wire import BodyBuilder, Endpoint
from tandem.bench.load.trace import TraceWorkload, read_trace
from tandem.bench.load.workload import (
    FileWorkload,
    InputFormat,
    SyntheticWorkload,
    Workload,
    read_prompt_file,
)
from tandem.runtime.errors import ConfigError

DEFAULT_NUM_REQUESTS = 100


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Every option of `tandem bench`, under the names of its flags."""

    url: str
    model: str | None
    endpoint: Endpoint
    stream: bool
    temperature: float
    ignore_eos: bool
    extra_body: str
    prefill: str | None
    api_key_env: str | None
    timeout: float
    concurrency: int | None
    request_rate: float | None
    arrival: Arrival
    num_requests: int | None
    duration: float | None
    max_in_flight: int | None
    warmup: int
    input_tokens: int
    output_tokens: int | None
    input_stddev: float
    output_stddev: float
    prefix_tokens: int
    vocab_size: int
    input_format: InputFormat | None
    prompts: Path | None
    cache_salt: bool
    trace: Path | None
    time_scale: float
    trace_block_tokens: int
    max_input_tokens: int | None
    max_output_tokens: int | None
    limit: int | None
    goodput: list[str]
    seed: int | None
    compare: tuple[str, str] | None
    compare_url: str | None
    rounds: int
    namespace: str | None
    etcd_endpoints: str | None
    output: Path | None
    records: bool
    plot: Path | None

    def __post_init__(self) -> None:
        if self.prompts is not None and self.trace is not None:
            raise ConfigError("choose a prompt file or a trace, not both", param="--trace")
        if self.endpoint == "chat" and self.input_format == "tokens":
            raise ConfigError("chat takes text, not token ids: --input-format text")
        if self.prefill not in (None, "local", "remote"):
            raise ConfigError(f"--prefill is local or remote, not {self.prefill!r}")
        if self.rounds < 1:
            raise ConfigError("--rounds must be at least 1")

    @property
    def is_comparison(self) -> bool:
        return self.compare is not None or self.compare_url is not None

    def workload(self) -> Workload:
        """The prompts to send. Raises ConfigError for a bad file or length."""
        form: InputFormat = self.input_format or ("text" if self.endpoint == "chat" else "tokens")
        if self.prompts is not None:
            entries = read_prompt_file(self.prompts)
            return FileWorkload(str(self.prompts), entries, self.output_tokens, self.cache_salt)
        if self.trace is not None:
            return TraceWorkload(
                path=str(self.trace),
                entries=read_trace(self.trace, self.limit),
                time_scale=self.time_scale,
                block_tokens=self.trace_block_tokens,
                max_input_tokens=self.max_input_tokens,
                max_output_tokens=self.max_output_tokens,
                vocab_size=self.vocab_size,
                input_format=form,
            )
        return SyntheticWorkload(
            input_tokens=self.input_tokens,
            output_tokens=64 if self.output_tokens is None else self.output_tokens,
            input_stddev=self.input_stddev,
            output_stddev=self.output_stddev,
            prefix_tokens=self.prefix_tokens,
            vocab_size=self.vocab_size,
            input_format=form,
        )

    def plan(self) -> LoadPlan:
        """How requests follow one another; one at a time when nothing else is asked for."""
        is_open = self.request_rate is not None or (
            self.trace is not None and self.concurrency is None
        )
        num_requests = self.num_requests
        if num_requests is None and self.duration is None and self.trace is None:
            num_requests = DEFAULT_NUM_REQUESTS
        return LoadPlan(
            concurrency=self.concurrency if is_open else self.concurrency or 1,
            request_rate=self.request_rate,
            arrival=self.arrival,
            num_requests=num_requests,
            duration_s=self.duration,
            max_in_flight=self.max_in_flight,
        )

    def body(self, model: str) -> BodyBuilder:
        """How prompts become request bodies. Raises ConfigError for a bad --extra-body."""
        try:
            extra = msgspec.json.decode(self.extra_body or "{}", type=dict[str, Any])
        except msgspec.DecodeError as exc:
            raise ConfigError(f"--extra-body is not a JSON object: {exc}") from exc
        # the lengths of a prompt file are its own unless a length is asked for
        is_fixed_length = self.prompts is None or self.output_tokens is not None
        return BodyBuilder(
            model=model,
            endpoint=self.endpoint,
            stream=self.stream,
            ignore_eos=self.ignore_eos and is_fixed_length,
            temperature=self.temperature,
            extra=extra,
        )

    def headers(self) -> dict[str, str]:
        """Request headers; the key itself never appears on a command line or in a result."""
        headers = {"x-tandem-timeline": "true"}  # other servers pass over it
        if self.prefill is not None:
            headers["x-tandem-prefill"] = self.prefill
        if self.api_key_env is not None:
            key = os.environ.get(self.api_key_env)
            if not key:
                raise ConfigError(f"--api-key-env: ${self.api_key_env} is not set")
            headers["Authorization"] = f"Bearer {key}"
        return headers

    def to_json(self) -> dict[str, Any]:
        """The options as plain values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in values.items()
        }

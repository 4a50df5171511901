"""The options of `tandem bench` as one checked value, and the load that they describe."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from tandem.bench.client.wire import BodyBuilder, Endpoint
from tandem.bench.load.load import Arrival, LoadPlan
from tandem.bench.load.trace import TraceWorkload, read_trace
from tandem.bench.load.workload import (
    FileWorkload,
    InputFormat,
    SyntheticWorkload,
    Workload,
    read_prompt_file,
)
from tandem.bench.report.options import option
from tandem.runtime.errors import ConfigError

DEFAULT_NUM_REQUESTS = 100
MAX_RATE = 100_000
MAX_CONCURRENCY = 100_000

USUAL_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Measure an OpenAI-compatible server under load.

    Closed loop with --concurrency, open loop with --request-rate or a --trace. Latencies count
    from the scheduled send time. Every figure's definition is part of the output.
    """

    url: str = option(
        "",
        f"base URL of the server (default: of --config, of tandem serve here, or {USUAL_URL})",
        group="server",
    )
    model: str | None = option(None, "model name; default: the server's first")
    endpoint: Endpoint = option("completions", "API to drive")
    stream: bool = option(True, "stream; without it there is no TTFT or ITL")
    temperature: float = option(0.0, "sampling temperature; 0 is greedy")
    ignore_eos: bool = option(True, "ask for exactly the output length, past any end token")
    extra_body: str = option("", "JSON object merged into every request")
    prefill: Literal["local", "remote"] | None = option(None, "where to prefill, over the policy")
    api_key_env: str | None = option(
        None, "name of the environment variable that holds the API key"
    )
    timeout: float = option(600.0, "seconds a request may take")
    pace: float = option(
        1.0, "time runs so many times slower: that of tandem serve --emulate --pace", least=1
    )
    concurrency: int | None = option(
        None, "closed loop: requests in flight at all times (default: 1)", group="load"
    )
    request_rate: float | None = option(
        None, "open loop: arrivals per second, whatever the server does"
    )
    arrival: Arrival = option("poisson", "how open-loop arrivals are spaced")
    num_requests: int | None = option(None, "requests to send (default: 100, or until --duration)")
    duration: float | None = option(None, "seconds in which requests are sent")
    max_in_flight: int | None = option(
        None, "open loop: most requests in flight; the wait is measured"
    )
    warmup: int = option(2, "requests sent first that enter no figure", least=0)
    input_tokens: int = option(512, "synthetic prompt length", group="input")
    output_tokens: int | None = option(
        None, "output length (default: 64; of a prompt file: its own)"
    )
    input_stddev: float = option(0.0, "spread of the prompt length")
    output_stddev: float = option(0.0, "spread of the output length")
    prefix_tokens: int = option(0, "first tokens that all prompts share")
    vocab_size: int = option(256, "synthetic token ids are below this")
    input_format: InputFormat | None = option(
        None, "token ids (exact lengths), or text of one word per token"
    )
    prompts: Path | None = option(
        None, "prompt file: lines of text, or JSON with prompt or messages"
    )
    cache_salt: bool = option(
        True, "prompt file: a cache_salt per run, so that no run finds another's"
    )
    trace: Path | None = option(None, "trace to replay: Mooncake's, Azure's or BurstGPT's")
    time_scale: float = option(1.0, "trace: replay so many times faster")
    trace_block_tokens: int = option(
        512, "trace: tokens per hash id; below 512 all prompts shrink in proportion"
    )
    max_input_tokens: int | None = option(None, "trace: cut longer prompts to their first tokens")
    max_output_tokens: int | None = option(None, "trace: cut longer answers")
    limit: int | None = option(None, "trace: only its first requests")
    seed: int | None = option(None, "seed of lengths, arrivals and prompts (default: a fresh one)")
    sweep_rates: tuple[float, ...] = option(
        (), "measure each of these request rates in turn, over --request-rate", group="sweep"
    )
    sweep_concurrencies: tuple[int, ...] = option(
        (), "measure each of these concurrencies in turn, over --concurrency"
    )
    workers: int = option(1, "workers behind the address: throughput is drawn per worker", least=1)
    compare: tuple[str, str] | None = option(
        None,
        "two live settings, KEY=VALUE[,KEY=VALUE] each, under the same load",
        group="comparison",
    )
    compare_url: str | None = option(None, "base URL of a second server, compared with --url")
    rounds: int = option(3, "interleaved rounds; medians are shown", least=1)
    config: Path | None = option(
        None, "YAML file of config sections, which leads to the cluster and its frontend"
    )
    namespace: str | None = option(None, "the cluster's namespace")
    nats_url: str | None = option(None, "the cluster's NATS")
    etcd_endpoints: str | None = option(
        None, "the cluster's etcd (default: of the one that tandem serve runs here)"
    )
    goodput: tuple[str, ...] = option(
        (), "limits in ms for goodput: ttft:200 tpot:50 (also ttst, e2el)", group="result"
    )
    output: Path | None = option(None, "write everything as JSON")
    records: bool = option(False, "put every request into the JSON")
    plot: Path | None = option(None, "write a PNG: TTFT, ITL, throughput")
    report: Path | None = option(None, "write one HTML page to send: curves, timelines, figures")
    against: Path | None = option(
        None, "JSON of an earlier run (--output with --records): a second side of --report"
    )

    def __post_init__(self) -> None:
        if self.prompts is not None and self.trace is not None:
            raise ConfigError("choose a prompt file or a trace, not both", param="--trace")
        if self.endpoint == "chat" and self.input_format == "tokens":
            raise ConfigError("chat takes text, not token ids: --input-format text")
        if self.against is not None and self.report is None:
            raise ConfigError("--against is drawn by --report FILE.html", param="--against")
        modes = (self.sweep_rates, self.sweep_concurrencies, self.is_comparison)
        if sum(map(bool, modes)) > 1:
            raise ConfigError("choose --sweep-rates, --sweep-concurrencies or a comparison")
        if self.is_sweep and (self.trace or self.concurrency or self.request_rate):
            raise ConfigError(
                "a sweep has its own loads: no --trace, --concurrency, --request-rate"
            )
        for load in self.sweep_plans():
            rate, concurrency = load.request_rate or 1.0, load.concurrency or 1
            if not (rate <= MAX_RATE and concurrency <= MAX_CONCURRENCY):
                raise ConfigError(
                    f"a sweep goes to {MAX_RATE} requests/s, {MAX_CONCURRENCY} at once"
                )

    @property
    def is_sweep(self) -> bool:
        return bool(self.sweep_rates or self.sweep_concurrencies)

    @property
    def num_runs(self) -> int:
        """The number of runs that are measured."""
        return 2 * self.rounds if self.is_comparison else max(len(self.sweep_plans()), 1)

    def sweep_plans(self) -> list[LoadPlan]:
        """Return the loads of a sweep in order. Raises ConfigError for one that is not above 0."""
        plan = self.plan()
        rates = [
            dataclasses.replace(plan, concurrency=None, request_rate=rate)
            for rate in self.sweep_rates
        ]
        return rates + [
            dataclasses.replace(plan, concurrency=count) for count in self.sweep_concurrencies
        ]

    @property
    def is_comparison(self) -> bool:
        return self.compare is not None or self.compare_url is not None

    def workload(self) -> Workload:
        """Return the prompts to send. Raises ConfigError for a bad file or length."""
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
        """Return the order of requests: one at a time by default."""
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
        """Return the builder of request bodies. Raises ConfigError for a bad --extra-body."""
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
        """Return request headers; the key itself never appears on a command line or in a result."""
        headers = {"x-tandem-timeline": "true"}  # other servers pass over it
        if self.prefill is not None:
            headers["x-tandem-prefill"] = self.prefill
        if self.api_key_env is not None:
            key = os.environ.get(self.api_key_env)
            if not key:
                raise ConfigError(f"--api-key-env: ${self.api_key_env} is not set")
            headers["Authorization"] = f"Bearer {key}"
        return headers

"""The stack's own figures, with a model that costs next to nothing: what Tandem adds.

python -m tandem.bench.stack --output stack.json
"""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
import uvloop
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.bench.load.client import OpenAIClient, PreparedRequest
from tandem.bench.load.load import LoadPlan, LoadRun
from tandem.bench.load.metrics import Summary, summarize
from tandem.bench.load.openai_wire import BodyBuilder
from tandem.bench.load.report import utc_now, write_document
from tandem.bench.load.workload import Seeds, SyntheticWorkload
from tandem.bench.report.console import output_console
from tandem.bench.stack.near_zero import SHAPE, write_near_zero_model
from tandem.bench.stack.served_stack import ServedStack, served
from tandem.runtime.errors import ServiceError, TandemError

NUM_SHORT_CONNECTIONS = 32
NUM_STREAMS = 64
STREAM_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Target:
    """A figure to be measured and what it should be."""

    label: str
    unit: str
    limit: float | None = None
    kind: Literal["at most", "at least"] = "at most"

    def is_met_by(self, value: float) -> bool | None:
        if self.limit is None:
            return None
        return value <= self.limit if self.kind == "at most" else value >= self.limit


TARGETS: Mapping[str, Target] = {
    "agg_ttft_p50_ms": Target("TTFT p50, aggregated, concurrency 1", "ms", 2.0),
    "agg_ttft_p99_ms": Target("TTFT p99, aggregated, concurrency 1", "ms"),
    "agg_ttst_p50_ms": Target("time to second token p50, aggregated", "ms"),
    "disagg_ttft_p50_ms": Target("TTFT p50, disaggregated, concurrency 1", "ms", 5.0),
    "disagg_ttft_p99_ms": Target("TTFT p99, disaggregated, concurrency 1", "ms"),
    "disagg_ttst_p50_ms": Target("time to second token p50, disaggregated", "ms"),
    "disagg_remote_share": Target("  share really prefilled remotely", "", 1.0, "at least"),
    "streamed_tokens_per_s": Target(f"streamed tokens, {NUM_STREAMS} streams", "1/s"),
    "frontend_us_per_token": Target("frontend CPU per streamed token", "us", 10.0),
    "frontend_us_per_event": Target("frontend CPU per streamed chunk", "us"),
    "decode_us_per_token": Target("decode worker CPU per streamed token", "us"),
    "client_us_per_token": Target("load generator CPU per streamed token", "us"),
    "tokens_per_event": Target("tokens per streamed chunk", ""),
    "short_requests_per_s": Target(
        f"short requests, {NUM_SHORT_CONNECTIONS} connections", "1/s", 1500.0, "at least"
    ),
    "frontend_us_per_request": Target("frontend CPU per short request", "us"),
    "client_us_per_request": Target("load generator CPU per short request", "us"),
}

HOW: Mapping[str, str] = {
    "model": "random weights, preset near-zero, one plain character per token: what is left of the "
    "time is the stack's own",
    "ttft": "concurrency 1, streamed, 64 prompt tokens (all different), 8 output tokens",
    "disagg": "1 prefill and 1 decode worker, policy always_remote",
    "streams": f"{NUM_STREAMS} streams kept open, {STREAM_TOKENS} output tokens each; CPU time of "
    "the processes between the first request and the last byte, requests' own costs included",
    "short": f"not streamed, 8 prompt tokens, 1 to 4 output tokens, {NUM_SHORT_CONNECTIONS} "
    "kept-alive connections",
    "rounds": "every round starts each topology anew, one at a time; medians of rounds are shown",
}


@dataclass(frozen=True, slots=True)
class Load:
    """One of the loads, and how many requests of it are measured."""

    workload: SyntheticWorkload
    concurrency: int
    num_requests: int
    stream: bool


def make_load(
    input_tokens: int,
    output_tokens: int,
    *,
    concurrency: int,
    num_requests: int,
    stream: bool = True,
    output_stddev: float = 0.0,
) -> Load:
    workload = SyntheticWorkload(
        input_tokens, output_tokens, 0.0, output_stddev, 0, SHAPE.vocab_size, "tokens"
    )
    return Load(workload, concurrency, num_requests, stream)


LATENCY = make_load(64, 8, concurrency=1, num_requests=300)
STREAMS = make_load(16, STREAM_TOKENS, concurrency=NUM_STREAMS, num_requests=6 * NUM_STREAMS)
SHORT = make_load(
    8,
    2,
    concurrency=NUM_SHORT_CONNECTIONS,
    num_requests=5000,
    stream=False,
    output_stddev=1.0,
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One load's figures, and the CPU seconds each process spent on it."""

    summary: Summary
    cpu_s: Mapping[str, float]  # role, or `client`

    def us_per(self, who: str, count: int) -> float:
        """CPU microseconds of a role per token or request."""
        return self.cpu_s.get(who, 0.0) * 1e6 / max(count, 1)


async def measure(stack: ServedStack, load: Load, content: str) -> Measured:
    """Run a load against a stack. Raises ServiceError when a request failed."""
    client = OpenAIClient(stack.url, timeout_s=60.0)
    try:
        model = (await client.list_models())[0]
        body = BodyBuilder(model, "completions", load.stream, ignore_eos=True, temperature=0.0)
        warm_up = max(20, 2 * load.concurrency)
        await _run(client, body, load, warm_up, f"{content}/warm-up")
        before = stack.cpu_s()
        run = await _run(client, body, load, load.num_requests, content)
        after = stack.cpu_s()
    finally:
        client.close()
    cpu_s = {role: after[role] - before[role] for role in after} | {"client": run.client_cpu_s}
    summary = summarize(run.records, {})
    if summary.errors:
        raise ServiceError(f"requests failed, so there is no figure: {summary.errors}")
    return Measured(summary, {str(who): seconds for who, seconds in cpu_s.items()})


async def _run(
    client: OpenAIClient, body: BodyBuilder, load: Load, num_requests: int, content: str
) -> Any:
    requests = (
        PreparedRequest(body.encode(spec.prompt, spec.num_output_tokens), spec.num_output_tokens)
        for spec in load.workload.prompts(Seeds(0, content))
    )
    plan = LoadPlan(concurrency=load.concurrency, num_requests=num_requests)
    return await LoadRun(client, requests, plan).run()


def latency_figures(prefix: str, measured: Measured) -> dict[str, float]:
    """TTFT and time to second token of a run, in ms."""
    spreads = measured.summary.latencies_ms
    return {
        f"{prefix}_ttft_p50_ms": spreads["ttft"].p50,
        f"{prefix}_ttft_p99_ms": spreads["ttft"].p99,
        f"{prefix}_ttst_p50_ms": spreads["ttst"].p50,
    }


def stream_figures(measured: Measured) -> dict[str, float]:
    """Throughput of many streams and what a token costs each process."""
    summary = measured.summary
    us_per_token = measured.us_per("frontend", summary.num_output_tokens)
    return {
        "streamed_tokens_per_s": summary.output_token_throughput,
        "frontend_us_per_event": us_per_token * (summary.tokens_per_output_event or 0.0),
        "tokens_per_event": summary.tokens_per_output_event or 0.0,
        **{
            f"{who}_us_per_token": measured.us_per(who, summary.num_output_tokens)
            for who in ("frontend", "decode", "client")
        },
    }


def short_figures(measured: Measured) -> dict[str, float]:
    """Throughput of short requests and what one costs."""
    summary = measured.summary
    return {
        "short_requests_per_s": summary.request_throughput,
        **{
            f"{who}_us_per_request": measured.us_per(who, summary.num_succeeded)
            for who in ("frontend", "client")
        },
    }


async def measure_round(model: Path, run_dir: Path, name: str) -> dict[str, float]:
    """Every figure once: both topologies, one after the other."""
    figures: dict[str, float] = {}
    async with served(model, "aggregated", [], _folder(run_dir, f"{name}-agg")) as stack:
        figures |= latency_figures("agg", await measure(stack, LATENCY, f"{name}/agg"))
        figures |= stream_figures(await measure(stack, STREAMS, f"{name}/streams"))
        figures |= short_figures(await measure(stack, SHORT, f"{name}/short"))
    flags = ["--disagg.policy=always_remote"]
    async with served(model, "disagg-1p1d", flags, _folder(run_dir, f"{name}-disagg")) as stack:
        measured = await measure(stack, LATENCY, f"{name}/disagg")
        figures |= latency_figures("disagg", measured)
        num_remote = measured.summary.prefill_places.get("remote", 0)
        figures["disagg_remote_share"] = num_remote / measured.summary.num_succeeded
    return figures


def _folder(parent: Path, name: str) -> Path:
    path = parent / name
    path.mkdir(parents=True, exist_ok=True)
    return path


def results_json(
    rounds: Sequence[Mapping[str, float]],
    targets: Mapping[str, Target] = TARGETS,
    how: Mapping[str, str] = HOW,
) -> dict[str, Any]:
    """Medians, rounds and verdicts by figure."""
    figures: dict[str, Any] = {}
    for name, target in targets.items():
        values = [figures_of_round[name] for figures_of_round in rounds]
        median = statistics.median(values)
        figures[name] = {
            **msgspec.to_builtins(target),
            "median": median,
            "rounds": values,
            "is_met": target.is_met_by(median),
        }
    return {"how": dict(how), "figures": figures}


def print_results(console: Console, results: Mapping[str, Any]) -> None:
    """The table for docs and people."""
    table = Table("figure", "median", "unit", "target", "met", "rounds")
    table.columns[0].no_wrap = True
    for figure in results["figures"].values():
        limit, is_met = figure["limit"], figure["is_met"]
        table.add_row(
            figure["label"],
            f"{figure['median']:.5g}",
            figure["unit"],
            "" if limit is None else f"{figure['kind']} {limit:g}",
            {None: "", True: "yes", False: "[red]no[/]"}[is_met],
            "  ".join(f"{value:.4g}" for value in figure["rounds"]),
        )
    console.print(table)
    for name, text in results["how"].items():
        console.print(f"  {name}: {text}", soft_wrap=True)


async def run_rounds(num_rounds: int, run_dir: Path, say: Console) -> list[dict[str, float]]:
    """All rounds, with a near-zero model written into `run_dir`."""
    model = write_near_zero_model(run_dir / "near-zero")
    rounds: list[dict[str, float]] = []
    for index in range(num_rounds):
        say.print(f"round {index + 1} of {num_rounds}: aggregated, then disaggregated")
        rounds.append(await measure_round(model, run_dir, f"round-{index + 1}"))
    return rounds


def main(
    rounds: Annotated[int, typer.Option(min=1, help="rounds, of which medians are shown")] = 3,
    output: Annotated[Path | None, typer.Option(help="write everything as JSON")] = None,
) -> None:
    """Measure what the stack itself costs on this machine, with a near-zero model."""
    started_at = utc_now()
    say = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="tandem-stack-") as folder:
        try:
            results = results_json(uvloop.run(run_rounds(rounds, Path(folder), say)))
        except TandemError as error:
            say.print(f"[red]error:[/] {escape(error.message)}", soft_wrap=True)
            raise typer.Exit(1) from error
    print_results(output_console(), results)
    settings = {"rounds": rounds}
    write_document(output, "tandem.bench.stack", settings, started_at, results)


if __name__ == "__main__":
    typer.run(main)

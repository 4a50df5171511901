"""The cost of the stack itself, around a model that costs next to nothing.

python -m tandem.bench.stack --output stack.json
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tandem.bench.client.openai import OpenAIClient
from tandem.bench.load.metrics import Summary
from tandem.bench.load.options import BenchOptions
from tandem.bench.load.session import Session
from tandem.bench.report.figures import Figure, at_least, at_most, measured
from tandem.bench.report.options import option, parse
from tandem.bench.report.program import in_rounds, run_program
from tandem.bench.stack.near_zero import SHAPE, write_near_zero_model
from tandem.bench.stack.served_stack import ServedStack, served
from tandem.emulation.profile import Profile
from tandem.runtime.errors import ServiceError

MODULE = "tandem.bench.stack"
NUM_SHORT_CONNECTIONS = 32
NUM_STREAMS = 64
STREAM_TOKENS = 256
NUM_PACED = 100
PACED_STEP_S = 0.05


FIGURES = (
    Figure("agg_ttft_p50_ms", "TTFT p50, aggregated, concurrency 1", "ms", target=at_most(2.0)),
    Figure("agg_ttft_p99_ms", "TTFT p99, aggregated, concurrency 1", "ms"),
    Figure("agg_ttst_p50_ms", "time to second token p50, aggregated", "ms"),
    Figure(
        "disagg_ttft_p50_ms", "TTFT p50, disaggregated, concurrency 1", "ms", target=at_most(5.0)
    ),
    Figure("disagg_ttft_p99_ms", "TTFT p99, disaggregated, concurrency 1", "ms"),
    Figure("disagg_ttst_p50_ms", "time to second token p50, disaggregated", "ms"),
    Figure("disagg_remote_share", "  share really prefilled remotely", "", target=at_least(1.0)),
    Figure("streamed_tokens_per_s", f"streamed tokens, {NUM_STREAMS} streams", "1/s"),
    Figure("frontend_us_per_token", "frontend CPU per streamed token", "us", target=at_most(10.0)),
    Figure("frontend_us_per_event", "frontend CPU per streamed chunk", "us"),
    Figure(
        "frontend_us_per_paced_event",
        f"frontend CPU per event, {NUM_PACED} streams of a token each {PACED_STEP_S * 1e3:g} ms",
        "us",
        target=at_most(15.0),
    ),
    Figure("decode_us_per_token", "decode worker CPU per streamed token", "us"),
    Figure("client_us_per_token", "load generator CPU per streamed token", "us"),
    Figure("tokens_per_event", "tokens per streamed chunk", ""),
    Figure(
        "short_requests_per_s",
        f"short requests, {NUM_SHORT_CONNECTIONS} connections",
        "1/s",
        target=at_least(1500.0),
    ),
    Figure("frontend_us_per_request", "frontend CPU per short request", "us"),
    Figure("decode_us_per_request", "decode worker CPU per short request", "us"),
    Figure("client_us_per_request", "load generator CPU per short request", "us"),
)

HOW: Mapping[str, str] = {
    "model": "random weights, preset near-zero, one plain character per token: the rest of the "
    "time is the stack's own",
    "ttft": "concurrency 1, streamed, 64 prompt tokens (all different), 8 output tokens",
    "disagg": "1 prefill and 1 decode worker, policy always_remote",
    "streams": f"{NUM_STREAMS} streams kept open, {STREAM_TOKENS} output tokens each; CPU time of "
    "the processes between the first request and the last byte, requests' own costs included",
    "paced": f"{NUM_PACED} streams of {STREAM_TOKENS} tokens from an emulated device whose step "
    f"takes {PACED_STEP_S * 1e3:g} ms, so that every token is an event; requests' own costs and "
    "the idle frontend's included",
    "short": f"not streamed, 8 prompt tokens, 1 to 4 output tokens, {NUM_SHORT_CONNECTIONS} "
    "kept-alive connections",
    "rounds": "every round starts each topology anew, one at a time; medians of rounds are shown",
}


OPTIONS = BenchOptions(vocab_size=SHAPE.vocab_size, seed=0)
LATENCY = replace(OPTIONS, concurrency=1, num_requests=300, input_tokens=64, output_tokens=8)
STREAMS = replace(
    OPTIONS,
    concurrency=NUM_STREAMS,
    num_requests=6 * NUM_STREAMS,
    input_tokens=16,
    output_tokens=STREAM_TOKENS,
)
PACED = replace(STREAMS, concurrency=NUM_PACED, num_requests=NUM_PACED)
SHORT = replace(
    OPTIONS,
    concurrency=NUM_SHORT_CONNECTIONS,
    num_requests=5000,
    input_tokens=8,
    output_tokens=2,
    output_stddev=1.0,
    stream=False,
)


@dataclass(frozen=True, slots=True)
class Measured:
    """The summary of a load, and the CPU seconds of each role's processes."""

    summary: Summary
    cpu_s: Mapping[str, float]  # role, or `client`

    def us_per(self, role: str, count: int) -> float:
        """Return the CPU microseconds of a role per token or request."""
        return self.cpu_s.get(role, 0.0) * 1e6 / max(count, 1)


async def measure_load(
    stack: ServedStack, load: BenchOptions, label: str, num_warm_up: int | None = None
) -> Measured:
    """Run a closed loop against a stack. Raises ServiceError when a request failed."""
    session = Session(load)
    num_warm_up = num_warm_up or max(20, 2 * (load.concurrency or 1))
    warm_up = replace(session.plan, num_requests=num_warm_up)
    client = OpenAIClient(stack.url, timeout_s=60.0)
    try:
        body = await session.body(client)
        await session.measure(client, body, label=f"{label}/warm-up", plan=warm_up)
        before = stack.cpu_s()
        run = await session.measure(client, body, label=label)
        after = stack.cpu_s()
    finally:
        client.close()
    if run.summary.errors:
        raise ServiceError(f"requests failed, so there is no figure: {run.summary.errors}")
    cpu_s = {str(role): after[role] - before[role] for role in after}
    return Measured(run.summary, cpu_s | {"client": run.result.client_cpu_s})


def latency_values(prefix: str, load: Measured) -> dict[str, float]:
    """Return TTFT and time to second token of a run, in ms."""
    spreads = load.summary.latencies_ms
    return {
        f"{prefix}_ttft_p50_ms": spreads["ttft"].p50,
        f"{prefix}_ttft_p99_ms": spreads["ttft"].p99,
        f"{prefix}_ttst_p50_ms": spreads["ttst"].p50,
    }


def stream_values(load: Measured) -> dict[str, float]:
    """Return the throughput of many streams and the cost of a token for each process."""
    summary = load.summary
    us_per_token = load.us_per("frontend", summary.num_output_tokens)
    return {
        "streamed_tokens_per_s": summary.output_token_throughput,
        "frontend_us_per_event": us_per_token * (summary.tokens_per_output_event or 0.0),
        "tokens_per_event": summary.tokens_per_output_event or 0.0,
        **{
            f"{role}_us_per_token": load.us_per(role, summary.num_output_tokens)
            for role in ("frontend", "decode", "client")
        },
    }


def short_values(load: Measured) -> dict[str, float]:
    """Return the throughput of short requests and the cost of one."""
    summary = load.summary
    return {
        "short_requests_per_s": summary.request_throughput,
        **{
            f"{role}_us_per_request": load.us_per(role, summary.num_succeeded)
            for role in ("frontend", "decode", "client")
        },
    }


def paced_values(load: Measured) -> dict[str, float]:
    """Return the frontend's cost of an event that comes alone."""
    return {"frontend_us_per_paced_event": stream_values(load)["frontend_us_per_event"]}


def write_paced_profile(path: Path) -> Path:
    """Write the profile of a device whose every step takes `PACED_STEP_S`; return `path`."""
    profile = Profile(
        step_s=PACED_STEP_S,
        weights_s=1e-9,
        token_s=1e-9,
        position_s=0,
        context_s=0,
        row_s=0,
        kv_bytes_per_token=1024,
        kv_tokens=1_000_000,
        link_bytes_per_s=1e10,
        link_latency_s=1e-5,
        max_position_embeddings=4096,
    )
    path.write_text(profile.model_dump_json())  # JSON is YAML
    return path


async def measure_round(model: Path, run_dir: Path) -> dict[str, float]:
    """Return the value of every figure: both topologies, one after the other."""
    values: dict[str, float] = {}
    name = run_dir.name
    async with served(model, "aggregated", [], run_dir / "agg") as stack:
        values |= latency_values("agg", await measure_load(stack, LATENCY, f"{name}/agg"))
        values |= stream_values(await measure_load(stack, STREAMS, f"{name}/streams"))
        values |= short_values(await measure_load(stack, SHORT, f"{name}/short"))
    profile = write_paced_profile(run_dir / "paced.yaml")
    flags = ["--emulate", str(profile)]
    async with served(model, "aggregated", flags, run_dir / "paced") as stack:
        found = await measure_load(stack, PACED, f"{name}/paced", num_warm_up=NUM_PACED // 5)
        values |= paced_values(found)
    flags = ["--disagg.policy=always_remote"]
    async with served(model, "disagg-1p1d", flags, run_dir / "disagg") as stack:
        found = await measure_load(stack, LATENCY, f"{name}/disagg")
        values |= latency_values("disagg", found)
        num_remote = found.summary.prefill_places.get("remote", 0)
        values["disagg_remote_share"] = num_remote / found.summary.num_succeeded
    return values


async def measure(num_rounds: int, run_dir: Path) -> list[Figure]:
    """Measure all rounds, with a near-zero model written into `run_dir`."""
    model = write_near_zero_model(run_dir / "near-zero")
    return measured(FIGURES, await in_rounds(num_rounds, run_dir, partial(measure_round, model)))


@dataclass(frozen=True, slots=True)
class Options:
    """Measure the stack's own cost on this machine, with a near-zero model."""

    rounds: int = option(3, "rounds, of which medians are shown", least=1)
    output: Path | None = option(None, "write everything as JSON")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(Options, MODULE, arguments)
    return run_program(MODULE, options, HOW, partial(measure, options.rounds))


if __name__ == "__main__":
    sys.exit(main())

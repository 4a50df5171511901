"""The options of `tandem plan`: a load as `tandem bench` takes it, targets and handoffs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The load; every field is one of `tandem bench` with the same meaning."""

    concurrency: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Closed loop: requests in flight.")
    ] = None
    request_rate: Annotated[
        float | None, typer.Option(min=0, help="Open loop: arrivals per second.")
    ] = None
    arrival: Annotated[
        Literal["poisson", "constant"], typer.Option(help="Spacing of open-loop arrivals.")
    ] = "poisson"
    num_requests: Annotated[
        int | None, typer.Option(min=1, help="Requests; by default 100, or until --duration.")
    ] = None
    duration: Annotated[
        float | None, typer.Option(min=0, help="Seconds in which requests are sent.")
    ] = None
    input_tokens: Annotated[int, typer.Option(min=1, help="Prompt length.")] = 512
    output_tokens: Annotated[int, typer.Option(min=1, help="Answer length.")] = 64
    input_stddev: Annotated[float, typer.Option(min=0, help="Spread of prompt lengths.")] = 0.0
    output_stddev: Annotated[float, typer.Option(min=0, help="Spread of answer lengths.")] = 0.0
    prefix_tokens: Annotated[
        int, typer.Option(min=0, help="First tokens that all prompts share.")
    ] = 0
    trace: Annotated[
        Path | None,
        typer.Option(help="Trace: Mooncake's (with shared prefixes), Azure's or BurstGPT's."),
    ] = None
    time_scale: Annotated[float, typer.Option(help="Trace: replayed so many times faster.")] = 1.0
    trace_block_tokens: Annotated[
        int, typer.Option(min=1, max=512, help="Trace: tokens per hash id; fewer shrink prompts.")
    ] = 512
    max_input_tokens: Annotated[
        int | None, typer.Option(min=1, help="Trace: cut longer prompts.")
    ] = None
    max_output_tokens: Annotated[
        int | None, typer.Option(min=1, help="Trace: cut longer answers.")
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Trace: only its first requests.")] = None
    seed: Annotated[int, typer.Option(help="Seed of lengths, arrivals and ties.")] = 0


@dataclass(frozen=True, slots=True)
class HandoffOptions:
    """The time that a remote prefill takes on top of its computing."""

    handoff_ms: Annotated[
        float, typer.Option(min=0, max=60_000, help="Messages, transfer and checks of a handoff.")
    ] = 5.0
    handoff_us_per_token: Annotated[
        float, typer.Option(min=0, max=1e6, help="The same, per token whose KV is moved.")
    ] = 1.0

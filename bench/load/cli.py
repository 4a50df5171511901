"""The command line of `tandem bench`: load against an OpenAI-compatible server, measured."""

import logging
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import uvloop
from rich.console import Console
from rich.markup import escape

from tandem.bench.load.arrivals import Arrival
from tandem.bench.load.http_client import ExchangeError
from tandem.bench.load.openai_wire import Endpoint
from tandem.bench.load.options import BenchOptions
from tandem.bench.load.plot import write_plot
from tandem.bench.load.report import (
    document,
    print_definitions,
    print_summary,
    result_json,
    utc_now,
)
from tandem.bench.load.session import Measurement, Session
from tandem.bench.load.sides import run_comparison
from tandem.bench.load.workload import InputFormat
from tandem.runtime.errors import ConfigError, TandemError
from tandem.runtime.local_clusters import running_clusters

EXIT_ALL_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    subcommand_metavar="",
    # options may follow the words of --goodput
    context_settings={"allow_interspersed_args": True},
)


def _option(panel: str, help_text: str, *flags: str) -> Any:
    return typer.Option(*flags, help=help_text, rich_help_panel=panel)


USUAL_URL = "http://127.0.0.1:8000"
SERVER, LOAD, INPUT, AB, RESULT = "Server", "Load", "Input", "Comparison", "Result"


@app.callback()
def bench(
    ctx: typer.Context,
    more_goodput: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="")] = None,
    url: Annotated[
        str | None,
        _option(SERVER, f"base URL of the server (default: of tandem serve here, or {USUAL_URL})"),
    ] = None,
    model: Annotated[str | None, _option(SERVER, "model name; default: the server's first")] = None,
    endpoint: Annotated[Endpoint, _option(SERVER, "which API to drive")] = "completions",
    stream: Annotated[bool, _option(SERVER, "stream; without it there is no TTFT or ITL")] = True,
    temperature: Annotated[float, _option(SERVER, "sampling temperature; 0 is greedy")] = 0.0,
    ignore_eos: Annotated[
        bool, _option(SERVER, "ask for exactly the output length, past any end token")
    ] = True,
    extra_body: Annotated[str, _option(SERVER, "JSON object merged into every request")] = "",
    prefill: Annotated[
        str | None, _option(SERVER, "local or remote: where to prefill, over the policy")
    ] = None,
    api_key_env: Annotated[
        str | None, _option(SERVER, "name of the environment variable that holds the API key")
    ] = None,
    timeout: Annotated[float, _option(SERVER, "seconds a request may take")] = 600.0,
    concurrency: Annotated[
        int | None, _option(LOAD, "closed loop: requests in flight at all times (default: 1)")
    ] = None,
    request_rate: Annotated[
        float | None, _option(LOAD, "open loop: arrivals per second, whatever the server does")
    ] = None,
    arrival: Annotated[Arrival, _option(LOAD, "how open-loop arrivals are spaced")] = "poisson",
    num_requests: Annotated[
        int | None, _option(LOAD, "requests to send (default: 100, or until --duration)")
    ] = None,
    duration: Annotated[float | None, _option(LOAD, "seconds in which requests are sent")] = None,
    max_in_flight: Annotated[
        int | None, _option(LOAD, "open loop: most requests in flight; the wait is measured")
    ] = None,
    warmup: Annotated[int, _option(LOAD, "requests sent first that enter no figure")] = 2,
    input_tokens: Annotated[int, _option(INPUT, "synthetic prompt length")] = 512,
    output_tokens: Annotated[
        int | None, _option(INPUT, "output length (default: 64; of a prompt file: its own)")
    ] = None,
    input_stddev: Annotated[float, _option(INPUT, "spread of the prompt length")] = 0.0,
    output_stddev: Annotated[float, _option(INPUT, "spread of the output length")] = 0.0,
    prefix_tokens: Annotated[int, _option(INPUT, "first tokens that all prompts share")] = 0,
    vocab_size: Annotated[int, _option(INPUT, "synthetic token ids are below this")] = 256,
    input_format: Annotated[
        InputFormat | None,
        _option(INPUT, "token ids (exact lengths), or text of one word per token"),
    ] = None,
    prompts: Annotated[
        Path | None, _option(INPUT, "prompt file: lines of text, or JSON with prompt or messages")
    ] = None,
    cache_salt: Annotated[
        bool, _option(INPUT, "prompt file: a cache_salt per run, so that no run finds another's")
    ] = True,
    trace: Annotated[Path | None, _option(INPUT, "Mooncake-format trace to replay")] = None,
    time_scale: Annotated[float, _option(INPUT, "trace: replay so many times faster")] = 1.0,
    trace_block_tokens: Annotated[
        int, _option(INPUT, "trace: tokens per hash id; below 512 all prompts shrink in proportion")
    ] = 512,
    max_input_tokens: Annotated[
        int | None, _option(INPUT, "trace: cut longer prompts to their first tokens")
    ] = None,
    max_output_tokens: Annotated[int | None, _option(INPUT, "trace: cut longer answers")] = None,
    limit: Annotated[int | None, _option(INPUT, "trace: only its first requests")] = None,
    seed: Annotated[
        int | None, _option(INPUT, "seed of lengths, arrivals and prompts (default: a fresh one)")
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        _option(AB, "two live settings, KEY=VALUE[,KEY=VALUE] each, under the same load"),
    ] = None,
    compare_url: Annotated[
        str | None, _option(AB, "base URL of a second server, compared with --url")
    ] = None,
    rounds: Annotated[int, _option(AB, "interleaved rounds; medians are shown")] = 3,
    namespace: Annotated[str | None, _option(AB, "the cluster's namespace")] = None,
    etcd_endpoints: Annotated[
        str | None,
        _option(AB, "the cluster's etcd (default: of the one that tandem serve runs here)"),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        _option(RESULT, "limits in ms for goodput: ttft:200 tpot:50 (also ttst, e2el)"),
    ] = None,
    output: Annotated[Path | None, _option(RESULT, "write everything as JSON")] = None,
    records: Annotated[bool, _option(RESULT, "put every request into the JSON")] = False,
    plot: Annotated[Path | None, _option(RESULT, "write a PNG: TTFT, ITL, throughput")] = None,
) -> None:
    """Measure an OpenAI-compatible server under load.

    Closed loop with --concurrency, open loop with --request-rate or a --trace. Latencies count
    from the scheduled send time. Every figure's definition is part of the output.
    """
    values = {name: value for name, value in ctx.params.items() if name != "more_goodput"}
    values["goodput"] = [*(goodput or ()), *(more_goodput or ())]
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    raise typer.Exit(run(values))


def run(values: dict[str, Any]) -> int:
    """Run what the options (fields of BenchOptions) ask for; the process's exit code."""
    try:
        options = BenchOptions(**values | {"url": values["url"] or _served_here()})
        return uvloop.run(_run(Session(options), Console(highlight=False)))
    except (TandemError, ExchangeError, OSError) as error:
        Console(stderr=True, highlight=False).print(
            f"[red]error:[/] {escape(str(error))}", soft_wrap=True
        )
        return EXIT_USAGE


def _served_here() -> str:
    """Where `tandem serve` answers on this machine, or the usual address."""
    served = [cluster.http_url for cluster in running_clusters() if cluster.http_url]
    if len(served) > 1:
        raise ConfigError(f"several clusters run here, choose one: --url {' or '.join(served)}")
    return served[0] if served else USUAL_URL


async def _run(session: Session, console: Console) -> int:
    started_at = utc_now()
    with session.interrupt.installed():
        if session.options.is_comparison:
            results, runs = await run_comparison(session, console)
        else:
            results, runs = await _run_once(session, console)
    _print_reuse_warning(session)
    print_definitions(console)
    _write(session, started_at, results, runs)
    if session.interrupt.is_set:
        return EXIT_INTERRUPTED
    some_succeeded = any(run.summary.num_succeeded for rounds in runs.values() for run in rounds)
    return 0 if some_succeeded else EXIT_ALL_FAILED


async def _run_once(
    session: Session, console: Console
) -> tuple[dict[str, Any], dict[str, list[Measurement]]]:
    client = session.client(session.options.url)
    try:
        body = await session.body(client)
        await session.warm_up(client, body)
        measurement = await session.measure(client, body, label="bench")
    finally:
        client.close()
    title = f"{body.model} at {session.options.url}"
    print_summary(console, title, measurement, session.slos)
    results = result_json(measurement, with_records=session.options.records)
    return results, {title: [measurement]}


def _print_reuse_warning(session: Session) -> None:
    options = session.options
    verbatim = options.prompts is not None and not options.cache_salt
    if options.seed is not None or verbatim:
        why = "the prompt file is sent as it is" if verbatim else f"--seed {options.seed} is fixed"
        Console(stderr=True, highlight=False).print(
            f"[yellow]note:[/] {why}: running this again asks the same prompts, which the prefix "
            "cache of the server may still hold",
            soft_wrap=True,
        )


def _write(
    session: Session,
    started_at: datetime,
    results: dict[str, Any],
    runs: dict[str, list[Measurement]],
) -> None:
    options = session.options
    if options.output is not None:
        settings = {
            **options.to_json(),
            "seed": session.seed,
            "workload": session.workload.describe(),
            "plan": msgspec.to_builtins(session.plan),
        }
        whole = document(
            command=sys.argv, settings=settings, started_at=started_at, results=results
        )
        data = msgspec.json.format(msgspec.json.encode(whole), indent=2)
        options.output.write_bytes(data + b"\n")
    if options.plot is not None:
        drawn = {label: [run.result.records for run in rounds] for label, rounds in runs.items()}
        write_plot(options.plot, drawn)


if __name__ == "__main__":
    app()

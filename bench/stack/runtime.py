"""What one request through `tandem.sdk` costs: an endpoint that answers what it was asked.

python -m tandem.bench.stack.runtime --output runtime.json
"""

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import psutil
import typer
import uvloop
from rich.console import Console
from rich.markup import escape

from tandem.bench.load.report import utc_now, write_document
from tandem.bench.report.console import output_console
from tandem.bench.stack.__main__ import Target, print_results, results_json
from tandem.launch.supervise.child_process import ChildProcess
from tandem.launch.supervise.local_servers import LocalEtcd, LocalNats
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ServiceError, TandemError
from tandem.sdk import Client, DistributedRuntime, dynamo_worker

PATH = "bench.echo.generate"
REQUEST = {"text": "a request of a usual size", "token_ids": list(range(64)), "max_tokens": 16}
NUM_WARM_UP = 500
NUM_LATENCIES = 3000
NUM_REQUESTS = 30_000
CONCURRENCY = 64
NUM_STREAMS = 16
STREAM_ITEMS = 2000
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0

TARGETS: Mapping[str, Target] = {
    "p50_ms": Target("one request and its answer, p50, one at a time", "ms", 0.2),
    "p99_ms": Target("one request and its answer, p99, one at a time", "ms"),
    "requests_per_s": Target(f"requests, {CONCURRENCY} at a time", "1/s", 10_000.0, "at least"),
    "client_us_per_request": Target("client CPU per request", "us"),
    "worker_us_per_request": Target("worker CPU per request", "us"),
    "items_per_s": Target(f"streamed items, {NUM_STREAMS} streams", "1/s"),
    "client_us_per_item": Target("client CPU per streamed item", "us"),
    "worker_us_per_item": Target("worker CPU per streamed item", "us"),
}

HOW: Mapping[str, str] = {
    "processes": "one client process, one worker process, uvloop, request plane on the loopback",
    "request": f"a dict of {len(msgspec.msgpack.encode(REQUEST))} bytes; the handler is an async "
    "generator that yields it once, and the client reads to the end of the stream",
    "streams": f"{NUM_STREAMS} streams of {STREAM_ITEMS} small dicts, the handler turns the loop "
    "after each",
    "rounds": "every round starts the worker anew; medians of rounds are shown",
}


# ---- the worker -------------------------------------------------------------------------------


async def echo(request: Any) -> AsyncIterator[Any]:
    """The request; where it is a number, as many small items."""
    if not isinstance(request, int):
        yield request
        return
    for number in range(request):
        yield {"token_ids": [number]}
        await asyncio.sleep(0)


@dynamo_worker()
async def serve(runtime: DistributedRuntime) -> None:
    """The worker process; its cluster comes from the environment."""
    await runtime.endpoint(PATH).serve_endpoint(echo)


@contextlib.asynccontextmanager
async def worker_process(config: RuntimeConfig, log_path: Path) -> AsyncIterator[ChildProcess]:
    """The worker, from its start to its orderly end."""
    environment = {
        **os.environ,
        "NATS_SERVER": config.nats_url,
        "ETCD_ENDPOINTS": config.etcd_endpoints,
        "TANDEM_RUNTIME__NAMESPACE": config.namespace,
        "TANDEM_RUNTIME__LOG_LEVEL": "warning",
    }
    command = [sys.executable, "-m", "tandem.bench.stack.runtime", "--as-worker"]
    child = await ChildProcess.start(command, log_path, env=environment)
    try:
        yield child
    finally:
        await child.stop(STOP_TIMEOUT_S)


# ---- the client -------------------------------------------------------------------------------


async def wait_for_worker(client: Client, child: ChildProcess) -> None:
    """Raises ServiceError with the end of the worker's log when it does not come."""
    arriving = asyncio.ensure_future(client.wait_for_instances())
    ending = asyncio.ensure_future(child.wait())
    both = {arriving, ending}
    try:
        await asyncio.wait(both, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not arriving.done():
            raise ServiceError(f"the worker did not start:\n{child.log_tail()}")
    finally:
        for future in both:
            future.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def ask(client: Client) -> None:
    """One request, to the end of its answer. Raises ServiceError when the answer is wrong."""
    async for item in await client.round_robin(REQUEST, annotated=False):
        if item != REQUEST:
            raise ServiceError("the endpoint answered something else")


async def latencies(client: Client) -> dict[str, float]:
    """One request at a time."""
    for _ in range(NUM_WARM_UP):
        await ask(client)
    took_ms = []
    for _ in range(NUM_LATENCIES):
        started_s = time.perf_counter()
        await ask(client)
        took_ms.append((time.perf_counter() - started_s) * 1e3)
    return {
        "p50_ms": statistics.median(took_ms),
        "p99_ms": statistics.quantiles(took_ms, n=100)[98],
    }


async def throughput(client: Client, worker: psutil.Process) -> dict[str, float]:
    """Many requests at a time."""
    left = iter(range(NUM_REQUESTS))

    async def one_after_another() -> None:
        for _ in left:
            await ask(client)

    async with measured(worker, NUM_REQUESTS, "request") as figures, asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(one_after_another())
    return figures


async def streams(client: Client, worker: psutil.Process) -> dict[str, float]:
    """Long answers side by side."""

    async def read() -> None:
        num_items = 0
        async for _ in await client.round_robin(STREAM_ITEMS, annotated=False):
            num_items += 1
        if num_items != STREAM_ITEMS:
            raise ServiceError(f"{num_items} items of {STREAM_ITEMS} arrived")

    num_items = NUM_STREAMS * STREAM_ITEMS
    async with measured(worker, num_items, "item") as figures, asyncio.TaskGroup() as group:
        for _ in range(NUM_STREAMS):
            group.create_task(read())
    return figures


@contextlib.asynccontextmanager
async def measured(
    worker: psutil.Process, count: int, what: str
) -> AsyncIterator[dict[str, float]]:
    """Fills in the rate and both processes' CPU time when the body is done."""
    figures: dict[str, float] = {}
    before_s, client_before_s = _cpu_s(worker), time.process_time()
    started_s = time.perf_counter()
    yield figures
    took_s = time.perf_counter() - started_s
    figures[f"{what}s_per_s"] = count / took_s
    figures[f"client_us_per_{what}"] = (time.process_time() - client_before_s) * 1e6 / count
    figures[f"worker_us_per_{what}"] = (_cpu_s(worker) - before_s) * 1e6 / count


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure_round(config: RuntimeConfig, log_path: Path) -> dict[str, float]:
    """All figures, with a worker of its own."""
    async with worker_process(config, log_path) as child, DistributedRuntime(config) as runtime:
        client = await runtime.endpoint(PATH).client()
        await wait_for_worker(client, child)
        worker = psutil.Process(child.pid)
        return {
            **await latencies(client),
            **await throughput(client, worker),
            **await streams(client, worker),
        }


async def run_rounds(num_rounds: int, run_dir: Path, say: Console) -> list[dict[str, float]]:
    """All rounds, on a NATS and an etcd of their own."""
    nats, etcd = LocalNats(run_dir), LocalEtcd(run_dir)
    try:
        await asyncio.gather(nats.start(), etcd.start())
        config = RuntimeConfig(nats_url=nats.url, etcd_endpoints=etcd.url)
        rounds = []
        for index in range(num_rounds):
            say.print(f"round {index + 1} of {num_rounds}")
            rounds.append(await measure_round(config, run_dir / f"worker-{index + 1}.log"))
        return rounds
    finally:
        await asyncio.gather(nats.stop(), etcd.stop())


def main(
    rounds: Annotated[int, typer.Option(min=1, help="rounds, of which medians are shown")] = 3,
    output: Annotated[Path | None, typer.Option(help="write everything as JSON")] = None,
    as_worker: Annotated[bool, typer.Option("--as-worker", hidden=True)] = False,
) -> None:
    """Measure what a request through the runtime costs on this machine."""
    if as_worker:
        uvloop.run(serve())
        return
    started_at = utc_now()
    say = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="tandem-runtime-") as folder:
        try:
            measured_rounds = uvloop.run(run_rounds(rounds, Path(folder), say))
        except TandemError as error:
            say.print(f"[red]error:[/] {escape(error.message)}", soft_wrap=True)
            raise typer.Exit(1) from error
    results = results_json(measured_rounds, TARGETS, HOW)
    print_results(output_console(), results)
    settings = {"rounds": rounds}
    write_document(output, "tandem.bench.stack.runtime", settings, started_at, results)


if __name__ == "__main__":
    typer.run(main)

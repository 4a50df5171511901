"""The cost of a request through `tandem.sdk`, to an endpoint that sends it back.

python -m tandem.bench.stack.runtime --output runtime.json
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import uvloop

from tandem.bench.report.figures import Figure, at_least, at_most, measured, percentile
from tandem.bench.report.options import option, parse
from tandem.bench.report.program import in_rounds, run_program
from tandem.launch.supervise.child_process import ChildProcess
from tandem.launch.supervise.local_servers import LocalEtcd, LocalNats
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ServiceError
from tandem.sdk import Client, DistributedRuntime, dynamo_worker

MODULE = "tandem.bench.stack.runtime"
PATH = "bench.echo.generate"
REQUEST = {"text": "a request of a usual size", "token_ids": list(range(64)), "max_tokens": 16}
NUM_WARM_UP = 500
NUM_LATENCIES = 3000
NUM_REQUESTS = 30_000
CONCURRENCY = 64
NUM_STREAMS = 16
STREAM_ITEMS = 2000
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0

FIGURES = (
    Figure("p50_ms", "one request and its answer, p50, one at a time", "ms", target=at_most(0.2)),
    Figure("p99_ms", "one request and its answer, p99, one at a time", "ms"),
    Figure(
        "requests_per_s", f"requests, {CONCURRENCY} at a time", "1/s", target=at_least(10_000.0)
    ),
    Figure("client_us_per_request", "client CPU per request", "us"),
    Figure("worker_us_per_request", "worker CPU per request", "us"),
    Figure("items_per_s", f"streamed items, {NUM_STREAMS} streams", "1/s"),
    Figure("client_us_per_item", "client CPU per streamed item", "us"),
    Figure("worker_us_per_item", "worker CPU per streamed item", "us"),
)

HOW: Mapping[str, str] = {
    "processes": "one client process, one worker process, uvloop, request plane on the loopback",
    "request": f"a dict of {len(msgspec.msgpack.encode(REQUEST))} bytes; the handler is an async "
    "generator that yields it once, and the client reads to the end of the stream",
    "streams": f"{NUM_STREAMS} streams of {STREAM_ITEMS} small dicts, the handler yields to the "
    "event loop after each",
    "rounds": "every round starts the worker anew; medians of rounds are shown",
}


# ---- the worker -------------------------------------------------------------------------------


async def echo(request: Any) -> AsyncIterator[Any]:
    """Yield the request, or as many small items as its number."""
    if not isinstance(request, int):
        yield request
        return
    for number in range(request):
        yield {"token_ids": [number]}
        await asyncio.sleep(0)


@dynamo_worker()
async def serve(runtime: DistributedRuntime) -> None:
    """Run the worker process; its cluster comes from the environment."""
    await runtime.endpoint(PATH).serve_endpoint(echo)


@contextlib.asynccontextmanager
async def worker_process(config: RuntimeConfig, log_path: Path) -> AsyncIterator[ChildProcess]:
    """Run the worker while the body runs, and end it in order."""
    environment = {
        **os.environ,
        "NATS_SERVER": config.nats_url,
        "ETCD_ENDPOINTS": config.etcd_endpoints,
        "TANDEM_RUNTIME__NAMESPACE": config.namespace,
        "TANDEM_RUNTIME__LOG_LEVEL": "warning",
    }
    command = [sys.executable, "-m", MODULE, "--as-worker"]
    child = await ChildProcess.start(command, log_path, env=environment)
    try:
        yield child
    finally:
        await child.stop(STOP_TIMEOUT_S)


# ---- the client -------------------------------------------------------------------------------


async def wait_for_worker(client: Client, child: ChildProcess) -> None:
    """Wait for the worker. Raises ServiceError with the end of its log."""
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await client.wait_for_instances()
    except TimeoutError:
        raise ServiceError(f"the worker did not start:\n{child.log_tail()}") from None


async def ask(client: Client) -> None:
    """Send one request and read its whole answer. Raises ServiceError when it is wrong."""
    async for item in await client.round_robin(REQUEST, annotated=False):
        if item != REQUEST:
            raise ServiceError("the endpoint sent another answer than the request")


async def latencies(client: Client) -> dict[str, float]:
    """Measure one request at a time."""
    for _ in range(NUM_WARM_UP):
        await ask(client)
    took_ms = []
    for _ in range(NUM_LATENCIES):
        started_s = time.perf_counter()
        await ask(client)
        took_ms.append((time.perf_counter() - started_s) * 1e3)
    return {"p50_ms": percentile(took_ms, 0.5), "p99_ms": percentile(took_ms, 0.99)}


async def throughput(client: Client, worker: psutil.Process) -> dict[str, float]:
    """Measure many requests at a time."""
    left = iter(range(NUM_REQUESTS))

    async def one_after_another() -> None:
        for _ in left:
            await ask(client)

    async with cost_of(worker, NUM_REQUESTS, "request") as figures, asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(one_after_another())
    return figures


async def streams(client: Client, worker: psutil.Process) -> dict[str, float]:
    """Measure long answers side by side."""

    async def read() -> None:
        num_items = 0
        async for _ in await client.round_robin(STREAM_ITEMS, annotated=False):
            num_items += 1
        if num_items != STREAM_ITEMS:
            raise ServiceError(f"{num_items} items of {STREAM_ITEMS} arrived")

    num_items = NUM_STREAMS * STREAM_ITEMS
    async with cost_of(worker, num_items, "item") as figures, asyncio.TaskGroup() as group:
        for _ in range(NUM_STREAMS):
            group.create_task(read())
    return figures


@contextlib.asynccontextmanager
async def cost_of(worker: psutil.Process, count: int, what: str) -> AsyncIterator[dict[str, float]]:
    """Fill in the rate and both processes' CPU time when the body is done."""
    figures: dict[str, float] = {}
    before_s, client_before_s = sum(worker.cpu_times()[:2]), time.process_time()
    started_s = time.perf_counter()
    yield figures
    took_s = time.perf_counter() - started_s
    figures[f"{what}s_per_s"] = count / took_s
    figures[f"client_us_per_{what}"] = (time.process_time() - client_before_s) * 1e6 / count
    figures[f"worker_us_per_{what}"] = (sum(worker.cpu_times()[:2]) - before_s) * 1e6 / count


async def measure_round(config: RuntimeConfig, run_dir: Path) -> dict[str, float]:
    """Return the value of every figure, with a worker of its own."""
    log_path = run_dir / "worker.log"
    async with worker_process(config, log_path) as child, DistributedRuntime(config) as runtime:
        client = await runtime.endpoint(PATH).client()
        await wait_for_worker(client, child)
        worker = psutil.Process(child.pid)
        return {
            **await latencies(client),
            **await throughput(client, worker),
            **await streams(client, worker),
        }


async def measure(num_rounds: int, run_dir: Path) -> list[Figure]:
    """Measure all rounds, on a NATS and an etcd of their own."""
    async with LocalNats(run_dir) as nats, LocalEtcd(run_dir) as etcd:
        config = RuntimeConfig(nats_url=nats.url, etcd_endpoints=etcd.url)
        rounds = await in_rounds(num_rounds, run_dir, partial(measure_round, config))
    return measured(FIGURES, rounds)


@dataclass(frozen=True, slots=True)
class Options:
    """Measure the cost of a request through `tandem.sdk` on this machine."""

    rounds: int = option(3, "rounds, of which medians are shown", least=1)
    output: Path | None = option(None, "write everything as JSON")
    as_worker: bool = option(False, "be the worker process", is_hidden=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(Options, MODULE, arguments)
    if options.as_worker:
        uvloop.run(serve())
        return 0
    return run_program(MODULE, options, HOW, partial(measure, options.rounds))


if __name__ == "__main__":
    sys.exit(main())

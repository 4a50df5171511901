"""The whole stack on one device: frontend, decode and prefill worker, one policy against another.

A client's TTFT and ITL under each policy of disaggregation, at several loads, in turns.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

from tandem.bench.client.openai import OpenAIClient
from tandem.bench.engine.model import shape_on_disk, work_folder, written_model
from tandem.bench.engine.setting import num_rounds
from tandem.bench.load.closed_loop import ClosedLoop
from tandem.bench.load.live_config import LiveConfig, cluster_config
from tandem.bench.load.metrics import Summary
from tandem.bench.load.workload import SyntheticWorkload
from tandem.bench.report.figures import Figure
from tandem.bench.report.setting import Setting
from tandem.bench.stack.served_stack import served

POLICY = "disagg.policy"
POLICIES = ("always_local", "always_remote", "threshold")
TOPOLOGY = "disagg-1p1d"
REQUEST_TIMEOUT_S = 90.0
# Two workers share the device: each has KV for 160k tokens, in 19 GB.
GPU_FLAGS = ("--engine.num_blocks=2560",)
DRY_FLAGS = ("--engine.device=cpu", "--disagg.max_local_prefill_length=64")
LATENCIES = (("ttft", "p50"), ("itl", "p50"), ("itl", "p99"))

Measure = Callable[[ClosedLoop, str, str, int], Coroutine[Any, Any, Summary]]


def loads_for(setting: Setting) -> list[ClosedLoop]:
    """Return the loads; their prompts have many lengths, some on each side of the threshold."""
    mean, stddev, num_output = (64, 24.0, 12) if setting.is_dry else (1500, 800.0, 64)
    vocab_size = shape_on_disk(setting).vocab_size
    workload = SyntheticWorkload(mean, num_output, stddev, vocab_size=vocab_size)
    counts = {1: 2, 2: 4, 4: 8} if setting.is_dry else {1: 8, 8: 48, 32: 128}
    return [ClosedLoop(workload, concurrency, count) for concurrency, count in counts.items()]


def run(setting: Setting) -> Iterator[Figure]:
    """Yield the figures of the rounds so far after each of them, so that none is lost."""
    add_binaries_to_path()
    loads = loads_for(setting)
    with work_folder() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        resources = contextlib.AsyncExitStack()
        try:
            model = written_model(folder, setting)
            measure = runner.run(_start(resources, model, folder, setting))
            for policy in POLICIES:  # kernels are compiled at their first use
                runner.run(measure(loads[-1], policy, "warm-up", 0))
            found: dict[tuple[ClosedLoop, str], list[Summary]] = {}
            for index in range(num_rounds(setting)):
                for load in loads:
                    for policy in POLICIES:
                        content = f"{index}/{load.concurrency}"
                        summary = runner.run(measure(load, policy, content, index))
                        found.setdefault((load, policy), []).append(summary)
                for (load, policy), summaries in found.items():
                    yield from _figures(load, policy, summaries)
        finally:
            runner.run(resources.aclose())


async def _start(
    resources: contextlib.AsyncExitStack, model: Path, folder: Path, setting: Setting
) -> Measure:
    """Serve the model; return the function that measures a load under a policy."""
    flags = DRY_FLAGS if setting.is_dry else GPU_FLAGS
    serving = served(model, TOPOLOGY, flags, folder / "served")
    stack = await resources.enter_async_context(serving)
    config = cluster_config(stack.cluster.etcd_endpoints, stack.cluster.namespace)
    live = await resources.enter_async_context(LiveConfig(config, [POLICY]))
    client = OpenAIClient(stack.url, timeout_s=REQUEST_TIMEOUT_S)
    resources.callback(client.close)

    async def measure(load: ClosedLoop, policy: str, content: str, seed: int) -> Summary:
        await live.apply({POLICY: policy})
        _, summary = await load.run(client, f"{content}/{policy}", seed)
        return summary

    return measure


def _figures(load: ClosedLoop, policy: str, summaries: Sequence[Summary]) -> Iterator[Figure]:
    """Yield the latencies and the throughput, a sample for each round."""
    where = f"concurrency {load.concurrency}, {policy}"
    name = f"served_c{load.concurrency}_{policy}"
    for metric, mark in LATENCIES:
        # answers that all came in one piece have no gaps
        spreads = [each.latencies_ms[metric] for each in summaries if metric in each.latencies_ms]
        samples = tuple(float(getattr(spread, mark)) for spread in spreads)
        yield Figure(f"{name}_{metric}_{mark}", f"{metric.upper()} {mark}, {where}", "ms", samples)
    remote = [
        each.prefill_places.get("remote", 0) / max(1, each.num_succeeded) for each in summaries
    ]
    per_event = [each.tokens_per_output_event or 0.0 for each in summaries]
    note = (
        f"prefilled remotely: {', '.join(f'{share:.0%}' for share in remote)}; "
        f"tokens per streamed chunk: {', '.join(f'{count:.2f}' for count in per_event)}"
    )
    samples = tuple(each.output_token_throughput for each in summaries)
    yield Figure(f"{name}_output_tokens", f"output tokens, {where}", "1/s", samples, notes=(note,))


def add_binaries_to_path() -> None:
    """Add the programs of packages that lie on the module path alone, such as nats-server."""
    folders = [str(Path(entry) / "bin") for entry in sys.path if (Path(entry) / "bin").is_dir()]
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *folders])

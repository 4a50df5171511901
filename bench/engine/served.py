"""The whole stack on one device: frontend, decode and prefill worker, one policy against another.

A client's TTFT and ITL under each policy of disaggregation, at several loads, in turns.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from tandem.bench.engine.model import shape_on_disk, work_folder, written_model
from tandem.bench.engine.setting import num_rounds
from tandem.bench.kernels.figures import Measurement
from tandem.bench.kernels.timing import Setting
from tandem.bench.load.client import OpenAIClient, PreparedRequest
from tandem.bench.load.live_config import LiveConfig, cluster_config
from tandem.bench.load.load import LoadPlan, LoadRun
from tandem.bench.load.metrics import Summary, summarize
from tandem.bench.load.openai_wire import BodyBuilder
from tandem.bench.load.workload import Seeds, SyntheticWorkload
from tandem.bench.stack.served_stack import ServedStack, served
from tandem.runtime.errors import ServiceError
from tandem.runtime.local_clusters import running_clusters

POLICY = "disagg.policy"
POLICIES = ("always_local", "always_remote", "threshold")
TOPOLOGY = "disagg-1p1d"
REQUEST_TIMEOUT_S = 90.0
# Two workers share the device: each has KV for 160k tokens, in 19 GB.
GPU_FLAGS = ("--engine.num_blocks=2560", "--engine.max_num_batched_tokens=8192")
FIGURES: Sequence[tuple[str, str, str]] = (
    ("ttft", "p50", "TTFT p50"),
    ("itl", "p50", "ITL p50"),
    ("itl", "p99", "ITL p99"),
)


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of `concurrency` clients."""

    concurrency: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Prompts of many lengths, some on each side of the threshold, and the loads."""

    workload: SyntheticWorkload
    loads: tuple[Load, ...]
    flags: tuple[str, ...]


def plan_for(setting: Setting) -> Plan:
    shape = shape_on_disk(setting)
    means = (64, 24.0, 12) if setting.is_dry else (1500, 800.0, 64)
    mean, stddev, num_output = means
    workload = SyntheticWorkload(mean, num_output, stddev, 0.0, 0, shape.vocab_size, "tokens")
    if setting.is_dry:
        flags = ("--engine.device=cpu", "--disagg.max_local_prefill_length=64")
        return Plan(workload, (Load(1, 2), Load(2, 4), Load(4, 8)), flags)
    return Plan(workload, (Load(1, 8), Load(8, 48), Load(32, 128)), GPU_FLAGS)


class Side:
    """A served topology whose policy can be changed, and a client of it."""

    def __init__(self, stack: ServedStack, live: LiveConfig, plan: Plan) -> None:
        self._live = live
        self._plan = plan
        self.client = OpenAIClient(stack.url, timeout_s=REQUEST_TIMEOUT_S)
        self._model = ""

    async def measure(self, load: Load, policy: str, content: str, seed: int) -> Summary:
        """One run under a policy. Raises ServiceError when a request failed."""
        await self._live.apply({POLICY: policy})
        self._model = self._model or (await self.client.list_models())[0]
        body = BodyBuilder(self._model, "completions", True, ignore_eos=True, temperature=0.0)
        requests = (
            PreparedRequest(
                body.encode(spec.prompt, spec.num_output_tokens), spec.num_output_tokens
            )
            for spec in self._plan.workload.prompts(Seeds(seed, content))
        )
        plan = LoadPlan(concurrency=load.concurrency, num_requests=load.num_requests)
        result = await LoadRun(self.client, requests, plan).run()
        summary = summarize(result.records, {})
        if summary.errors:
            raise ServiceError(f"requests failed under {policy}: {summary.errors}")
        return summary


def run(setting: Setting) -> Iterator[Measurement]:
    """Figures of the rounds so far after each of them, so that none is lost with the last."""
    _find_binaries()
    plan = plan_for(setting)
    with (
        work_folder() as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        resources = contextlib.AsyncExitStack()
        try:
            side = runner.run(_start(resources, written_model(folder, setting), folder, plan))
            for policy in POLICIES:  # kernels are compiled at their first use
                runner.run(side.measure(plan.loads[-1], policy, f"warm-up/{policy}", 0))
            found: dict[tuple[Load, str], list[Summary]] = {}
            for index in range(num_rounds(setting)):
                for load in plan.loads:
                    for policy in POLICIES:
                        content = f"{index}/{load.concurrency}/{policy}"
                        summary = runner.run(side.measure(load, policy, content, index))
                        found.setdefault((load, policy), []).append(summary)
                for (load, policy), summaries in found.items():
                    yield from _measurements(load, policy, summaries)
        finally:
            runner.run(resources.aclose())


async def _start(
    resources: contextlib.AsyncExitStack, model: Path, folder: Path, plan: Plan
) -> Side:
    run_dir = folder / "served"
    run_dir.mkdir(exist_ok=True)
    stack = await resources.enter_async_context(served(model, TOPOLOGY, plan.flags, run_dir))
    cluster = next(each for each in running_clusters() if each.http_url == stack.url)
    live = LiveConfig(cluster_config(cluster.etcd_endpoints, cluster.namespace), [POLICY])
    side = Side(stack, await resources.enter_async_context(live), plan)
    resources.callback(side.client.close)
    return side


def _measurements(load: Load, policy: str, summaries: Sequence[Summary]) -> Iterator[Measurement]:
    """The latencies and the throughput, a value for each round."""
    where = f"concurrency {load.concurrency}, {policy}"
    name = f"served_c{load.concurrency}_{policy}"
    remote = [
        each.prefill_places.get("remote", 0) / max(1, each.num_succeeded) for each in summaries
    ]
    per_event = [each.tokens_per_output_event or 0.0 for each in summaries]
    for metric, mark, label in FIGURES:
        # answers that all came in one piece have no gaps
        spreads = [each.latencies_ms[metric] for each in summaries if metric in each.latencies_ms]
        values = tuple(float(getattr(spread, mark)) for spread in spreads)
        yield Measurement(
            name=f"{name}_{metric}_{mark}",
            label=f"{label}, {where}",
            unit="ms",
            values=values,
        )
    yield Measurement(
        name=f"{name}_output_tokens",
        label=f"output tokens, {where}",
        unit="1/s",
        values=tuple(each.output_token_throughput for each in summaries),
        note=f"prefilled remotely: {_words(remote, '.0%')}; "
        f"tokens per streamed chunk: {_words(per_event, '.2f')}",
    )


def _words(values: Sequence[float], form: str) -> str:
    return ", ".join(f"{value:{form}}" for value in values)


def _find_binaries() -> None:
    """Let programs of packages that lie on the module path alone be found, such as nats-server."""
    folders = [str(Path(entry) / "bin") for entry in sys.path if (Path(entry) / "bin").is_dir()]
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *folders])

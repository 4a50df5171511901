"""One reading of a cluster: the report of `tandem status`, and the counts of its processes."""

import asyncio
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tandem.bench.client.openai import OpenAIClient
from tandem.config.model import EffectiveConfig
from tandem.launch.cluster.status import ClusterReport, read_cluster
from tandem.launch.top.window import Counts, Key
from tandem.runtime.errors import ServiceError
from tandem.runtime.membership.instance_report import CALL_TIMEOUT_S, InstanceReport

# metric of a frontend |-> kind of its counts
HISTOGRAMS: Mapping[str, str] = {
    "tandem_frontend_time_to_first_token_seconds": "ttft",
    "tandem_frontend_inter_token_latency_seconds": "itl",
}
PROMPTS = "prompts"


@dataclass(frozen=True, slots=True)
class Reading:
    """A cluster at one moment; a process that did not answer has no counts."""

    report: ClusterReport
    counts: Mapping[str, Counts]  # by instance and epoch
    problems: tuple[str, ...] = ()


async def read(effective: EffectiveConfig, headers: Mapping[str, str]) -> Reading:
    """Read the cluster; `headers` go to the frontends. Raise ServiceError without an etcd."""
    report = await read_cluster(effective)
    frontends = [each for each in report.instances if each.instance.component == "frontend"]
    answers = await asyncio.gather(*(_metrics(each, headers) for each in frontends))
    counts = {_source(each): worker_counts(each) for each in report.instances if each.worker}
    problems = []
    for frontend, answer in zip(frontends, answers, strict=True):
        if isinstance(answer, str):
            problems.append(answer)
        else:
            counts[_source(frontend)] = answer
    return Reading(report, counts, tuple(problems))


def _source(report: InstanceReport) -> str:
    return f"{report.instance.instance_id}/{report.instance.epoch}"


def worker_counts(report: InstanceReport) -> Counts:
    """Return the prompts of a decode worker by place and cause."""
    details = {} if report.worker is None else report.worker.details
    found: dict[Key, float] = {}
    for name, value in details.items():
        kind, *labels = name.split(".")
        if kind == PROMPTS and len(labels) == 2 and isinstance(value, int):
            found[kind, *labels] = value
    return found


async def _metrics(report: InstanceReport, headers: Mapping[str, str]) -> Counts | str:
    """Return the counts of a frontend, or the reason why there are none."""
    scheme, _, place = report.instance.address.rpartition("://")
    client = OpenAIClient(f"{scheme or 'http'}://{place}", headers=headers)
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            text = (await client.get("/metrics")).decode()
        return dict(frontend_counts(text))
    except TimeoutError:
        return f"no latencies: {place}: no answer within {CALL_TIMEOUT_S:g} s"
    except (ServiceError, ValueError) as error:
        return f"no latencies: {error}"
    finally:
        client.close()


def frontend_counts(text: str) -> Iterator[tuple[Key, float]]:
    """Yield the cumulative buckets of TTFT and ITL by model and bound. Raise ValueError."""
    for family in text_string_to_metric_families(text):
        kind = HISTOGRAMS.get(family.name)
        for sample in family.samples if kind else ():
            if kind and sample.name.endswith("_bucket") and math.isfinite(sample.value):
                yield (kind, sample.labels["model"], sample.labels["le"]), sample.value

"""Readings of a small cluster."""

from collections.abc import Mapping

import msgspec

from tandem.frontend.telemetry.metrics import FrontendMetrics
from tandem.launch.cluster.status import ClusterReport, QueueReport
from tandem.launch.top.collect import Reading
from tandem.launch.top.window import Counts
from tandem.runtime.membership.instance_report import InstanceReport
from tandem.runtime.wire.cluster_messages import Instance, LoadReport, WorkerStatus

LOAD = LoadReport("decode-1", "e1", "decode", 3, 2, 0, 100, 50, 25)


def worker(instance_id: str, *, answers: bool = True, **details: int | float) -> InstanceReport:
    """Return a decode worker whose KV pool is a quarter used and a quarter cached."""
    instance = Instance("ns", "decode", "generate", instance_id, "127.0.0.1:1", "e1", "m")
    if not answers:
        return InstanceReport(instance, "no answer within 0.5 s")
    return InstanceReport(instance, "serving", WorkerStatus(instance, "serving", LOAD, details))


def frontend() -> InstanceReport:
    return InstanceReport(Instance("ns", "frontend", "http", "front", "127.0.0.1:2", "e1"), "ready")


def reading(
    *instances: InstanceReport, counts: Mapping[str, Counts] | None = None, error: str = ""
) -> Reading:
    """Return a reading with one queue of 7 jobs."""
    queues = [QueueReport("m", "d1", 7, 7000, 2, 1, error)]
    thresholds = {"policy": "threshold", "max_local_prefill_length": 512}
    report = ClusterReport("ns", "etcd", "nats", list(instances), queues, thresholds)
    return Reading(report, counts or {})


def changed(report: InstanceReport, epoch: str) -> InstanceReport:
    """Return the same instance after a new start."""
    instance = msgspec.structs.replace(report.instance, epoch=epoch)
    return msgspec.structs.replace(report, instance=instance)


def metrics(ttft_s: float, times: int) -> str:
    """Return the metrics of a frontend whose every answer had this TTFT."""
    found = FrontendMetrics()
    found.time_to_first_token.labels("m").observe(ttft_s, times)
    found.inter_token_latency.labels("m").observe(0.015, times)
    return found.render().decode()

"""docs/metrics.md against the metrics that the processes make."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from prometheus_client.metrics import MetricWrapperBase

from tandem.decode.metrics import DecodeMetrics
from tandem.frontend.telemetry.metrics import FrontendMetrics, Histogram, Sums
from tandem.prefill.metrics import PrefillMetrics
from tandem.runtime.process.loop_watch import LoopMetrics
from tandem.sdk.engine.metrics import ENGINE_LABELS, EngineGauges
from tandem.sdk.health.endpoint_metrics import ENDPOINT_FAMILIES, ENDPOINT_LABELS
from tandem.worker.kernel_builds import KernelBuilds
from tandem.worker.metrics import WorkerMetrics
from tools.dashboards.table import documented

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "metrics.md"
# Whoever else makes metrics must be added here, and so to the page.
MAKERS = {
    "decode/metrics.py", "prefill/metrics.py", "worker/kernel_builds.py", "worker/metrics.py",
    "frontend/telemetry/metrics.py", "runtime/process/metrics.py", "sdk/health/endpoint_metrics.py",
    "sdk/engine/metrics.py", "runtime/process/loop_watch.py",
}  # fmt: skip
# who imports these alone shows metrics, and makes none
READERS = {"text_string_to_metric_families", "REGISTRY", "generate_latest"}
HISTOGRAM_SERIES = ("_bucket", "_sum", "_count")


class Described(NamedTuple):
    """The parts of a metric that its table and its maker have to agree in."""

    name: str
    kind: str
    labels: tuple[str, ...]


@cache
def made() -> frozenset[Described]:
    """What the three processes make, read off the metric objects.

    Not off the process's registry: other tests put metrics of their own there.
    """
    engine = EngineGauges(dict.fromkeys(ENGINE_LABELS, ""))
    workers = (DecodeMetrics("m"), PrefillMetrics("m"), WorkerMetrics("m", 16), KernelBuilds())
    owners = (FrontendMetrics(), *workers, engine, LoopMetrics())
    return frozenset(
        _describe(each)
        for owner in owners
        for each in vars(owner).values()
        if isinstance(each, MetricWrapperBase | Histogram | Sums)
    ) | {Described(name, kind, ENDPOINT_LABELS) for name, (kind, _) in ENDPOINT_FAMILIES.items()}


def _describe(metric: MetricWrapperBase | Histogram | Sums) -> Described:
    family = next(iter(metric.collect()))
    # the client's metrics know their labels, our own give them to their family
    labels = getattr(metric, "_labelnames", ()) or getattr(family, "_labelnames", ())
    suffix = "_total" if family.type == "counter" else ""
    return Described(family.name + suffix, family.type, tuple(labels))


def rows() -> frozenset[Described]:
    return frozenset(Described(each.name, each.kind, each.labels) for each in documented())


def test_every_metric_has_a_row_with_its_type_and_labels() -> None:
    assert made() - rows() == set()


def test_the_page_has_one_row_per_metric_and_none_that_does_not_exist() -> None:
    assert rows() - made() == set()
    assert len(rows()) == len(documented())


def test_queries_name_only_series_that_exist() -> None:
    series = {metric.name for metric in made()}
    for metric in made():
        if metric.kind == "histogram":
            series |= {metric.name + suffix for suffix in HISTOGRAM_SERIES}
    assert set(re.findall(r"\btandem_\w+", PAGE.read_text())) - series == set()


def test_nothing_else_makes_metrics() -> None:
    makers = {
        str(path.relative_to(ROOT))
        for room in sorted(ROOT.iterdir())
        if room.is_dir() and room.name not in ("tests", "build") and room.name[0] != "."
        for path in room.rglob("*.py")
        if _imports_makers(path)
    }
    assert makers == MAKERS


def _imports_makers(path: Path) -> bool:
    text = path.read_text()
    if not any(name in text for name in ("prometheus_client", "process.metrics")):
        return False
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            if node.module == "tandem.runtime.process.metrics" and names != {"serve_metrics"}:
                return True
            if node.module is not None and node.module.split(".")[0] == "prometheus_client":
                return not names <= READERS
        if isinstance(node, ast.Import) and any(
            alias.name.split(".")[0] == "prometheus_client" for alias in node.names
        ):
            return True
    return False

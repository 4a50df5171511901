"""docs/metrics.md against the metrics that the processes make."""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

from tandem.decode.metrics import DecodeMetrics
from tandem.frontend.metrics import FrontendMetrics, Histogram
from tandem.prefill.metrics import PrefillMetrics
from tandem.sdk.engine.metrics import ENGINE_LABELS, EngineGauges
from tandem.sdk.worker.endpoint_metrics import ENDPOINT_FAMILIES, ENDPOINT_LABELS
from tandem.worker.kernel_builds import KernelBuilds

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "metrics.md"
# Whoever else makes metrics must be added here, and so to the page.
MAKERS = {
    "decode/metrics.py",
    "prefill/metrics.py",
    "worker/kernel_builds.py",
    "frontend/metrics.py",
    "runtime/metrics.py",
    "sdk/worker/endpoint_metrics.py",
    "sdk/engine/metrics.py",
}
# who imports these alone shows metrics, and makes none
READERS = {
    "text_string_to_metric_families",
    "REGISTRY",
    "generate_latest",
}
HISTOGRAM_SERIES = ("_bucket", "_sum", "_count")


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as its table names it."""

    name: str
    kind: str
    labels: tuple[str, ...]


@cache
def made() -> frozenset[Metric]:
    """What the three processes make, read off the metric objects.

    Not off the process's registry: other tests put metrics of their own there.
    """
    engine = EngineGauges(dict.fromkeys(ENGINE_LABELS, ""))
    owners = (FrontendMetrics(), DecodeMetrics("m"), PrefillMetrics("m"), KernelBuilds(), engine)
    return frozenset(
        _describe(each)
        for owner in owners
        for each in vars(owner).values()
        if isinstance(each, MetricWrapperBase | Histogram)
    ) | {Metric(name, kind, ENDPOINT_LABELS) for name, (kind, _) in ENDPOINT_FAMILIES.items()}


def _describe(metric: MetricWrapperBase | Histogram) -> Metric:
    family = next(iter(metric.collect()))
    # the client's metrics know their labels, histograms of our own give them to their family
    labels = getattr(metric, "_labelnames", ()) or getattr(family, "_labelnames", ())
    suffix = "_total" if family.type == "counter" else ""
    return Metric(family.name + suffix, family.type, tuple(labels))


def documented() -> list[Metric]:
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| `tandem_")
    ]
    return [Metric(row[0].strip("`"), row[1], tuple(re.findall(r"\w+", row[2]))) for row in rows]


def test_every_metric_has_a_row_with_its_type_and_labels() -> None:
    assert made() - set(documented()) == set()


def test_the_page_has_one_row_per_metric_and_none_that_does_not_exist() -> None:
    rows = documented()
    assert set(rows) - made() == set()
    assert len(rows) == len(set(rows))


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
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            if node.module == "tandem.runtime.metrics" and names != {"serve_metrics"}:
                return True
            if node.module is not None and node.module.split(".")[0] == "prometheus_client":
                return not names <= READERS
        if isinstance(node, ast.Import) and any(
            alias.name.split(".")[0] == "prometheus_client" for alias in node.names
        ):
            return True
    return False

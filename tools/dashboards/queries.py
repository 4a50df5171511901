"""PromQL over the table of metrics: a name, a type or a label that is not there is an error.

The queries have Grafana's variables `$model` and `$__rate_interval`.
"""

from tools.dashboards.table import Metric, documented

MODEL = 'model=~"$model"'
WINDOW = "$__rate_interval"


def level(name: str, by: str, *, take: str = "sum", **where: str) -> str:
    """Return a gauge as it is, `take` (sum, max, min) over what `by` does not keep."""
    return f"{take} by ({by}) ({_series(name, 'gauge', by, where)})"


def mean(name: str, by: str, *, take: str = "sum", **where: str) -> str:
    """Return the mean of a gauge over the window, `take` over what `by` does not keep."""
    return f"{take} by ({by}) (avg_over_time({_series(name, 'gauge', by, where)}[{WINDOW}]))"


def rate(name: str, by: str, *, quiet: str = "", **where: str) -> str:
    """Return the rate per second of a counter.

    `quiet` is a gauge: a model that has it and no count yet has a rate of 0.
    """
    query = f"sum by ({by}) (rate({_series(name, 'counter', by, where)}[{WINDOW}]))"
    if not quiet:
        return query
    return f"{query} or 0 * {level(quiet, 'model', take='max')}"


def increase(name: str, by: str, *, over: str, **where: str) -> str:
    """Return the growth of a counter over a time."""
    return f"sum by ({by}) (increase({_series(name, 'counter', by, where)}[{over}]))"


def change(name: str, by: str, *, over: str, **where: str) -> str:
    """Return the largest change of a gauge over a time, of the processes that report it."""
    return f"max by ({by}) (delta({_series(name, 'gauge', by, where)}[{over}]))"


def share(name: str, by: str, **where: str) -> str:
    """Return the part of a counter's events that `where` selects, 0 to 1."""
    every = f"rate({_series(name, 'counter', by, {})}[{WINDOW}])"
    some = f"rate({_series(name, 'counter', by, where)}[{WINDOW}])"
    return f"sum by ({by}) ({some} or 0 * {every}) / sum by ({by}) ({every})"


def quantile(q: float, name: str, by: str, **where: str) -> str:
    """Return a quantile of a histogram."""
    series = _series(name, "histogram", by, where, "_bucket")
    return f"histogram_quantile({q:g}, sum by (le, {by}) (rate({series}[{WINDOW}])))"


def total(name: str, by: str, **where: str) -> str:
    """Return the rate of the sum of a histogram."""
    return f"sum by ({by}) (rate({_series(name, 'histogram', by, where, '_sum')}[{WINDOW}]))"


def count(name: str, by: str, **where: str) -> str:
    """Return the rate of the observations of a histogram."""
    return f"sum by ({by}) (rate({_series(name, 'histogram', by, where, '_count')}[{WINDOW}]))"


def _series(name: str, kind: str, by: str, where: dict[str, str], suffix: str = "") -> str:
    """Return the selector of a metric; a value with ! in front is one that must not match."""
    metric = _metric(name)
    added = {"instance", "instance_id", "role"}  # by Prometheus and by its discovery
    known = {*metric.labels, *added}
    asked = {*by.split(", "), *where}
    if metric.kind != kind or not asked <= known:
        raise ValueError(f"{name}: a {metric.kind} with {sorted(known)}, not {kind} {asked}")
    matchers = [MODEL] if "model" in metric.labels else []
    for label, value in where.items():
        operator = "!~" if value[0] == "!" else "=" if value.isidentifier() else "=~"
        matchers.append(f'{label}{operator}"{value.lstrip("!")}"')
    return f"{metric.name}{suffix}" + (f"{{{','.join(matchers)}}}" if matchers else "")


def _metric(name: str) -> Metric:
    for each in documented():
        if each.name == f"tandem_{name}":
            return each
    raise ValueError(f"tandem_{name} is not in the tables of docs/metrics.md")

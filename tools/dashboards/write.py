"""Writes docs/dashboards: `python -m tools.dashboards.write`."""

import json
from pathlib import Path

import yaml

from tools.dashboards.fleet import FLEET
from tools.dashboards.handoff import HANDOFF
from tools.dashboards.kv import KV
from tools.dashboards.panels import Dashboard, Panel
from tools.dashboards.queries import MODEL, WINDOW
from tools.dashboards.targets import TARGETS

DASHBOARDS = (FLEET, HANDOFF, KV, TARGETS)

FOLDER = Path(__file__).parents[2] / "docs" / "dashboards"
ALERT_WINDOW = "5m"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def files() -> dict[str, str]:
    """Return the name and the text of every file."""
    pages = {
        f"{each.name}.json": json.dumps(dashboard(each), indent=1) + "\n" for each in DASHBOARDS
    }
    return {**pages, "alerts.yml": rules()}


def dashboard(page: Dashboard) -> dict[str, object]:
    """Return a dashboard in Grafana's JSON model."""
    return {
        "uid": f"tandem-{page.name}",
        "title": page.title,
        "tags": ["tandem"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {"type": "dashboards", "tags": ["tandem"], "title": "Tandem", "includeVars": True}
        ],
        "templating": {"list": [_DATASOURCE, _MODEL]},
        "panels": [_panel(number, panel) for number, panel in enumerate(page.panels)],
    }


_DATASOURCE = {"name": "datasource", "type": "datasource", "query": "prometheus"}
_MODEL = {
    "name": "model",
    "type": "query",
    "datasource": _SOURCE,
    "query": "label_values(tandem_frontend_decode_workers, model)",
    "refresh": 2,
    "multi": True,
    "includeAll": True,
    "allValue": ".*",
    "current": {"text": "All", "value": "$__all"},
}


def _panel(number: int, panel: Panel) -> dict[str, object]:
    row, column = divmod(number, _COLUMNS)
    defaults: dict[str, object] = {"unit": panel.unit, "min": 0}
    if panel.limit is not None:
        defaults |= {
            "thresholds": {"mode": "absolute", "steps": _steps(panel.limit, panel.is_floor)},
            "custom": {"thresholdsStyle": {"mode": "line+area"}},
        }
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": "__auto"}
            for index, query in enumerate(panel.queries)
        ],
    }


def _steps(limit: float, is_floor: bool) -> list[dict[str, object]]:
    below, above = ("red", "transparent") if is_floor else ("transparent", "red")
    # Grafana's steps begin at their value: a limit of 0 is red from just above it
    return [{"color": below, "value": None}, {"color": above, "value": limit or 1e-9}]


def rules(window: str = ALERT_WINDOW, after: str | None = None) -> str:
    """Return the alert rules. `after` replaces the time for which an alert waits, for tests."""
    alerts = [
        {
            "alert": panel.alert.name,
            "expr": f"({for_alerts(panel.queries[0], window)}) {_beyond(panel)}",
            "for": panel.alert.after if after is None else after,
            "labels": {"severity": panel.alert.severity},
            "annotations": {"summary": panel.title, "description": panel.remedy},
        }
        for page in DASHBOARDS
        for panel in page.panels
        if panel.alert is not None
    ]
    text = yaml.safe_dump(
        {"groups": [{"name": "tandem", "rules": alerts}]}, sort_keys=False, width=100
    )
    return f"# made by `python -m tools.dashboards.write`\n{text}"


def _beyond(panel: Panel) -> str:
    assert panel.limit is not None, panel.title
    return f"{'<' if panel.is_floor else '>'} {panel.limit:g}"


def for_alerts(query: str, window: str) -> str:
    """Return a panel's query for all models, over a window."""
    for matcher in (f"{MODEL},", f"{{{MODEL}}}"):
        query = query.replace(matcher, "")
    return query.replace(WINDOW, window)


def main() -> None:
    """Write every file anew."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""The dashboards against Grafana's own schemas, as its foundation SDK has them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tools.dashboards.write import DASHBOARDS, files

pytest.importorskip("grafana_foundation_sdk", reason="the extra dev is missing")

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

register_default_plugins()


def unknown(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Yield the places of our values that the schemas do not have."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from unknown(value, theirs.get(key), f"{path}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, value in enumerate(ours):
            yield from unknown(value, theirs[index], f"{path}[{index}]")
    elif ours != theirs:
        yield path


def parsed(page: Any) -> Any:
    """Return a dashboard as the typed models of Grafana write it."""
    return json.loads(JSONEncoder().encode(Dashboard.from_json(page)))


@pytest.mark.parametrize("name", [page.name for page in DASHBOARDS])
def test_every_value_of_a_dashboard_is_one_of_grafanas_schemas(name: str) -> None:
    page = json.loads(files()[f"{name}.json"])
    assert list(unknown(page, parsed(page))) == []


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (("fieldConfig", "defaults"), "units"),
        (("gridPos",), "width"),
        (("targets", 0), "expression"),
    ],
)
def test_a_name_that_grafana_does_not_have_is_found(place: tuple[Any, ...], wrong: str) -> None:
    page = json.loads(files()["fleet.json"])
    part = page["panels"][0]
    for key in place:
        part = part[key]
    part[wrong] = 1
    (found,) = unknown(page, parsed(page))
    assert found.endswith(f".{wrong}")

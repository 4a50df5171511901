"""The committed dashboards and alert rules against the tables that they are made from."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tools.dashboards.queries import level, quantile, rate, share
from tools.dashboards.write import DASHBOARDS, FOLDER, files, rules

PAGE = FOLDER.parent / "dashboards.md"
PANELS = [panel for page in DASHBOARDS for panel in page.panels]


@pytest.mark.parametrize("name", sorted(files()))
def test_a_committed_file_is_what_the_generator_writes(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == files()[name]


def test_no_other_file_lies_beside_them() -> None:
    assert {path.name for path in Path(FOLDER).iterdir()} == set(files())


def test_a_query_of_a_metric_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="tandem_frontend_requests is not in"):
        rate("frontend_requests", "model")
    with pytest.raises(ValueError, match="not gauge"):
        level("frontend_requests_total", "model")
    with pytest.raises(ValueError, match="place"):
        share("frontend_requests_total", "model", place="remote")
    with pytest.raises(ValueError, match="stage"):
        quantile(0.5, "frontend_time_to_first_token_seconds", "stage")


def test_every_panel_has_a_remedy_and_every_alert_is_told_apart() -> None:
    assert all(panel.remedy.endswith(".") for panel in PANELS)
    names = [panel.alert.name for panel in PANELS if panel.alert is not None]
    assert len(names) == len(set(names)) == 16


def test_a_panel_is_red_where_its_alert_fires() -> None:
    for name in [page.name for page in DASHBOARDS]:
        for panel in json.loads(files()[f"{name}.json"])["panels"]:
            steps = panel["fieldConfig"]["defaults"].get("thresholds", {"steps": []})["steps"]
            assert [step["color"] for step in steps] in (
                [], ["transparent", "red"], ["red", "transparent"]
            )  # fmt: skip
            assert panel["description"].startswith("Red ") == bool(steps)


def test_the_page_has_a_row_for_every_alert_with_its_delay_and_severity() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for rule in yaml.safe_load(rules())["groups"][0]["rules"]:
        delay = "at once" if rule["for"] == "0s" else rule["for"]
        row = f"| `{rule['alert']}` | {rule['labels']['severity']} | {delay} |"
        assert row in text, row


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's package `prometheus` has it")
def test_a_kernel_that_is_built_while_serving_is_reported(tmp_path: Path) -> None:
    counter = 'tandem_kernels_built_while_serving_total{instance="a",job="tandem"}'
    fired = {"exp_labels": {"severity": "warning", "instance": "a"}}
    (rule,) = [
        each
        for each in yaml.safe_load(rules())["groups"][0]["rules"]
        if each["alert"] == "TandemKernelBuiltWhileServing"
    ]
    fired["exp_annotations"] = rule["annotations"]
    times = {"4m": [], "8m": [fired]}
    test = {
        "interval": "1m",
        "input_series": [{"series": counter, "values": "0 0 0 0 0 1 1 1 1"}],
        "alert_rule_test": [
            {"eval_time": at, "alertname": rule["alert"], "exp_alerts": alerts}
            for at, alerts in times.items()
        ],
    }
    file = tmp_path / "test.yml"
    rule_files = [str(FOLDER / "alerts.yml")]
    file.write_text(yaml.safe_dump({"rule_files": rule_files, "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

"""`tandem doctor`: the state of this machine, with a remedy for everything that is wrong."""

import json
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from tandem.config.model import EffectiveConfig
from tandem.launch.doctor import checks_parts
from tandem.launch.doctor.check_model import check_model
from tandem.launch.doctor.checks_cluster import check_cluster
from tandem.launch.doctor.checks_slurm import check_slurm
from tandem.runtime.local import checks_machine
from tandem.runtime.local.findings import Finding
from tandem.runtime.process.progress import ProgressBar

STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def run_doctor(effective: EffectiveConfig, model: str = "", *, as_json: bool) -> int:
    """Print every finding at once, those about `model` first. Return 1 when a check failed."""
    console = Console(highlight=False, soft_wrap=True)
    findings: list[Finding] = []
    checks = [("the model", check_model(model, effective.config.engine))] if model else []
    checks += examine(effective)
    with ProgressBar("doctor", len(checks), on_line=_ignore, console=console) as bar:
        for index, (name, found) in enumerate(checks):
            bar.update(index, name)
            for finding in found:
                findings.append(finding)
                if not as_json:
                    _print_finding(console, finding)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        counts = {g: sum(f.grade == g for f in findings) for g in STYLES}
        console.print(", ".join(f"{count} {grade}" for grade, count in counts.items()))
    return int(any(finding.grade == "fail" for finding in findings))


def _ignore(line: str) -> None:
    """Write no line of progress: the findings are lines enough."""


def examine(effective: EffectiveConfig) -> list[tuple[str, Iterator[Finding]]]:
    """Return name and findings of each check, quick ones first; it runs when it is iterated."""
    config = effective.config
    checks = [
        ("the machine", checks_machine.check_machine()),
        ("ports", checks_parts.check_ports(config)),
        ("Slurm", check_slurm()),
        ("packages", checks_machine.check_packages()),
        ("torch", checks_parts.check_torch()),
        ("the CPU's kernels", checks_parts.check_cpu_kernels()),
        ("NATS and etcd", checks_parts.check_servers(effective)),
        ("NIXL", checks_parts.check_nixl(config.runtime.host)),
    ]
    if effective.origin("runtime.etcd_endpoints") != "default":
        checks.append(("the cluster", check_cluster(effective)))
    return checks


def _print_finding(console: Console, finding: Finding) -> None:
    grade = (f"{finding.grade:4}", STYLES[finding.grade])
    console.print(Text.assemble(grade, f"  {finding.subject}: {finding.detail}"))
    if finding.remedy:
        console.print(f"      -> {finding.remedy}", markup=False)

"""`tandem doctor`: the state of this machine, with a remedy for everything that is wrong."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain

from rich.console import Console

from tandem.launch.config.model import EffectiveConfig
from tandem.launch.doctor import checks_machine, checks_parts
from tandem.launch.doctor.check_model import check_model
from tandem.launch.doctor.findings import Finding, ok, warn
from tandem.launch.status import links, read_cluster
from tandem.runtime.errors import ServiceError

STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def run_doctor(effective: EffectiveConfig, model: str = "", *, as_json: bool) -> int:
    """Print every finding at once, those about `model` first. Return 1 when a check failed."""
    console = Console(highlight=False, soft_wrap=True)
    findings: list[Finding] = []
    of_model = check_model(model, effective.config.engine) if model else ()
    for finding in chain(of_model, examine(effective)):
        findings.append(finding)
        if not as_json:
            _print_finding(console, finding)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        counts = {g: sum(f.grade == g for f in findings) for g in STYLES}
        console.print(", ".join(f"{count} {grade}" for grade, count in counts.items()))
    return int(any(finding.grade == "fail" for finding in findings))


def examine(effective: EffectiveConfig) -> Iterator[Finding]:
    """Yield the findings of all checks, quick ones first."""
    yield from checks_machine.check_machine()
    yield from checks_machine.check_ports(effective.config)
    yield from checks_parts.check_packages()
    yield from checks_parts.check_torch()
    yield from checks_parts.check_cpu_kernels()
    yield from checks_parts.check_servers(effective)
    yield from checks_parts.check_nixl(effective.config.runtime.host)
    if effective.origin("runtime.etcd_endpoints") != "default":
        yield from check_links(effective)


def check_links(effective: EffectiveConfig) -> Iterator[Finding]:
    """Yield what the running prefill workers measured of their links to decode workers."""
    try:
        report = asyncio.run(read_cluster(effective))
    except ServiceError:
        return  # check_servers reports it
    found = links(report)
    for line in found:
        yield ok("kv link", line.removeprefix("kv link "))
    if not found and any(i.instance.component == "prefill" for i in report.instances):
        yield warn(
            "kv link",
            "no prefill worker is connected to a decode worker",
            "see `tandem status` and the workers' logs",
        )


def _print_finding(console: Console, finding: Finding) -> None:
    console.print(f"[{STYLES[finding.grade]}]{finding.grade:4}[/]  ", end="")
    console.print(f"{finding.subject}: {finding.detail}", markup=False)
    if finding.remedy:
        console.print(f"      -> {finding.remedy}", markup=False)

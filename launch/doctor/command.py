"""`tandem doctor`: what this machine has, what is wrong, and how to mend it."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console

from tandem.launch.config.model import EffectiveConfig
from tandem.launch.doctor import checks_machine, checks_parts
from tandem.launch.doctor.findings import Finding, ok, warn
from tandem.launch.status import links, read_cluster
from tandem.runtime.errors import ServiceError

STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def run_doctor(effective: EffectiveConfig, *, as_json: bool) -> int:
    """Prints every finding as it is made; the exit code is 1 when one is a failure."""
    console = Console(highlight=False, soft_wrap=True)
    findings: list[Finding] = []
    for finding in examine(effective):
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
    """All checks, quick ones first."""
    yield from checks_machine.check_machine()
    yield from checks_machine.check_ports(effective.config)
    yield from checks_parts.check_packages()
    yield from checks_parts.check_torch()
    yield from checks_parts.check_cpu_kernels()
    yield from checks_parts.check_services(effective)
    yield from checks_parts.check_nixl()
    if effective.origin("runtime.etcd_endpoints") != "default":
        yield from check_links(effective)


def check_links(effective: EffectiveConfig) -> Iterator[Finding]:
    """What the running prefill workers measured of their ways to the decode workers."""
    try:
        report = asyncio.run(read_cluster(effective))
    except ServiceError:
        return  # said by the check of the services
    found = links(report)
    for line in found:
        yield ok("kv path", line.removeprefix("kv path "))
    if not found and any(i.instance.component == "prefill" for i in report.instances):
        yield warn(
            "kv path", "no prefill worker has met a decode worker", "see `tandem status` and logs"
        )


def _print_finding(console: Console, finding: Finding) -> None:
    console.print(f"[{STYLES[finding.grade]}]{finding.grade:4}[/]  ", end="")
    console.print(f"{finding.subject}: {finding.detail}", markup=False)
    if finding.remedy:
        console.print(f"      -> {finding.remedy}", markup=False)

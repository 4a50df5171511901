"""Versions of etcd that its own project advises against."""

import ipaddress
import re

_FIRST, _LAST = (3, 5, 0), (3, 5, 2)


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, as of `etcd Version: 3.5.1`; empty without any."""
    found = re.search(r"\d+(\.\d+)+", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def doubt_of(version: str, hosts: list[str]) -> str:
    """Return a warning about an etcd at `hosts`; empty for a good one.

    One that only this machine reaches, or with a unix socket and no host, holds nothing that has to
    survive its crash.
    """
    if all(map(_is_of_this_machine, hosts)) or not _FIRST <= numbers_of(version) <= _LAST:
        return ""
    return (
        f"etcd {version} may lose consistency when it crashes, as its project warns of 3.5.0 to "
        "3.5.2: run 3.4.22 or newer, or 3.5.6 or newer, where several machines share it"
    )


def _is_of_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

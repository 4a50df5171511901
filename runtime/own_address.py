"""Addresses of this machine: of an interface, or on the route to a service."""

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

import psutil

ROUTE = "route"  # in place of an interface's name
_DISCARD_PORT = 9  # connecting a datagram socket sends nothing


def own_address(interface: str, services: Iterable[str]) -> str:
    """Return the address of an interface, IPv4 first; for `route` that towards a service.

    `services` are URLs, commas between several. Raise ValueError without such an address.
    """
    if interface != ROUTE:
        return _address_of(interface)
    urls = [url.strip() for several in services for url in several.split(",")]
    hosts = [host for url in urls if (host := urlsplit(url).hostname)]
    for host in hosts:
        if (address := address_towards(host)) is not None:
            return address
    raise ValueError(f"this machine has no route to {' or '.join(hosts) or 'a service'}")


def address_towards(host: str) -> str | None:
    """Return the address from which this machine reaches `host`; None without a route."""
    try:
        found = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, target in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def _address_of(interface: str) -> str:
    interfaces = psutil.net_if_addrs()
    if interface not in interfaces:
        raise ValueError(
            f"this machine has no interface {interface!r}; it has {', '.join(sorted(interfaces))}"
        )
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in interfaces[interface]:
            if entry.family == family and not _is_link_local(entry.address):
                return str(entry.address)
    raise ValueError(f"interface {interface!r} has no address that other machines can dial")


def _is_link_local(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_link_local

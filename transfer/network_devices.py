"""The network devices that UCX may use: without a list it listens on all of a machine.

Whoever reaches a port of UCX and has a worker's transfer metadata reads and writes any address of
that process, so the ports are as far reachable as the request plane's and no further.
"""

import ipaddress
import logging
import os
import socket
from pathlib import Path

import psutil

VARIABLE = "UCX_NET_DEVICES"
PORTS_VARIABLE = "UCX_TCP_PORT_RANGE"
_RDMA = Path("/sys/class/infiniband")
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

logger = logging.getLogger(__name__)


def confine_ucx(host: str, port_range: str | None = None) -> None:
    """Keep UCX to the devices of `host`, where a server of this process listens, and to ports.

    Call it before a library is loaded: a context reads the variables when it is created. A variable
    of devices that is set already stays.
    """
    if port_range is not None:
        os.environ[PORTS_VARIABLE] = port_range
    if VARIABLE in os.environ:
        return
    if devices := devices_of(host):
        os.environ[VARIABLE] = ",".join(devices)
        logger.info("KV transfers stay on %s, for runtime.host %s", ", ".join(devices), host)


def devices_of(host: str, rdma: Path = _RDMA) -> list[str]:
    """Return the devices for an address to listen on; none for every address of the machine.

    RDMA devices stay, except with a loopback address: they carry no TCP, and KV between hosts is
    to take them.
    """
    addresses = {address for address in _resolve(host) if not address.is_unspecified}
    is_local = _all_loopback(addresses)
    devices = [
        device
        for device, its_own in _addresses_of_devices().items()
        if its_own & addresses or (is_local and any(own.is_loopback for own in its_own))
    ]
    if not devices or is_local:
        return devices
    return devices + active_ports(rdma)


def is_loopback(host: str) -> bool:
    """Return True for an address or name that only this machine reaches."""
    return _all_loopback(_resolve(host))


def active_ports(rdma: Path = _RDMA) -> list[str]:
    """Return the ports of RDMA devices that have a link, as UCX names them: `mlx5_0:1`."""
    states = sorted(rdma.glob("*/ports/*/state"))
    return [f"{path.parts[-4]}:{path.parts[-2]}" for path in states if "ACTIVE" in path.read_text()]


def _all_loopback(addresses: set[_Address]) -> bool:
    return bool(addresses) and all(address.is_loopback for address in addresses)


def _resolve(host: str) -> set[_Address]:
    """Return the addresses of a name; none for a name that cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found}


def _addresses_of_devices() -> dict[str, set[_Address]]:
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        device: {
            ipaddress.ip_address(entry.address.partition("%")[0])
            for entry in entries
            if entry.family in families
        }
        for device, entries in psutil.net_if_addrs().items()
    }

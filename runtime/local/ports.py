"""Ports of this machine: which are free, and what a server on one of them answers."""

import asyncio
import socket
import ssl

from tandem.runtime.address import host_port
from tandem.runtime.errors import ConfigError, ServiceError


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port on which no server listens now."""
    with socket.socket(_family(host)) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_port_free(host: str, port: int) -> bool:
    """Return True when a server could listen on host:port now.

    Raise ConfigError for an address that this machine does not have.
    """
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except PermissionError as exc:
            raise ConfigError(f"port {port} needs privileges: choose one above 1023") from exc
        except OSError as exc:
            if exc.errno in (98, 48):  # EADDRINUSE on Linux, on BSD
                return False
            raise ConfigError(f"cannot listen on {host}: {exc.strerror or exc}") from exc
    return True


def require_free_port(host: str, port: int, flag: str) -> None:
    """Raise ConfigError naming the next free port when `port` is taken."""
    if port == 0 or is_port_free(host, port):
        return
    candidates = range(port + 1, min(port + 200, 65536))
    nearest = next((p for p in candidates if is_port_free(host, p)), None)
    hint = f"; {nearest} is free: {flag} {nearest}" if nearest else ""
    raise ConfigError(f"port {port} on {host} is taken{hint}", param=flag)


def local_address(host: str) -> str:
    """Return the address that reaches a server bound to `host` from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


async def http_status(
    host: str, port: int, path: str, timeout_s: float = 2.0, *, scheme: str = "http"
) -> int:
    """Return the status of a plain GET. Raise ServiceError without an HTTP answer.

    Nothing secret is sent, and the answer is a state: the certificate of an https server is not
    checked.
    """
    context = None if scheme == "http" else _unchecked()
    request = f"GET {path} HTTP/1.1\r\nHost: {host_port(host, port)}\r\nConnection: close\r\n\r\n"
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            try:
                writer.write(request.encode("ascii"))
                return int((await reader.readline()).split(b" ", 2)[1])
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError, IndexError) as exc:
        raise ServiceError(
            f"no HTTP answer from {host_port(host, port)}{path}: {exc or 'timeout'}"
        ) from exc


def _unchecked() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET

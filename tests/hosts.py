"""Hosts for tests: namespaces joined by a bridge, each with a network, IPC, pids and /dev/shm.

A network namespace alone is not a host: UCX would go through shared memory.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Self

import pytest

from tandem.runtime.local.child_process import DEATHWATCH

LIMIT_S = 20.0
RELAY = Path(__file__).with_name("delay_relay.py")


def require_hosts(*programs: str) -> None:
    """Skip where this user cannot make namespaces, or a program is missing."""
    for program in ("ip", "nsenter", "unshare", *programs):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    if os.geteuid() != 0 or _ip("netns", "list", check=False) != 0:
        pytest.skip("namespaces need root")


def _ip(*words: str, check: bool = True) -> int:
    done = subprocess.run(["ip", *words], check=check, timeout=LIMIT_S, capture_output=True)
    return done.returncode


def host_environment() -> dict[str, str]:
    """Return this process's environment for a host's processes.

    A worker inside this process has confined UCX to this machine's loopback by variables.
    """
    return {key: value for key, value in os.environ.items() if not key.startswith("UCX_")}


class Host:
    """One host: its name, its address and its device on the bridge."""

    def __init__(self, name: str, address: str, veth: str) -> None:
        self.name, self.address, self.veth = name, address, veth

    def command(self, *words: str) -> list[str]:
        """How to run a command in the host's network alone, beside its processes."""
        return ["nsenter", f"--net=/run/netns/{self.name}", *words]

    def spawn(
        self, *words: str, log: Path, environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start the host's first process, pid 1 there: the whole host ends with it."""
        setup = f'hostname {self.name}; mount -t tmpfs tmpfs /dev/shm; exec "$@"'
        apart = ("--ipc", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
        command = self.command("unshare", *apart, "sh", "-c", setup, "sh", *words)
        with log.open("ab") as output:
            return start(command, output, environment)

    def unplug(self) -> None:
        """Take the host off the network."""
        _ip("link", "set", self.veth, "down")

    def plug(self) -> None:
        """Put the host back on the network."""
        _ip("link", "set", self.veth, "up")

    def drop(self, rule: str) -> None:
        """Drop what the host receives and the rule of nftables matches."""
        commands = (
            "add table inet test; add chain inet test input { type filter hook input priority 0; };"
            f" add rule inet test input {rule} drop"
        )
        subprocess.run(self.command("nft", commands), check=True, timeout=LIMIT_S)

    def heal(self) -> None:
        """Drop nothing any more."""
        subprocess.run(self.command("nft", "flush ruleset"), check=True, timeout=LIMIT_S)


def _watched() -> list[str]:
    """Return how to begin a command that dies with this process."""
    return [sys.executable, "-I", "-S", str(DEATHWATCH), str(os.getpid())]


def start(
    command: Sequence[str], output: IO[bytes], environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own, with its output in a file; it dies with this one."""
    program = shutil.which(command[0])
    assert program is not None, f"{command[0]} is not installed"
    return subprocess.Popen(
        [*_watched(), program, *command[1:]],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
    )


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its session, and reap it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=LIMIT_S)


class Hosts:
    """Some hosts on a bridge, which this machine is on, too; `with` makes and removes them.

    A frame needs `delay_s` from a host to the bridge, and as long from there to a host.
    """

    def __init__(self, count: int, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._relays: list[subprocess.Popen[bytes]] = []
        tag = secrets.token_hex(2)
        self._bridge = f"tb{tag}"
        net = f"10.{secrets.choice(range(64, 192))}.{secrets.choice(range(1, 255))}"
        self.address = f"{net}.1"  # of this machine
        self.all = [Host(f"th{tag}-{i}", f"{net}.{10 + i}", f"tv{tag}-{i}") for i in range(count)]

    def __enter__(self) -> Self:
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for host in self.all:
                self._add(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add(self, host: Host) -> None:
        _ip("netns", "add", host.name)
        if self._delay_s:
            self._add_far(host)
        else:
            peer = ("peer", "name", "eth0", "netns", host.name)
            _ip("link", "add", host.veth, "type", "veth", *peer)
        _ip("link", "set", host.veth, "master", self._bridge, "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{host.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
        ):
            _ip("-n", host.name, *words)

    def _add_far(self, host: Host) -> None:
        """Give a host the two ends of a relay in place of those of a veth."""
        inner = f"{host.veth}i"
        words = [sys.executable, str(RELAY), host.veth, inner, str(self._delay_s)]
        relay = subprocess.Popen([*_watched(), *words], stdout=subprocess.PIPE)
        self._relays.append(relay)
        assert relay.stdout is not None and relay.stdout.readline() == b"ready\n"
        _ip("link", "set", inner, "netns", host.name, "name", "eth0")

    def __exit__(self, *_: object) -> None:
        for relay in self._relays:
            relay.kill()
            relay.communicate(timeout=LIMIT_S)
        for host in self.all:
            _ip("netns", "del", host.name, check=False)
            _ip("link", "del", host.veth, check=False)
        _ip("link", "del", self._bridge, check=False)

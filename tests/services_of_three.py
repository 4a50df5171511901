"""NATS and etcd as clusters of three, each of whose members can be killed and come back."""

import asyncio
import contextlib
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from tests.services import EtcdServer, MonitoredNatsServer, eventually, free_port

Member = TypeVar("Member", bound="NatsMember | EtcdMember")


class NatsMember(MonitoredNatsServer):
    """One of several nats-servers, all of which have JetStream."""

    def __init__(self, name: str, routes: Sequence[str]) -> None:
        super().__init__()
        self.name, self._routes = name, routes

    def command(self, store: Path) -> list[str]:
        own = self._routes[int(self.name)]
        joined = ("--name", self.name, "--cluster_name", "three", "--cluster", own)
        return [*super().command(store), *joined, "--routes", ",".join(self._routes)]

    @property
    def is_current(self) -> bool:
        """True while it is up and has of every stream what the others have."""
        with contextlib.suppress(OSError):
            return bool(self.monitor("/healthz")["status"] == "ok")
        return False

    def leader_of(self, part: str = "") -> str:
        """The leader of JetStream, or of the stream whose name has a part; empty if unknown."""
        try:
            report = self.monitor("/jsz?streams=1")
        except OSError:  # it is down, or not up yet
            return ""
        if not part:
            return str(report.get("meta_cluster", {}).get("leader", ""))
        accounts = report.get("account_details", [])
        streams = [each for account in accounts for each in account.get("stream_detail", [])]
        found = (each["cluster"].get("leader", "") for each in streams if part in each["name"])
        return str(next(found, ""))


class EtcdMember(EtcdServer):
    """One of several etcds."""

    def __init__(self, name: str, peers: Sequence[str]) -> None:
        super().__init__()
        self.name, self._peers = name, peers

    def command(self, store: Path) -> list[str]:
        own = self._peers[int(self.name)]
        cluster = ",".join(f"{name}={peer}" for name, peer in enumerate(self._peers))
        return [
            *(*super().command(store), "--name", self.name, "--initial-cluster", cluster),
            *("--listen-peer-urls", own, "--initial-advertise-peer-urls", own),
        ]

    @property
    def is_current(self) -> bool:
        """True while it is up and knows the leader."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health") as response:
            return b'"health":"true"' in response.read()
        return False

    @property
    def leads(self) -> bool:
        """True for the leader."""
        with urllib.request.urlopen(f"{self.url}/metrics") as response:
            return b"\netcd_server_is_leader 1\n" in response.read()


class Three(Generic[Member]):
    """The members of a cluster, with the part of `LocalServer` that a test's cluster uses."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members

    @property
    def url(self) -> str:
        """The addresses of all members."""
        return ",".join(member.url for member in self.members)

    async def start(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(member.start) for member in self.members))

    async def stop(self) -> None:
        for member in self.members:
            member.__exit__()

    async def until_whole(self) -> None:
        """Wait until the loss of one member leaves two that know all."""
        await eventually(lambda: all(member.is_current for member in self.members))

    @contextlib.contextmanager
    def lost(self, member: Member, how: str) -> Iterator[None]:
        """A member that is killed or frozen meanwhile."""
        member.kill() if how == "killed" else member.freeze()
        try:
            yield
        finally:
            member.start() if how == "killed" else member.thaw()


class NatsOfThree(Three[NatsMember]):
    def __init__(self) -> None:
        routes = [f"nats://127.0.0.1:{free_port()}" for _ in range(3)]
        super().__init__([NatsMember(str(i), routes) for i in range(3)])

    async def start(self) -> None:
        await super().start()
        await eventually(lambda: self.leader_of())

    def leader_of(self, part: str = "", lost: NatsMember | None = None) -> NatsMember | None:
        """The leader of JetStream or of a stream, as others than a lost member have it."""
        names = {member.leader_of(part) for member in self.members if member is not lost}
        known = [member for member in self.members if member.name in names and member is not lost]
        return known[0] if known else None


class EtcdOfThree(Three[EtcdMember]):
    def __init__(self) -> None:
        peers = [f"http://127.0.0.1:{free_port()}" for _ in range(3)]
        super().__init__([EtcdMember(str(i), peers) for i in range(3)])

    @property
    def leader(self) -> EtcdMember | None:
        """The only member that says so of itself."""
        leaders = [member for member in self.members if member.leads]
        return leaders[0] if len(leaders) == 1 else None

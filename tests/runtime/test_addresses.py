"""The addresses of a process and of its services: by interface, in IPv6, moved."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pydantic
import pytest

from tandem.config.flags import Flag
from tandem.config.model import load_config
from tandem.runtime.bus.events import NatsEvents
from tandem.runtime.bus.nats import NatsConnection
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError
from tandem.runtime.local.private_file import write_private
from tandem.runtime.process.lifecycle import started
from tandem.runtime.store.etcd import EtcdDiscovery
from tests.services import EtcdServer, NatsServer, Server, eventually

PORTS = "must be FIRST-LAST, as in 31000-31099"


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("runtime.port", "70000", "less than or equal to 65535"),
        ("runtime.port_range", "31000", PORTS),
        ("runtime.port_range", "31099-31000", "the lower port first"),
        ("transfer.port_range", "1-x", PORTS),
        ("transfer.port_range", "0-9", "must be within 1-65535"),
        ("runtime.interface", "tandem9", "this machine has no interface 'tandem9'; it has "),
        ("runtime.services_file", "/nonexistent", "cannot read /nonexistent: No such file"),
    ],
)
def test_an_address_that_cannot_be_is_an_error_that_names_its_key(
    key: str, value: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(flags=[Flag(f"--{key}", value)])
    section = key.partition(".")[0]
    assert refused.value.message.startswith(section)
    assert key.partition(".")[2] in refused.value.message
    assert reason in refused.value.message


@pytest.mark.parametrize(
    "pair", [{"port": 1, "port_range": "1-2"}, {"interface": "lo", "host": ""}]
)
def test_two_keys_for_one_address_exclude_each_other(pair: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError, match="exclude each other"):
        RuntimeConfig.model_validate(pair)


def test_an_interface_stands_for_its_address() -> None:
    assert RuntimeConfig(interface="lo").host == "127.0.0.1"
    for name, entries in psutil.net_if_addrs().items():
        of_ipv4 = [entry.address for entry in entries if entry.family == socket.AF_INET]
        if of_ipv4:
            assert RuntimeConfig(interface=name).host == of_ipv4[0]


def test_the_route_is_the_one_to_the_services() -> None:
    config = RuntimeConfig(interface="route", etcd_endpoints="http://[::1]:2379")
    assert (config.host, config.reachable_host) == ("::1", "::1")
    over_nats = RuntimeConfig(
        interface="route", etcd_endpoints="unix:///tmp/x:1", nats_url="tls://u:p@127.0.0.1:4222"
    )
    assert over_nats.host == "127.0.0.1"


@pytest.fixture
def ipv6(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """The URLs of a NATS and an etcd that listen on ::1 alone."""
    with ExitStack() as stack:
        urls = []
        for server in (NatsServer(), EtcdServer()):
            at_ipv6 = _command_for("::1" if isinstance(server, NatsServer) else "[::1]", server)
            monkeypatch.setattr(server, "command", at_ipv6)
            monkeypatch.setattr(server, "_answers", lambda port=server.port: _accepts(port))
            stack.enter_context(server)
            urls.append(server.url.replace("127.0.0.1", "[::1]"))
        yield urls[0], urls[1]


def _command_for(host: str, server: Server) -> object:
    command = type(server).command

    def at_host(store: Path) -> list[str]:
        return [word.replace("127.0.0.1", host) for word in command(server, store)]

    return at_host


def _accepts(port: int) -> bool:
    try:
        with socket.create_connection(("::1", port), 1.0):
            return True
    except OSError:
        return False


async def test_services_are_reached_at_ipv6_literals(ipv6: tuple[str, str]) -> None:
    nats_url, etcd_url = ipv6
    # of several endpoints, too
    for endpoints in (etcd_url, f"{etcd_url},{etcd_url}"):
        config = RuntimeConfig(nats_url=nats_url, etcd_endpoints=endpoints)
        async with started(EtcdDiscovery(config)) as discovery:
            await discovery.put("/x", b"1")
            assert await discovery.get_prefix("/x") == {"/x": b"1"}
    async with started(NatsConnection(config)) as connection:
        assert connection.connected


async def test_services_that_come_back_elsewhere_are_found_by_their_file(tmp_path: Path) -> None:
    file = tmp_path / "services.json"

    def announce(nats: NatsServer, etcd: EtcdServer) -> None:
        write_private(file, json.dumps({"nats_url": nats.url, "etcd_endpoints": etcd.url}))

    with ExitStack() as stack:
        nats, etcd = stack.enter_context(NatsServer()), stack.enter_context(EtcdServer())
        announce(nats, etcd)
        config = RuntimeConfig(services_file=str(file), lease_ttl_s=2)
        assert (config.nats_url, config.etcd_endpoints) == (nats.url, etcd.url)
        heard: list[bytes] = []
        async with (
            started(EtcdDiscovery(config)) as ours,
            started(NatsConnection(config)) as connection,
            started(NatsEvents(connection)) as events,
        ):
            await ours.put("/t/own", b"1")
            view = ours.watch("/t/")
            await view.ready()
            await events.subscribe("tandem.x", lambda subject, data: heard.append(data))
            nats.kill()
            etcd.kill()
            await eventually(lambda: not ours.connected and not connection.connected)
            nats, etcd = stack.enter_context(NatsServer()), stack.enter_context(EtcdServer())
            announce(nats, etcd)
            elsewhere = RuntimeConfig(nats_url=nats.url, etcd_endpoints=etcd.url)
            await eventually(lambda: ours.connected and connection.connected)
            async with (
                started(EtcdDiscovery(elsewhere)) as theirs,
                started(NatsConnection(elsewhere)) as their_connection,
            ):
                assert await theirs.get_prefix("/t/") == {"/t/own": b"1"}
                await theirs.put("/t/theirs", b"2")
                await view.wait_for(lambda items: len(items) == 2, 60)
                await their_connection.client.publish("tandem.x", b"after the move")
                await eventually(lambda: heard == [b"after the move"])

import ipaddress
import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tandem.transfer.network_devices import VARIABLE, active_ports, confine_ucx, devices_of

LISTENING = """
import json, sys, psutil
{how}
loaded = Transport("one")
sockets = psutil.Process().net_connections(kind="tcp")
print(json.dumps([s.laddr.ip for s in sockets if s.status == "LISTEN"]))
loaded.close()
"""
LISTENING_PORTS = """
import json, psutil
from tandem.transfer.network_devices import confine_ucx
confine_ucx("127.0.0.1", "15000-15899")
from tandem.transfer.nixl import NixlTransport
loaded = NixlTransport("one")
sockets = psutil.Process().net_connections(kind="tcp")
print(json.dumps([s.laddr.port for s in sockets if s.status == "LISTEN"]))
loaded.close()
"""
CONFINED = "from tandem.transfer.network_devices import confine_ucx; confine_ucx('127.0.0.1')\n"
OPENERS = {
    "nixl": CONFINED + "from tandem.transfer.nixl import NixlTransport as Transport",
    "ucx": CONFINED + "from tandem.transfer.ucx.transport import UcxTransport as Transport",
    "the kit's agent": "from tandem.sdk.nixl.agent import nixl_agent as Transport",
}


@pytest.mark.parametrize(
    "library",
    ["nixl", *(pytest.param(n, marks=pytest.mark.slow) for n in ("ucx", "the kit's agent"))],
)
def test_with_a_loopback_host_ucx_listens_on_loopback_only(library: str) -> None:
    if library == "ucx" and find_spec("ucxx") is None:
        pytest.skip("ucxx is not installed (the extra 'ucx')")
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", LISTENING.format(how=OPENERS[library])],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment,
    )
    listening = [ipaddress.ip_address(text) for text in json.loads(done.stdout.splitlines()[-1])]
    assert listening
    assert all(address.is_loopback for address in listening), listening


def test_another_host_is_confined_to_its_device_and_rdma(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        (tmp_path / name / "ports" / "1").mkdir(parents=True)
        (tmp_path / name / "ports" / "1" / "state").write_text(state)
    assert active_ports(tmp_path) == ["mlx5_0:1"]
    outside = [
        (device, entry.address)
        for device, found in psutil.net_if_addrs().items()
        for entry in found
        if entry.family == socket.AF_INET and not ipaddress.ip_address(entry.address).is_loopback
    ]
    for device, address in outside:
        assert devices_of(address, tmp_path) == [device, "mlx5_0:1"]
    assert devices_of("127.0.0.1", tmp_path) == devices_of("localhost", tmp_path) == ["lo"]
    assert devices_of("0.0.0.0", tmp_path) == []
    assert devices_of("no-such-host.invalid", tmp_path) == []


def test_devices_that_the_operator_names_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "eth7")
    confine_ucx("127.0.0.1")
    assert os.environ[VARIABLE] == "eth7"
    monkeypatch.delenv(VARIABLE)
    confine_ucx("127.0.0.1")
    assert os.environ[VARIABLE] == "lo"


def test_ucx_listens_on_the_ports_of_the_config() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LISTENING_PORTS],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={key: value for key, value in os.environ.items() if key != VARIABLE},
    )
    ports = json.loads(done.stdout.splitlines()[-1])
    assert ports and set(ports) <= set(range(15_000, 15_900)), ports

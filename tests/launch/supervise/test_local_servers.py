import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from pydantic import SecretStr

from tandem.config.session import Session
from tandem.runtime.bus.nats import NatsConnection
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError, ServiceError
from tandem.runtime.local import local_servers
from tandem.runtime.local.child_process import ChildProcess
from tandem.runtime.local.local_clusters import (
    LocalCluster,
    announced,
    running_clusters,
    started_s,
    state_dir,
    the_running_cluster,
    token_path,
)
from tandem.runtime.local.local_servers import LocalEtcd, LocalNats, LocalServer
from tandem.runtime.local.private_file import write_private
from tandem.runtime.store.etcd import EtcdDiscovery
from tandem.sdk.worker.cluster import find_cluster
from tests.services import eventually

LAUNCHER = """
import asyncio
import sys
import threading
from pathlib import Path

from tandem.runtime.local.local_servers import LocalEtcd, LocalNats

async def main():
    run_dir = Path(sys.argv[1])
    async with LocalNats(run_dir) as nats, LocalEtcd(run_dir) as etcd:
        print(nats.child.pid, etcd.child.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_etcd_keeps_its_address_and_store_over_a_restart(tmp_path: Path) -> None:
    async with LocalEtcd(tmp_path) as etcd:
        url = etcd.url
        discovery = EtcdDiscovery(RuntimeConfig(etcd_endpoints=url))
        await discovery.start()
        await discovery.put_config("/tandem/t/config/disagg.policy", b'"threshold"')
        await etcd.restart()
        assert etcd.url == url
        async with asyncio.timeout(60):
            while True:
                try:
                    kept = await discovery.get_prefix("/tandem/t/config/")
                    break
                except ServiceError:
                    continue
        assert kept == {"/tandem/t/config/disagg.policy": b'"threshold"'}
        await discovery.close()


async def test_nats_can_be_brought_back_on_its_address_with_an_empty_store(tmp_path: Path) -> None:
    async with LocalNats(tmp_path) as nats:
        url = nats.url
        connection = NatsConnection(RuntimeConfig(nats_url=url))
        await connection.start()
        await connection.client.jetstream().add_stream(name="s", subjects=["s"])
        await connection.close()
        await nats.restart(empty=True)
        connection = NatsConnection(RuntimeConfig(nats_url=url))
        await connection.start()
        assert (await connection.client.jetstream().account_info()).streams == 0
        await connection.close()


@pytest.mark.parametrize("kind", [LocalNats, LocalEtcd])
async def test_a_stopped_service_leaves_only_its_log(
    tmp_path: Path, kind: type[LocalServer]
) -> None:
    async with kind(tmp_path) as service:
        pid = service.child.pid
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)
    assert os.listdir(tmp_path) == [service.log_path.name]


async def test_a_service_that_cannot_start_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd = LocalEtcd(tmp_path)
    monkeypatch.setattr(etcd, "_command", lambda store: ["/bin/sh", "-c", "echo no disk; exit 3"])
    with pytest.raises(ServiceError, match=r"(?s)exited with 3; its log ends:.*no disk"):
        await etcd.start()
    await etcd.stop()


def test_services_die_with_a_launcher_that_is_killed(
    tmp_path: Path, wait_until_gone: Callable[[Sequence[int]], None]
) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout is not None
        pids = [int(word) for word in launcher.stdout.readline().split()]
        assert len(pids) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
        launcher.kill()
        launcher.wait()
        wait_until_gone(pids)
    finally:
        launcher.kill()
        launcher.wait()
        if launcher.stdout is not None:
            launcher.stdout.close()


async def test_only_their_user_reaches_the_services(tmp_path: Path) -> None:
    async with LocalNats(tmp_path) as nats, LocalEtcd(tmp_path) as etcd:
        folder = etcd.socket.parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {path.is_socket() for path in folder.iterdir()} == {True}
        assert not psutil.Process(etcd.child.pid).net_connections(kind="inet")
        without_password = f"nats://127.0.0.1:{nats.port}"
        for url in (without_password, nats.url.replace("@", "x@")):
            connection = NatsConnection(RuntimeConfig(nats_url=url, connect_attempts=1))
            with pytest.raises(ServiceError):
                await connection.start()
            await connection.close()
    assert not folder.exists()


@pytest.mark.parametrize(("version", "is_taken"), [("3.4.9", False), ("3.99.0", True), ("", False)])
def test_a_newer_etcd_on_the_path_is_preferred(
    version: str, is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "etcd"
    program.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
    program.chmod(0o755)
    in_wheel = local_servers.etcd_binary()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert local_servers.etcd_binary() == (program if is_taken else in_wheel)


async def test_a_long_tmpdir_leaves_etcd_a_short_path_for_its_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    monkeypatch.setattr(local_servers.tempfile, "tempdir", str(folder))
    async with LocalEtcd(tmp_path) as etcd:
        assert len(str(etcd.socket)) <= local_servers.MAX_SOCKET_PATH_BYTES
        sockets = etcd.socket.parent
        assert sockets.stat().st_mode & 0o77 == 0
    assert not sockets.exists()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("length", [77, 78, 90])
def test_without_a_short_place_the_limit_is_named_before_etcd_starts(
    length: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path_factory.mktemp("t")
    folder = base / ("x" * (length - len(str(base)) - 1))
    folder.mkdir()
    monkeypatch.setattr(local_servers.tempfile, "tempdir", str(folder))
    monkeypatch.setattr(local_servers, "SHORT_PLACES", ("/nowhere",))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    try:
        sockets = local_servers.folder_of_sockets("etcd", len("client:1"))
    except ServiceError as error:
        assert "at most 107 bytes" in error.message
        assert list(folder.iterdir()) == []
        assert length > 77
    else:
        assert length == 77
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(sockets.path / "client:1"))


def test_the_etcd_of_a_served_cluster_stands_for_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker by hand, and an author's, get the token and NATS with it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    url, pid = "unix:///s/client:1", os.getpid()
    cluster = LocalCluster(pid, started_s(pid), "a", "nats://u:p@x", url, "", str(tmp_path))
    write_private(token_path(tmp_path), "secret")
    with announced(cluster):
        session = Session([])
        session.set("runtime.etcd_endpoints", url, "--etcd-endpoints")
        for found in (session.load().config.runtime, find_cluster({"ETCD_ENDPOINTS": url})):
            assert (found.namespace, found.nats_url) == ("a", "nats://u:p@x")
            assert found.cluster_token == SecretStr("secret")
        session.set("runtime.namespace", "b", "--namespace")
        assert session.load().config.runtime.cluster_token is None


async def test_a_child_that_ignores_the_request_to_end_is_killed_in_time(tmp_path: Path) -> None:
    script = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint(1, flush=True)\n"
    command = [sys.executable, "-c", f"{script}time.sleep(100)"]
    child = await ChildProcess.start(command, tmp_path / "deaf.log")
    await eventually(lambda: child.log_tail() != "")
    assert not await child.stop(timeout_s=0.1)
    assert child.exit_code == -signal.SIGKILL


async def test_a_child_ends_when_asked(tmp_path: Path) -> None:
    child = await ChildProcess.start(["/bin/sleep", "100"], tmp_path / "log")
    assert await child.stop(timeout_s=60)
    assert child.exit_code == -signal.SIGTERM


def test_a_running_cluster_is_found_and_a_dead_one_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def cluster(pid: int, start_s: float, namespace: str) -> LocalCluster:
        return LocalCluster(pid, start_s, namespace, "nats://x", "http://y", "http://z", "/r")

    mine, parent = os.getpid(), os.getppid()
    assert the_running_cluster() is None
    with announced(cluster(mine, started_s(mine), "a")):
        assert the_running_cluster() == cluster(mine, started_s(mine), "a")
        records = [
            (2**22 + 1, started_s(mine)),  # no such process
            (parent, started_s(parent) - 60),  # an earlier one with its pid
        ]
        for pid, start_s in records:
            with announced(cluster(pid, start_s, "dead")):
                assert the_running_cluster() is not None
                assert len(list(state_dir().iterdir())) == 1
        other = cluster(parent, started_s(parent), "b")
        with announced(other), pytest.raises(ConfigError, match="2 clusters run here"):
            the_running_cluster()
    assert the_running_cluster() is None


def test_a_record_is_whole_and_one_of_another_version_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    state_dir().mkdir(parents=True)
    newer = state_dir() / "1.json"
    newer.write_text('{"pid": 1, "kind": "of a later version"}')
    pid, stop, num_seen = os.getpid(), threading.Event(), [0]
    one = LocalCluster(pid, started_s(pid), "a", "nats://x", "http://y", "http://z", "/r" * 9999)

    def look() -> None:
        while not stop.is_set():
            num_seen[0] += len(running_clusters())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(300):
            with announced(one):
                assert running_clusters() == [one]  # not deleted by the other reader
    finally:
        stop.set()
        looking.join()
    assert num_seen[0] > 0 and newer.exists()

"""`tandem epp` as a process of its own, with real etcd and NATS."""

import signal
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.local.child_process import PIPE, ChildProcess
from tandem.runtime.store.discovery import watch_instances
from tandem.runtime.store.etcd import EtcdDiscovery
from tests.launch.conftest import Tandem
from tests.processes import output_of


async def test_it_joins_answers_and_leaves_at_sigterm(
    runtime_config: RuntimeConfig, joined: list[str]
) -> None:
    discovery = EtcdDiscovery(runtime_config)
    await discovery.start()
    nats = ["--nats-url", runtime_config.nats_url]
    command = [sys.executable, "-m", "tandem.launch", "epp", *joined, *nats, "--epp.port=0"]
    process = await ChildProcess.start_piped(command, stderr=PIPE)
    try:
        view = watch_instances(discovery, runtime_config.namespace, "epp")
        await view.wait_for(lambda items: len(items) == 1, 60)
        [instance] = view.items.values()
        async with grpc.aio.insecure_channel(instance.address) as channel:
            request = health_pb2.HealthCheckRequest(service="readiness")
            answer = await health_pb2_grpc.HealthStub(channel).Check(request)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        process.signal(signal.SIGTERM)
        await view.wait_for(lambda items: not items, 60)
        await view.close()
        _, log = await output_of(process)
        assert process.exit_code == 0, log.decode()
        assert b"Traceback" not in log, log.decode()
    finally:
        if process.exit_code is None:
            process.kill()
            await process.wait()
        await discovery.close()


def test_without_its_packages_it_says_what_to_install(
    tandem: Tandem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "grpc_health.v1", None)
    monkeypatch.delitem(sys.modules, "tandem.launch.epp.process", raising=False)
    code, _, errors = tandem("epp")
    assert code == 2
    assert "pip install 'grpcio-health-checking" in errors

"""`tandem epp` as a process of its own, with real etcd and NATS."""

import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.local.child_process import PIPE, ChildProcess
from tests import processes
from tests.launch.conftest import Tandem


async def test_it_joins_answers_and_leaves_at_sigterm(
    runtime_config: RuntimeConfig, joined: list[str]
) -> None:
    nats = ["--nats-url", runtime_config.nats_url]
    command = [sys.executable, "-m", "tandem.launch", "epp", *joined, *nats, "--epp.port=0"]
    process = await ChildProcess.start_piped(command, stderr=PIPE)
    async with (
        processes.joined(process, runtime_config, "epp") as instance,
        grpc.aio.insecure_channel(instance.address) as channel,
    ):
        request = health_pb2.HealthCheckRequest(service="readiness")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_without_its_packages_it_says_what_to_install(
    tandem: Tandem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "grpc_health.v1", None)
    monkeypatch.delitem(sys.modules, "tandem.launch.epp.process", raising=False)
    code, _, errors = tandem("epp")
    assert code == 2
    assert "pip install 'grpcio-health-checking" in errors

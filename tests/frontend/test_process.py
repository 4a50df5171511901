"""The frontend as a process of its own, with real etcd and NATS."""

import asyncio
import json
import signal
import socket
import sys
from pathlib import Path

import httpx

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.local.child_process import PIPE, ChildProcess
from tandem.runtime.store.discovery import watch_instances
from tandem.runtime.store.etcd import EtcdDiscovery
from tests.processes import joined, output_of

PROGRAM = """
import sys
import uvloop
from tandem.frontend.config import FrontendConfig
from tandem.frontend.serving.server import run_frontend
from tandem.router.config import RouterConfig
from tandem.runtime.config import RuntimeConfig
runtime = RuntimeConfig.model_validate_json(sys.argv[1])
frontend = FrontendConfig.model_validate_json(sys.argv[2])
uvloop.run(run_frontend(frontend, runtime, RouterConfig()))
"""


async def start(config: RuntimeConfig) -> ChildProcess:
    command = [sys.executable, "-c", PROGRAM, config.model_dump_json(), '{"port": 0}']
    return await ChildProcess.start_piped(command, stderr=PIPE)


async def test_it_joins_serves_and_leaves_at_sigterm(runtime_config: RuntimeConfig) -> None:
    process = await start(runtime_config)
    async with (
        joined(process, runtime_config, "frontend") as instance,
        httpx.AsyncClient(base_url=f"http://{instance.address}", verify=False) as http,
    ):
        assert (await http.get("/live")).status_code == 200
        assert (await http.get("/health")).status_code == 503


async def test_without_nats_it_ends_with_the_address_it_tried(
    runtime_config: RuntimeConfig,
) -> None:
    lost = runtime_config.model_copy(
        update={"nats_url": "nats://127.0.0.1:1", "connect_attempts": 1}
    )
    process = await start(lost)
    _, log = await output_of(process)
    assert process.exit_code != 0
    assert b"127.0.0.1:1" in log


async def test_a_successor_takes_over_without_a_refused_connection(
    runtime_config: RuntimeConfig, tmp_path: Path
) -> None:
    discovery = EtcdDiscovery(runtime_config)
    await discovery.start()
    processes: list[ChildProcess] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fd, url = listener.fileno(), f"http://127.0.0.1:{listener.getsockname()[1]}"
        words = [PROGRAM, runtime_config.model_dump_json(), json.dumps({"listen_fd": fd})]

        async def begin() -> ChildProcess:
            command = [sys.executable, "-c", *words]
            process = await ChildProcess.start(command, tmp_path / "log", pass_fds=[fd])
            processes.append(process)
            return process

        try:
            view = watch_instances(discovery, runtime_config.namespace, "frontend")
            elder = await begin()
            await view.wait_for(lambda items: len(items) == 1, 60)
            limits = httpx.Limits(keepalive_expiry=None)
            async with httpx.AsyncClient(base_url=url, limits=limits, verify=False) as kept:
                first = await kept.get("/live")
                assert first.status_code == 200 and "connection" not in first.headers
                await begin()
                await view.wait_for(lambda items: len(items) == 2, 60)
                elder.signal(signal.SIGUSR1)
                await view.wait_for(lambda items: len(items) == 1, 60)
                for _ in range(20):  # on connections of their own, while the elder is still there
                    async with httpx.AsyncClient(base_url=url, verify=False) as new:
                        assert (await new.get("/live")).status_code == 200
                assert elder.exit_code is None, "it waits for the client that it has"
                last = await kept.get("/live")
                assert (last.status_code, last.headers["connection"]) == (200, "close")
                assert await asyncio.wait_for(elder.wait(), 60) == 0
                assert (await kept.get("/live")).status_code == 200
            assert "Traceback" not in (tmp_path / "log").read_text()
        finally:
            for process in processes:
                if process.exit_code is None:
                    process.kill()
                    await process.wait()
            await discovery.close()

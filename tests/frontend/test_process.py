"""The frontend as a process of its own, with real etcd and NATS."""

import signal
import sys

import httpx

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.local.child_process import PIPE, ChildProcess
from tandem.runtime.store.discovery import watch_instances
from tandem.runtime.store.etcd import EtcdDiscovery
from tests.processes import output_of

PROGRAM = """
import sys
import uvloop
from tandem.frontend.config import FrontendConfig
from tandem.frontend.serving.server import run_frontend
from tandem.router.config import RouterConfig
from tandem.runtime.config import RuntimeConfig
runtime = RuntimeConfig.model_validate_json(sys.argv[1])
uvloop.run(run_frontend(FrontendConfig(port=0), runtime, RouterConfig()))
"""


async def start(config: RuntimeConfig) -> ChildProcess:
    command = [sys.executable, "-c", PROGRAM, config.model_dump_json()]
    return await ChildProcess.start_piped(command, stderr=PIPE)


async def test_it_joins_serves_and_leaves_at_sigterm(runtime_config: RuntimeConfig) -> None:
    discovery = EtcdDiscovery(runtime_config)
    await discovery.start()
    process = await start(runtime_config)
    try:
        view = watch_instances(discovery, runtime_config.namespace, "frontend")
        await view.wait_for(lambda items: len(items) == 1, 60)
        (instance,) = view.items.values()
        async with httpx.AsyncClient(base_url=f"http://{instance.address}") as http:
            assert (await http.get("/live")).status_code == 200
            assert (await http.get("/health")).status_code == 503
        process.signal(signal.SIGTERM)
        await view.wait_for(lambda items: not items, 60)
        _, log = await output_of(process)
        assert process.exit_code == 0, log.decode()
        assert b"Traceback" not in log, log.decode()
    finally:
        if process.exit_code is None:
            process.kill()
            await process.wait()
        await discovery.close()


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

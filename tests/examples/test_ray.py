"""examples/ray, with a stand-in for Ray, which no test installs."""

import os
import signal
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.examples.example_cluster import DEADLINE_S, ExampleCluster

STAND_IN = Path(__file__).with_name("ray_stand_in.py")


@pytest.mark.slow
async def test_workers_of_placement_groups_serve_until_they_are_drained(
    examples: ExampleCluster, http: aiohttp.ClientSession
) -> None:
    programs = Path(sys.executable).parent
    examples.environment["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    examples.environment["TANDEM_RUNTIME__NATS_URL"] = examples.nats.url
    examples.environment["TANDEM_RUNTIME__ETCD_ENDPOINTS"] = examples.etcd.url
    examples.start_frontend()
    words = ("bundled", "--workers", "1", "--gpus", "0", "--tp", "2", "--served-model-name=a")
    workers = examples.start("ray", str(STAND_IN), "ray_workers.py", *words)
    await examples.wait_for_models(http, "a")
    answer = await examples.complete(http, model="a", prompt="Once", max_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2
    assert workers.output.startswith("{'CPU': 2, 'GPU': 0}\n")
    [worker] = psutil.Process(workers.process.pid).children()
    workers.is_ended = True
    workers.process.send_signal(signal.SIGINT)
    assert workers.process.wait(DEADLINE_S) == 0
    assert not worker.is_running()
    await examples.wait_for_models(http)

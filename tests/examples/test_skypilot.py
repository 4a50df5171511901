"""examples/skypilot: its `run`, on two hosts of the test as two nodes, with workers on CPUs."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import yaml

from tests.e2e.cluster import write_sensitive_model
from tests.examples.example_cluster import EXAMPLES
from tests.hosts import Hosts, end, host_environment, require_hosts
from tests.services import eventually

TASK = yaml.safe_load((EXAMPLES / "skypilot" / "tandem.yaml").read_text())


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """The address of the first node's frontend."""
    require_hosts()
    with Hosts(TASK["num_nodes"]) as hosts:
        common = host_environment() | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "MODEL": str(write_sensitive_model(tmp_path / "model")),
            "SKYPILOT_NODE_IPS": "\n".join(host.address for host in hosts.all),
            "SKYPILOT_NUM_GPUS_PER_NODE": "0",
            "TANDEM_DISAGG__POLICY": "always_remote",
            **dict.fromkeys(TASK["secrets"], "a token of the test"),
        }
        processes = []
        for rank, host in enumerate(hosts.all):
            home = tmp_path / str(rank)
            home.mkdir()
            environment = common | {"HOME": str(home), "SKYPILOT_NODE_RANK": str(rank)}
            words = ("bash", "-c", TASK["run"])
            log = tmp_path / f"{rank}.log"
            processes.append(host.spawn(*words, log=log, environment=environment))
        yield f"http://{hosts.all[0].address}:{TASK['resources']['ports']}"
        for process in processes:
            end(process)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_prompt_is_computed_on_one_node_and_its_answer_on_another(url: str) -> None:
    body = {"model": "model", "prompt": [5] * 100, "max_tokens": 2, "ignore_eos": True}

    async def is_remote() -> bool:
        try:
            async with http.post(f"{url}/v1/completions", json=body) as answer:
                return answer.headers.get("x-tandem-prefill") == "remote"
        except aiohttp.ClientError:
            return False

    async with aiohttp.ClientSession() as http:
        await eventually(is_remote, 240, pause_s=0.5)

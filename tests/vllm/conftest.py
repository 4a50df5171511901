"""A small random model, and one vLLM that serves it behind a frontend, for all tests here."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from tandem.models.random_model import write_random_model
from tests.services import EtcdServer, NatsServer
from tests.vllm.vllm_cluster import PATIENCE_S, VllmCluster


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of two layers; vLLM's attention takes heads of 64 dimensions."""
    folder = tmp_path_factory.mktemp("model") / "random-qwen3"
    return write_random_model(folder, hidden_size=128, head_dim=64, intermediate_size=256)


@pytest.fixture(scope="session")
def served(
    nats: NatsServer, etcd: EtcdServer, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmCluster]:
    """A frontend and one vLLM."""
    cluster = VllmCluster(nats, etcd, model, tmp_path_factory.mktemp("logs"))
    cluster.start_frontend()
    cluster.start_engine()
    yield cluster
    cluster.end()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session:
        yield session

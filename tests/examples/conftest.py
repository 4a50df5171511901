"""A cluster for the examples."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.examples.example_cluster import DEADLINE_S, ExampleCluster
from tests.services import EtcdServer, NatsServer


@pytest.fixture
def examples(nats: NatsServer, etcd: EtcdServer, tmp_path: Path) -> Iterator[ExampleCluster]:
    """A cluster without processes; those that a test starts are ended."""
    cluster = ExampleCluster(nats, etcd, tmp_path)
    yield cluster
    cluster.end()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
        yield session

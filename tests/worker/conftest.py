"""Workers of both roles in this process, on real NATS and etcd."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tandem.runtime.config import RuntimeConfig
from tests.handoff_peer import tiny_model as tiny_model
from tests.worker.pair import Pair


@pytest.fixture
async def pair(runtime_config: RuntimeConfig, tiny_model: Path) -> AsyncIterator[Pair]:
    """Two workers of both roles; afterwards every block must be free or cached."""
    async with Pair(runtime_config, tiny_model) as running:
        yield running
        await running.balanced()

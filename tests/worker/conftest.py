"""Workers of both roles in this process, on real NATS and etcd."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tandem.runtime.config import RuntimeConfig
from tests.handoff_peer import tiny_model as tiny_model
from tests.worker.pair import Pair


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lasting_pair(module_config: RuntimeConfig, tiny_model: Path) -> AsyncIterator[Pair]:
    async with Pair(module_config, tiny_model) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def pair(lasting_pair: Pair) -> AsyncIterator[Pair]:
    """Two workers of both roles, the same for a module's tests, and their prefix caches empty.

    Afterwards every block must be free or cached.
    """
    await lasting_pair.forget()
    yield lasting_pair
    await lasting_pair.balanced()

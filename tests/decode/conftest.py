"""A decode worker in this process, and the prefill side that each test drives by hand."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tandem.runtime.config import RuntimeConfig
from tests.decode.prefill_peer import Stage
from tests.handoff_peer import stage as stage
from tests.handoff_peer import tiny_model as tiny_model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stage(module_config: RuntimeConfig, tiny_model: Path) -> AsyncIterator[Stage]:
    """Everything prefills remotely."""
    async with Stage(module_config, tiny_model) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def own_stage(runtime_config: RuntimeConfig, tiny_model: Path) -> AsyncIterator[Stage]:
    """A stage of the test's own, for one that stops a part of it."""
    async with Stage(runtime_config, tiny_model) as running:
        yield running
        await running.balanced()

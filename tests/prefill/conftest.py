"""A prefill worker in this process, and the decode side that each test drives by hand."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tandem.runtime.config import RuntimeConfig
from tandem.transfer.loopback import PROCESS_FABRIC, LoopbackFabric
from tests.handoff_peer import stage as stage
from tests.handoff_peer import tiny_model as tiny_model
from tests.prefill.decode_peer import Stage


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stage(module_config: RuntimeConfig, tiny_model: Path) -> AsyncIterator[Stage]:
    """Prompts longer than 32 tokens take several steps."""
    async with Stage(module_config, tiny_model) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def own_stage(runtime_config: RuntimeConfig, tiny_model: Path) -> AsyncIterator[Stage]:
    """A stage of the test's own, for one that stops a part of it."""
    async with Stage(runtime_config, tiny_model) as running:
        yield running
        await running.balanced()


@pytest.fixture
def fabric() -> LoopbackFabric:
    """What connects the two pools; undone by the test that harms it."""
    return PROCESS_FABRIC

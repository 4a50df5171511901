"""A prefill worker in this process, and the decode side that each test drives by hand."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.transfer.loopback import PROCESS_FABRIC, LoopbackFabric
from tests.handoff_peer import tiny_model as tiny_model
from tests.prefill.decode_peer import Stage


@pytest.fixture
async def stage(runtime_config: RuntimeConfig, tiny_model: Path) -> AsyncIterator[Stage]:
    """Prompts longer than 32 tokens take several steps; afterwards nothing may be held."""
    async with Stage(runtime_config, tiny_model) as running:
        yield running
        await running.balanced()


@pytest.fixture
def fabric() -> LoopbackFabric:
    """What connects the two pools; undone by the test that harms it."""
    return PROCESS_FABRIC

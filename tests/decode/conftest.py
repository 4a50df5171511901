"""A decode worker in this process, and the prefill side that each test drives by hand."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tandem.runtime.config import RuntimeConfig
from tests.decode.prefill_peer import Stage
from tests.handoff_peer import tiny_model as tiny_model


@pytest.fixture
async def stage(runtime_config: RuntimeConfig, tiny_model: Path) -> AsyncIterator[Stage]:
    """Everything prefills remotely; afterwards every block must be free or cached."""
    async with Stage(runtime_config, tiny_model) as running:
        yield running
        await running.balanced()

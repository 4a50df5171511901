"""A decode worker in this process, and the prefill side that each test drives by hand."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # lets tests import `prefill_peer`

from handoff_peer import write_tiny_model
from prefill_peer import Stage

from tandem.runtime.config import RuntimeConfig


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def stage(runtime_config: RuntimeConfig, tiny_model: Path) -> AsyncIterator[Stage]:
    """Everything prefills remotely; afterwards every block must be free or cached."""
    async with Stage(runtime_config, tiny_model) as running:
        yield running
        await running.balanced()

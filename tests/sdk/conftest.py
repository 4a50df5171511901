"""Workers of the kit and their callers, on the session's NATS and etcd."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # lets tests import `kit_pair`

from kit_pair import Pair

from tandem.runtime.config import RuntimeConfig


@pytest.fixture
async def pair(runtime_config: RuntimeConfig) -> AsyncIterator[Pair]:
    async with Pair(runtime_config.model_copy(update={"drain_timeout_s": 0.3})) as running:
        yield running

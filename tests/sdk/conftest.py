"""Workers of the kit and their callers, on the session's NATS and etcd."""

from collections.abc import AsyncIterator

import pytest

from tandem.runtime.config import RuntimeConfig
from tests.sdk.kit_pair import Pair


@pytest.fixture
async def pair(runtime_config: RuntimeConfig) -> AsyncIterator[Pair]:
    async with Pair(runtime_config.model_copy(update={"drain_timeout_s": 0.3})) as running:
        yield running

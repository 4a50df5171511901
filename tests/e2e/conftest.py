"""One cluster per test module; tests that harm it heal it again."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.cluster import Cluster

# a busy machine may take longer than the default to claim a ticket
PATIENCE = ("--disagg.claim_timeout_ms=20000",)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """`NUM_WORKERS = (prefill, decode)` and the module's flags say what is started."""
    num_prefill, num_decode = getattr(request.module, "NUM_WORKERS", (1, 1))
    flags = getattr(request.module, "FLAGS", PATIENCE)
    frontend_flags = getattr(request.module, "FRONTEND_FLAGS", ())
    async with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        await cluster.start_all(num_prefill, num_decode, *flags, frontend_flags=frontend_flags)
        yield cluster

"""One Slurm per test module, with one deployment and its load."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.hosts import Hosts, require_hosts
from tests.launch.slurm.slurm_cluster import PROGRAMS, SlurmCluster
from tests.launch.slurm.slurm_deployment import Tandem, deployed
from tests.stream_load import StreamLoad


@pytest.fixture(scope="module")
def slurm(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    """The module's `NUM_HOSTS` hosts, each as its `NODE` says."""
    require_hosts(*PROGRAMS)
    module = request.module
    with Hosts(module.NUM_HOSTS) as hosts, SlurmCluster(hosts, **module.NODE) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def tandem(
    request: pytest.FixtureRequest, slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tandem]:
    """`UP` of the module has the words of `tandem slurm up`."""
    with deployed(slurm, tmp_path_factory.mktemp("shared"), *request.module.UP) as tandem:
        yield tandem


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def load(tandem: Tandem) -> AsyncIterator[StreamLoad]:
    async with StreamLoad(lambda: tandem.services().get("http_url"), "model") as load:
        tandem.up_s += await load.first_answer_s()
        print(f"up to the first answer: {tandem.up_s:.1f} s")
        await load.take_references()
        yield load

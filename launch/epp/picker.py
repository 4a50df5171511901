"""The choice for a request that passes a Gateway: a frontend by load, a worker by the router."""

import asyncio
import ipaddress
import logging
from urllib.parse import urlsplit

from tandem.config.epp import EppConfig
from tandem.frontend.access.access import Access
from tandem.frontend.access.named_worker import NamedWorkers
from tandem.frontend.access.room import Room
from tandem.frontend.catalog.catalog import Catalog
from tandem.frontend.catalog.worker_events import WorkerEvents
from tandem.frontend.config import ANY, FrontendConfig
from tandem.frontend.errors import TooManyRequestsError
from tandem.frontend.generation.deps import FrontendDeps
from tandem.frontend.generation.plan import prefix_hashes
from tandem.frontend.telemetry.metrics import FrontendMetrics
from tandem.frontend.ui.recent import Recent
from tandem.launch.epp.messages import Pick
from tandem.launch.epp.prompts import Prompts, ReadPrompt
from tandem.router.config import RouterConfig
from tandem.router.policy import Router
from tandem.runtime.errors import TandemError, UnavailableError
from tandem.runtime.membership.node import Node
from tandem.runtime.process.watched_files import WatchedFiles
from tandem.runtime.store.discovery import watch_instances
from tandem.runtime.tracing.trace import TraceFile
from tandem.runtime.wire.block_hash import num_blocks_of
from tandem.runtime.wire.cluster_messages import Instance

logger = logging.getLogger(__name__)


class Picker:
    """Follows the frontends and the workers of a cluster on a connected node.

    The frontends have a router of their own kind, in which each request is one block: the one with
    the fewest of the requests that were sent to it wins.
    """

    def __init__(
        self, config: EppConfig, frontend: FrontendConfig, router: RouterConfig, node: Node
    ) -> None:
        namespace = node.config.namespace
        self._config = config
        self.catalog = Catalog(node.discovery, node.client, namespace, frontend.model_grace_s)
        self.router = Router(router)
        self._events = WorkerEvents(node.events, self.catalog, node.client, self.router)
        self._frontends = watch_instances(node.discovery, namespace, "frontend")
        self._by_load = Router(RouterConfig())
        self._endpoints: dict[str, str] = {}  # ip:port, by a frontend's instance id
        self._requests = Room(config.max_requests)
        self._names = NamedWorkers(node.config.cluster_token)
        # for the keys; names are the frontends' own to check
        access = Access(frontend.model_copy(update={"allowed_hosts": ANY}))
        self._keys = WatchedFiles(access.files, access.reload)
        deps = FrontendDeps(
            frontend,
            self.catalog,
            node.client,
            self.router,
            FrontendMetrics(),
            Recent(),
            TraceFile(None, "epp", node.instance_id),
            self._names,
            Room(0),
        )
        self._prompts = Prompts(deps, access)

    async def start(self) -> None:
        """Read the present state of the cluster."""
        self._frontends.subscribe(self._on_frontend)
        await self._frontends.ready()
        await self.catalog.start()
        await self._events.start()
        self._keys.start()

    async def close(self) -> None:
        """Stop following."""
        await self._keys.close()
        await self._events.close()
        await self.catalog.close()
        await self._frontends.close()

    def _on_frontend(self, instance_id: str, instance: Instance | None) -> None:
        endpoint = None if instance is None else endpoint_of(instance.address)
        if endpoint is not None:
            self._endpoints[instance_id] = endpoint
            return
        self._endpoints.pop(instance_id, None)
        self._by_load.remove_instance(instance_id)
        if instance is not None:
            logger.warning(
                "frontend %s at %s gets no requests: a Gateway needs an IP address; set "
                "runtime.advertise_host",
                instance_id,
                instance.address,
            )

    # ---- requests -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Count a request, which ends by `finished`. Raise TooManyRequestsError."""
        if not self._requests.take(1, ""):
            limit = self._requests.limit
            raise TooManyRequestsError(f"the endpoint picker has {limit} requests under way")

    async def pick(
        self,
        request_id: str,
        head: dict[bytes, bytes],
        body: bytes | None,
        subset: frozenset[str] | None,
    ) -> Pick:
        """Choose for a request; without a `body` the frontend will choose the worker.

        Raise UnavailableError without a frontend.
        """
        prompt = None if body is None else await self._read(head, body)
        endpoints = {
            instance_id: endpoint
            for instance_id, endpoint in self._endpoints.items()
            if subset is None or subset & {endpoint, endpoint.rpartition(":")[0]}
        }
        if not endpoints:
            among = "" if subset is None else f" among the {len(subset)} that the Gateway allows"
            raise UnavailableError(f"no frontend is ready{among}")
        decision = self._by_load.choose(list(endpoints), [], 1)
        self._by_load.started(request_id, decision, 1)
        named = "" if prompt is None else self._name_worker(request_id, prompt)
        return Pick(endpoints[decision.instance_id], named)

    async def _read(self, head: dict[bytes, bytes], body: bytes) -> ReadPrompt | None:
        """Return the prompt; None where it cannot be read, as the frontend will say."""
        try:
            async with asyncio.timeout(self._config.timeout_s):
                return await self._prompts.read(head, body)
        except (TandemError, TimeoutError) as error:
            logger.debug("no prompt: %s", error)
        except Exception:
            logger.exception("a prompt could not be read")
        return None

    def _name_worker(self, request_id: str, prompt: ReadPrompt) -> str:
        """Return the header that names the worker for a prompt; empty without a worker."""
        candidates = self.catalog.untroubled(prompt.model)
        if not candidates:
            return ""
        block_size = prompt.model.card.block_size
        num_blocks = num_blocks_of(len(prompt.token_ids), block_size)
        hashes: list[bytes] = []
        if prompt.is_hashable and self.router.heeds_prefix(candidates):
            hashes = prefix_hashes(prompt.token_ids, block_size, prompt.salt)
        decision = self.router.choose(candidates, hashes, num_blocks, prompt.ttft_target_s)
        self.router.started(request_id, decision, num_blocks)
        return self._names.header(decision.instance_id)

    def answered(self, request_id: str) -> None:
        """Note that the answer to a request has begun."""
        self.router.prefilled(request_id)

    def finished(self, request_id: str) -> None:
        """Note that a request is over, however it ended."""
        self._requests.give_back(1, "")
        self._by_load.finished(request_id)
        self.router.finished(request_id)


def endpoint_of(address: str) -> str | None:
    """Return `ip:port` of a frontend's address, with or without a scheme; None for a name."""
    endpoint = address.rpartition("://")[2]
    try:
        ipaddress.ip_address(urlsplit(f"//{endpoint}").hostname or "")
    except ValueError:
        return None
    return endpoint

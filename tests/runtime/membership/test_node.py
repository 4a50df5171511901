"""A process's place in its cluster."""

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.local.ports import http_status
from tandem.runtime.membership.node import Node


async def test_probes_say_that_a_process_is_ready_while_it_is_registered(
    runtime_config: RuntimeConfig,
) -> None:
    config = runtime_config.model_copy(update={"metrics_port": 0})
    async with Node(config, component="decode") as node:
        host, _, port = node.metrics_address.rpartition(":")

        async def probe(path: str) -> int:
            return await http_status(host, int(port), path)

        assert [await probe("/live"), await probe("/health")] == [200, 503]
        await node.put(f"/tandem/{config.namespace}/instances/decode/{node.instance_id}", b"{}")
        assert await probe("/health") == 200
        await node.withdraw()
        assert [await probe("/live"), await probe("/health")] == [200, 503]
        assert await probe("/metrics") == 200

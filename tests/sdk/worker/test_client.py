"""The instances that a client calls, and those that come, go, refuse or die."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tandem.runtime.address import EndpointAddress, new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import (
    ConnectionLostError,
    DeadlineError,
    IncompleteError,
    NotFoundError,
    UnavailableError,
)
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.plane.server import RequestServer
from tandem.runtime.store.discovery import MemoryDiscovery, register_instance
from tandem.runtime.wire.cluster_messages import Instance
from tandem.sdk import Client, Context
from tandem.sdk.worker.serving import RequestHandler, ServedEndpoint
from tests.sdk.kit_pair import PATIENCE_S, data_of

ADDRESS = EndpointAddress("a", "b", "c")
CONFIG = RuntimeConfig(connect_timeout_s=60.0)
HURRIED = RuntimeConfig(connect_timeout_s=0.5)


class Crowd:
    """Several instances of one endpoint on one store, without etcd."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.discovery = MemoryDiscovery()
        self.requests = RequestClient(config, "caller")
        self.client = Client(ADDRESS, self.requests, self.discovery)
        self.servers: dict[str, RequestServer] = {}

    async def add(self, handler: RequestHandler | None = None) -> str:
        instance_id = new_id()
        server = self.servers[instance_id] = RequestServer(CONFIG, instance_id)
        await server.start()

        async def who(request: Any) -> str:
            return instance_id

        ServedEndpoint(server, ADDRESS, handler or who)
        await self.announce(instance_id, server.address)
        return instance_id

    async def announce(self, instance_id: str, address: str) -> None:
        instance = Instance("a", "b", "c", instance_id, address, "e")
        await register_instance(self.discovery, instance)

    async def forget(self, instance_id: str) -> None:
        await self.discovery.delete(ADDRESS.instance_key(instance_id))

    async def ask(self) -> str:
        [answer] = await data_of(await self.client.generate(None))
        assert isinstance(answer, str)
        return answer


@pytest.fixture
async def crowd(request: pytest.FixtureRequest) -> AsyncIterator[Crowd]:
    crowd = Crowd(getattr(request, "param", CONFIG))
    yield crowd
    await crowd.requests.close()
    for server in crowd.servers.values():
        await server.stop()


async def test_instances_are_followed_as_they_come_and_go(crowd: Crowd) -> None:
    assert crowd.client.instance_ids() == []
    ids = sorted([await crowd.add(), await crowd.add()])
    assert crowd.client.instance_ids() == crowd.client.endpoint_ids() == ids
    assert [instance.instance_id for instance in crowd.client.instances()] == ids
    await crowd.forget(ids[0])
    assert crowd.client.instance_ids() == ids[1:]
    await crowd.client.close()
    await crowd.forget(ids[1])
    assert crowd.client.instance_ids() == ids[1:]  # not followed any more


async def test_requests_go_round(crowd: Crowd) -> None:
    ids = {await crowd.add() for _ in range(3)}
    asked = [await crowd.ask() for _ in range(6)]
    assert set(asked[:3]) == ids and asked[3:] == asked[:3]


async def test_random_draws_from_all_and_direct_takes_the_one_that_is_named(crowd: Crowd) -> None:
    ids = {await crowd.add() for _ in range(2)}
    drawn = [await data_of(await crowd.client.random(None)) for _ in range(40)]
    assert {who for [who] in drawn} == ids
    for who in ids:
        assert await data_of(await crowd.client.direct(None, who)) == [who]


async def test_an_item_is_annotated_or_plain(crowd: Crowd) -> None:
    async def answers(request: Any) -> AsyncIterator[dict[str, int]]:
        yield {"x": 1}

    await crowd.add(answers)
    [item] = [item async for item in await crowd.client.generate(None)]
    assert item.data() == {"x": 1} and str(item) == "{'x': 1}"
    assert item.id() is None and item.event() is None
    assert item.comments() == [] and not item.is_error()
    assert [item async for item in await crowd.client.generate(None, annotated=False)] == [{"x": 1}]


async def test_an_endpoint_without_instances_is_an_error_that_names_it(crowd: Crowd) -> None:
    with pytest.raises(UnavailableError, match=r"a\.b\.c has no instance"):
        await crowd.client.generate(None)
    with pytest.raises(NotFoundError, match=r"a\.b\.c has no instance 'someone'"):
        await crowd.client.direct(None, "someone")


async def test_waiting_for_instances_ends_with_the_first_or_with_the_time(crowd: Crowd) -> None:
    with pytest.raises(DeadlineError):
        await crowd.client.wait_for_instances(0.01)
    waiting = asyncio.create_task(crowd.client.wait_for_instances())
    instance_id = await crowd.add()
    assert await asyncio.wait_for(waiting, PATIENCE_S) == [instance_id]


# ---- those that do not answer -----------------------------------------------------------------


async def test_an_instance_that_cannot_be_reached_is_passed_over(crowd: Crowd) -> None:
    alive, dead = await crowd.add(), await crowd.add()
    await crowd.servers[dead].stop()
    assert {await crowd.ask() for _ in range(4)} == {alive}
    with pytest.raises(ConnectionLostError):
        await crowd.client.direct(None, dead)


async def test_an_instance_that_refuses_is_passed_over(crowd: Crowd) -> None:
    alive, leaving = await crowd.add(), await crowd.add()
    crowd.servers[leaving].unregister(str(ADDRESS))
    assert {await crowd.ask() for _ in range(4)} == {alive}


@pytest.mark.parametrize("crowd", [HURRIED], indirect=True)
async def test_one_that_hangs_costs_its_time_once(crowd: Crowd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        await crowd.announce("hanging", f"127.0.0.1:{hanging.getsockname()[1]}")
        alive = await crowd.add()
        assert {await crowd.ask() for _ in range(6)} == {alive}
        hanging.setblocking(False)
        hanging.accept()[0].close()
        with pytest.raises(BlockingIOError):
            hanging.accept()


async def test_all_failing_is_the_last_ones_error(crowd: Crowd) -> None:
    for _ in range(2):
        await crowd.servers[await crowd.add()].stop()
    with pytest.raises(ConnectionLostError, match="cannot connect"):
        await crowd.client.generate(None)


async def test_one_that_gives_up_before_the_first_item_is_followed_by_another(crowd: Crowd) -> None:
    async def gives_up(request: Any) -> AsyncIterator[str]:
        raise GeneratorExit
        yield ""

    await crowd.add(gives_up)
    alive = await crowd.add()
    assert {await crowd.ask() for _ in range(4)} == {alive}


async def test_after_the_first_item_the_loss_of_an_instance_reaches_the_caller(
    crowd: Crowd,
) -> None:
    async def gives_up(request: Any) -> AsyncIterator[str]:
        yield "one"
        raise GeneratorExit

    for _ in range(2):
        await crowd.add(gives_up)
    responses = await crowd.client.generate(None)
    assert (await anext(responses)).data() == "one"
    with pytest.raises(IncompleteError):
        await anext(responses)


async def test_a_killed_context_makes_no_call(crowd: Crowd) -> None:
    await crowd.add()
    context = Context()
    context.kill()
    with pytest.raises(Exception, match="killed"):
        await crowd.client.generate(None, context=context)

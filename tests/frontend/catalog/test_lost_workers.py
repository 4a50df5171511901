"""Workers whose connection is lost: dead ones, and those that only took a pause."""

import asyncio
import socket

import httpx
import pytest

from tandem.frontend.config import FrontendConfig
from tests.frontend.access.test_access import bearer, entry
from tests.frontend.frontend_stack import ANSWER, Stack
from tests.frontend.generation.cut_answers import TEXT_AND_LOGPROBS, Cut, ask, telling
from tests.services import eventually


def is_waiting(caplog: pytest.LogCaptureFixture) -> bool:
    return "no worker can take it" in caplog.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("returns", [False, True])
async def test_an_answer_waits_for_the_next_worker_or_its_own_when_its_only_one_is_lost(
    stack: Stack, returns: bool, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stack.worker.script = telling(ANSWER)
    path, body = TEXT_AND_LOGPROBS[3]
    uncut = await ask(stack, path, body, stream=stream)
    cut = Cut(stack, 3, None, vanishes=True)
    asking = asyncio.create_task(ask(stack, path, body, stream=stream))
    await eventually(lambda: is_waiting(caplog))
    worker = stack.worker
    if returns:
        await worker.come_back()
    else:
        worker = await stack.add_worker(script=cut.whole)
    assert await asking == uncut
    generated = [request.num_generated for request in worker.requests]
    assert generated == ([0, 3] if returns else [3])


async def test_the_wait_for_a_worker_ends_after_its_time_with_an_error() -> None:
    async with Stack(config=FrontendConfig(port=0, migration_wait_s=0.05)) as stack:
        Cut(stack, 1, None, vanishes=True)
        assert (await stack.chat()).json()["error"]["code"] == "connection_lost"


async def test_the_wait_for_a_worker_ends_when_the_client_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Stack(config=FrontendConfig(port=0, migration_wait_s=600)) as stack:
        Cut(stack, 1, None, vanishes=True)
        asking = asyncio.create_task(stack.chat())
        await eventually(lambda: is_waiting(caplog))
        asking.cancel()
        await eventually(lambda: 'status="499"' in stack.metrics())


async def test_the_wait_for_a_worker_ends_with_the_requests_own_time() -> None:
    config = FrontendConfig(port=0, migration_wait_s=600, request_timeout_s=0.5)
    async with Stack(config=config) as stack:
        Cut(stack, 1, None, vanishes=True)
        assert (await stack.chat()).status_code == 504


# ---- workers that return ----------------------------------------------------------------------


async def test_a_worker_that_takes_a_pause_of_the_frontend_for_its_death_costs_no_time() -> None:
    """It cuts the connection, and answers the next one at once."""
    config = FrontendConfig(port=0, exclude_s=600, migration_wait_s=600)
    async with Stack(config=config) as stack:
        for num_tokens in (0, 1, 5):
            cut = Cut(stack, num_tokens, None)
            response = await stack.chat()
            assert response.json()["choices"][0]["message"]["content"] == ANSWER
            assert sum(cut.num_cuts.values()) == 1


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_worker_that_dies_before_its_first_request_is_noticed_at_once(
    stack: Stack, is_known: bool
) -> None:
    """Its record stays until its lease ends: that of a killed process."""
    catalog, first = stack.server.catalog, stack.worker.instance_id
    (model,) = catalog.models
    dead = await stack.add_worker(sends_kv_events=False)
    if is_known:
        await eventually(lambda: bool(dead.server.connections))
    dead.vanish()
    await eventually(lambda: set(catalog.members(model)) == {first, dead.instance_id})
    await eventually(lambda: catalog.reachable(model) == [first])
    await dead.come_back()
    await eventually(lambda: len(catalog.reachable(model)) == 2)


async def test_health_follows_a_worker_that_is_lost_and_returns(stack: Stack) -> None:
    await stack.chat()
    stack.worker.vanish()
    (model,) = stack.server.catalog.models
    await eventually(lambda: not stack.server.catalog.reachable(model))
    assert (await stack.http.get("/health")).status_code == 503
    await stack.http.get("/metrics")
    assert 'tandem_frontend_decode_workers{model="test/model"} 0.0' in stack.metrics()
    await stack.worker.come_back()
    await eventually(lambda: bool(stack.server.catalog.reachable(model)))
    assert (await stack.http.get("/health")).status_code == 200


async def test_a_lost_worker_is_asked_by_no_request_before_it_answers() -> None:
    """A stopped process takes connections and answers nothing, for as long as a client waits."""
    config = FrontendConfig(port=0, exclude_s=0)
    async with Stack(num_workers=2, config=config) as stack:
        stopped, well = stack.workers
        (model,) = stack.server.catalog.models
        stopped.vanish()
        host, port = stopped.server.address.rsplit(":")
        with socket.create_server((host, int(port))):
            await eventually(lambda: stack.server.catalog.reachable(model) == [well.instance_id])
            async with asyncio.timeout(4):  # less than a dial takes
                for _ in range(8):
                    assert (await stack.chat()).status_code == 200
        assert len(well.requests) == 8 and not stopped.requests
        assert "migrations_total{" not in stack.metrics()
        await stopped.come_back()
        await eventually(lambda: len(stack.server.catalog.reachable(model)) == 2)


async def test_a_worker_whose_heartbeat_is_late_gets_no_requests_while_there_is_another() -> None:
    async with Stack(num_workers=2) as stack:
        late, well = stack.workers
        for connection in late.server.connections:
            assert connection._timer is not None
            connection._timer.cancel()  # no more heartbeats
        (model,) = stack.server.catalog.models
        catalog = stack.server.catalog
        await eventually(lambda: catalog.candidates(model) == [well.instance_id])
        assert (await stack.chat()).status_code == 200
        while catalog.is_quiet(model, late.instance_id):  # until its connection counts as lost
            assert not late.requests
            assert (await stack.chat()).status_code == 200
        assert well.requests


# ---- requests that have not begun -------------------------------------------------------------


@pytest.mark.parametrize("is_successor", [False, True])
async def test_a_new_request_waits_for_the_return_of_the_last_worker_or_for_another_one(
    stack: Stack, is_successor: bool
) -> None:
    Cut(stack, 0, None, vanishes=True)
    asking = [asyncio.create_task(stack.chat(stream=stream)) for stream in (False, True)]
    await eventually(lambda: stack.server.handler._deps.waiting.num_taken == 2)
    asking.append(asyncio.create_task(stack.chat()))  # it finds no worker
    await eventually(lambda: stack.server.handler._deps.waiting.num_taken == 3)
    if is_successor:
        await stack.worker.discovery.close()
        await stack.add_worker()
    else:
        stack.worker.script = telling(ANSWER)
        await stack.worker.come_back()
    assert [response.status_code for response in await asyncio.gather(*asking)] == [200] * 3
    assert stack.server.handler._deps.waiting.num_taken == 0


async def test_some_time_after_the_loss_new_requests_are_refused_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Stack(config=FrontendConfig(port=0, return_wait_s=0.5)) as stack:
        await stack.chat()
        stack.worker.vanish()
        (model,) = stack.server.catalog.models
        await eventually(lambda: stack.server.catalog.absent_s(model) is not None)
        response = await stack.chat()
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert is_waiting(caplog)
        caplog.clear()
        assert (await stack.chat()).status_code == 503
        assert not is_waiting(caplog)
        await stack.worker.come_back()
        await eventually(lambda: stack.server.catalog.absent_s(model) is None)
        assert (await stack.chat()).status_code == 200


async def test_of_new_requests_only_so_many_wait() -> None:
    config = FrontendConfig(port=0, max_waiting_requests=2, return_wait_s=600)
    async with Stack(config=config) as stack:
        await stack.worker.leave()
        waiting = [asyncio.create_task(stack.chat()) for _ in range(2)]
        await eventually(lambda: stack.server.handler._deps.waiting.num_taken == 2)
        assert (await stack.chat()).status_code == 503
        await stack.add_worker()
        assert [response.status_code for response in await asyncio.gather(*waiting)] == [200] * 2


async def test_one_key_leaves_others_room_to_wait() -> None:
    keys = f"{entry('alice')};{entry('bob')}"
    config = FrontendConfig(port=0, max_waiting_requests=4, return_wait_s=600, api_keys=keys)
    async with Stack(config=config) as stack:
        await stack.worker.leave()

        def ask(name: str) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(stack.chat(headers=bearer(name)))

        waiting = [ask("alice"), ask("alice")]
        await eventually(lambda: stack.server.handler._deps.waiting.num_taken == 2)
        assert (await ask("alice")).status_code == 503
        waiting.append(ask("bob"))
        await eventually(lambda: stack.server.handler._deps.waiting.num_taken == 3)
        await stack.add_worker()
        assert [response.status_code for response in await asyncio.gather(*waiting)] == [200] * 3

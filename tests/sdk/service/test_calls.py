"""Services in this process on a real cluster: how they start, call one another, and end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
from pydantic import BaseModel

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import InvalidRequestError, NotFoundError
from tandem.sdk import (
    Context,
    DistributedRuntime,
    RemoteService,
    async_on_start,
    depends,
    dynamo_context,
    dynamo_endpoint,
    endpoint,
    liveness,
    on_shutdown,
    readiness,
    serve_service,
    service,
)
from tests.services import eventually, free_port


class Words(BaseModel):
    text: str


@service(dynamo={"namespace": "test"})
class Backend:
    killed: asyncio.Event

    def __init__(self) -> None:
        Backend.killed = asyncio.Event()

    @endpoint()
    async def generate(self, request: Words) -> AsyncIterator[str]:
        for word in request.text.split():
            yield word

    @dynamo_endpoint(name="who/am/i")
    async def who(self, request: None) -> str:
        return str(dynamo_context["instance_id"])

    @endpoint()
    async def endless(self, request: str, context: Context) -> AsyncIterator[int]:
        with contextlib.suppress(asyncio.CancelledError):
            for number in range(1_000_000):
                if context.is_killed():
                    break
                yield number
                await asyncio.sleep(0.001)
        Backend.killed.set()


@service
class Front:
    """Not served: its dependency is called as from a service that is."""

    backend = depends(Backend)


@pytest.fixture
async def runtime(runtime_config: RuntimeConfig) -> AsyncIterator[DistributedRuntime]:
    async with DistributedRuntime(runtime_config.model_copy(update={"drain_timeout_s": 1})) as it:
        yield it


@pytest.fixture
async def backend(runtime: DistributedRuntime) -> AsyncIterator[RemoteService]:
    """A Backend that is served, as another service sees it."""
    serving = asyncio.ensure_future(serve_service(runtime, Backend))
    yield Front().backend
    runtime.shutdown()
    await serving


async def test_a_call_waits_for_the_service_to_start_and_gives_plain_data(
    backend: RemoteService,
) -> None:
    assert [word async for word in backend.generate(Words(text="a b c"))] == ["a", "b", "c"]
    assert [word async for word in backend.generate('{"text": "json"}')] == ["json"]


async def test_a_call_may_be_awaited_before_it_is_read(backend: RemoteService) -> None:
    answer = await backend.generate({"text": "one two"})
    assert [word async for word in answer] == ["one", "two"]


async def test_an_endpoint_has_ways_to_choose_the_instance(
    backend: RemoteService, runtime: DistributedRuntime
) -> None:
    who = backend.endpoint("who/am/i")
    assert who is backend.who
    for answer in (who.round_robin(None), who.random(None), who.direct(None, runtime.instance_id)):
        assert [each async for each in answer] == [runtime.instance_id]
    assert (await who.client()).instance_ids() == [runtime.instance_id]


async def test_an_error_of_the_service_reaches_its_caller(backend: RemoteService) -> None:
    with pytest.raises(InvalidRequestError, match="text: Field required"):
        await anext(backend.generate({"txt": "typo"}))


async def test_a_stream_that_is_left_ends_at_the_service(backend: RemoteService) -> None:
    async with backend.endless("go") as numbers:
        assert await anext(numbers) == 0
    async with asyncio.timeout(60):
        await Backend.killed.wait()


async def test_an_unknown_endpoint_is_named(backend: RemoteService) -> None:
    with pytest.raises(AttributeError, match="Backend: unknown key 'genrate'; did you mean gener"):
        backend.genrate  # noqa: B018
    with pytest.raises(NotFoundError, match="did you mean generate"):
        backend.endpoint("genrate")


async def test_what_a_graph_leaves_out_is_false_and_cannot_be_called(
    runtime: DistributedRuntime,
) -> None:
    dynamo_context.fill({"runtime": runtime, "graph": [Front]})
    left_out = Front().backend
    assert not left_out
    with pytest.raises(NotFoundError, match="Backend is not linked in the running graph"):
        left_out.endpoint("generate")


async def test_a_service_goes_through_its_life_in_order(runtime: DistributedRuntime) -> None:
    said: list[str] = []

    @service(dynamo={"namespace": "life"})
    class Alive:
        def __init__(self) -> None:
            context = {key: dynamo_context[key] for key in dynamo_context}
            assert context["runtime"] is runtime
            assert (context["namespace"], context["component"].name) == ("life", "Alive")
            assert [str(each.address) for each in context["endpoints"]] == ["life.Alive.generate"]
            assert context["lease"].id() == context["instance_id"] == runtime.instance_id
            assert context["config"] == {}
            said.append("init")

        @async_on_start
        async def start(self) -> None:
            said.append(f"start, {len(runtime.served)} served")

        @async_on_start
        def start_more(self) -> None:
            said.append("start more")

        @endpoint()
        async def generate(self, request: str) -> str:
            said.append(request)
            return request

        @on_shutdown
        async def end(self) -> None:
            said.append(f"end, {len(runtime.served)} served")

    serving = asyncio.ensure_future(serve_service(runtime, Alive))
    client = await runtime.endpoint("life.Alive.generate").client()
    await client.wait_for_instances(10)
    assert [each async for each in await client.generate("hi", annotated=False)] == ["hi"]
    runtime.shutdown()
    await serving
    assert said == ["init", "start, 0 served", "start more", "hi", "end, 0 served"]


async def test_a_service_that_cannot_start_says_why_and_cleans_up(
    runtime: DistributedRuntime,
) -> None:
    ended: list[str] = []

    @service
    class Broken:
        @async_on_start
        async def start(self) -> None:
            raise RuntimeError("no model")

        @on_shutdown
        def end(self) -> None:
            ended.append("end")

    with pytest.raises(RuntimeError, match="no model"):
        await serve_service(runtime, Broken)
    assert ended == ["end"]


async def test_health_is_what_the_methods_say(
    runtime: DistributedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    mood = {"live": True, "ready": False}

    @service(dynamo={"namespace": "health"})
    class Moody:
        @endpoint()
        async def generate(self, request: str) -> str:
            return request

        @liveness
        def lives(self) -> bool:
            if not mood["live"]:
                raise RuntimeError("out of memory")
            return True

        @readiness
        async def is_ready(self) -> bool:
            return mood["ready"]

    port = free_port()
    monkeypatch.setenv("TANDEM_SYSTEM_PORT", str(port))
    serving = asyncio.ensure_future(serve_service(runtime, Moody))
    await eventually(lambda: bool(runtime.served) or serving.done())
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:

        async def get(path: str) -> tuple[int, str]:
            async with http.get(path) as response:
                return response.status, await response.text()

        assert (await get("/healthz"))[0] == 200
        assert await get("/readyz") == (503, '{"status":"unwell","message":"is_ready says no"}')
        mood["ready"] = True
        assert (await get("/readyz"))[0] == 200
        mood["live"] = False
        status, body = await get("/healthz")
        assert status == 500
        assert "lives: RuntimeError: out of memory" in body
        assert "python_info" in (await get("/metrics"))[1]
        assert (await get("/live"))[0] == 200
    runtime.shutdown()
    await serving

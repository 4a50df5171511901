"""`depends()`: calls between services, and the graph of the services."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import Any, Self, overload

from tandem.runtime.errors import ConfigError, NotFoundError
from tandem.sdk.service.config import unknown_key
from tandem.sdk.service.context import dynamo_context
from tandem.sdk.service.spec import ServiceSpec, spec_of
from tandem.sdk.worker.client import Client, Responses
from tandem.sdk.worker.context import Context
from tandem.sdk.worker.distributed_runtime import DistributedRuntime

LINK_ATTRIBUTE = "link"
START_TIMEOUT_S = 30.0  # a call waits this long for the first instance of a starting service
_LINKS_ATTRIBUTE = "__tandem_links__"


class Dependency:
    """A class attribute. Read from an instance, it is a `RemoteService`."""

    def __init__(self, on: type) -> None:
        self.on = on
        self.attribute = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.attribute = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> "RemoteService": ...

    def __get__(self, instance: object | None, owner: type) -> "Self | RemoteService":
        if instance is None:
            return self
        graph = dynamo_context.get("graph")
        remote = RemoteService(spec_of(self.on), is_linked=graph is None or self.on in graph)
        instance.__dict__[self.attribute] = remote  # later reads find this first
        return remote


def depends(on: type) -> Dependency:
    """Declare that a service calls another: `middle = depends(Middle)` in the body of its class.

    `self.middle.generate(x)` then calls an instance of Middle. Raise ConfigError if `on` is not a
    service.
    """
    spec_of(on)
    return Dependency(on)


class RemoteService:
    """The instances of another service. Attributes are its endpoints, by their or methods' names.

    It is false when the running graph leaves the service out.
    """

    def __init__(self, spec: ServiceSpec, *, is_linked: bool = True) -> None:
        self._spec = spec
        self._is_linked = is_linked
        self._endpoints: dict[str, RemoteEndpoint] = {}

    def __bool__(self) -> bool:
        return self._is_linked

    def __getattr__(self, name: str) -> "RemoteEndpoint":
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.endpoint(name)
        except NotFoundError as error:
            raise AttributeError(error.message) from error

    def endpoint(self, name: str) -> "RemoteEndpoint":
        """Return an endpoint, also one without a Python name. Raise NotFoundError."""
        if not self._is_linked:
            raise NotFoundError(f"{self._spec.name} is not linked in the running graph")
        by_method = {method: endpoint for endpoint, method in self._spec.endpoints.items()}
        name = name if name in self._spec.endpoints else by_method.get(name, name)
        if name not in self._spec.endpoints:
            raise NotFoundError(unknown_key(self._spec.name, name, self._spec.endpoints).message)
        if name not in self._endpoints:
            self._endpoints[name] = RemoteEndpoint(self._spec, name)
        return self._endpoints[name]


class RemoteEndpoint:
    """An endpoint of another service. Calling it is `round_robin`.

    A call waits START_TIMEOUT_S for the first instance, so that services may start in any order.
    """

    def __init__(self, spec: ServiceSpec, name: str) -> None:
        self._spec = spec
        self._name = name
        self._client: Client | None = None
        self._opening = asyncio.Lock()

    def __call__(self, request: Any, *, context: Context | None = None) -> "Answer":
        return self.round_robin(request, context=context)

    def round_robin(self, request: Any, *, context: Context | None = None) -> "Answer":
        """Call the instances in turn."""
        return self._answer(Client.round_robin, request, context=context)

    def random(self, request: Any, *, context: Context | None = None) -> "Answer":
        """Call a random instance."""
        return self._answer(Client.random, request, context=context)

    def direct(self, request: Any, instance_id: str, *, context: Context | None = None) -> "Answer":
        """Call one instance."""
        return self._answer(Client.direct, request, instance_id, context=context)

    async def client(self) -> Client:
        """Return the client of the endpoint; the runtime closes it."""
        async with self._opening:
            if self._client is None:
                runtime: DistributedRuntime = dynamo_context["runtime"]
                address = self._spec.address(self._name, runtime.config.namespace)
                self._client = await runtime.endpoint(str(address)).client()
        return self._client

    def _answer(
        self,
        call: Callable[..., Coroutine[Any, Any, Responses]],
        *arguments: Any,
        context: Context | None,
    ) -> "Answer":
        async def begin() -> Responses:
            client = await self.client()
            if not client.instance_ids():
                await client.wait_for_instances(START_TIMEOUT_S)
            return await call(client, *arguments, annotated=False, context=context)

        return Answer(begin)


class Answer(AsyncIterator[Any]):
    """The items that another service yields, as plain data.

    `async for item in answer` calls the service and reads the items; `await answer` calls it and
    returns once an instance has taken the request. To leave before the end, use `async with` or
    `aclose`.
    """

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, Responses]]) -> None:
        self._begin = begin
        self._responses: Responses | None = None

    def __await__(self) -> Generator[Any, None, Self]:
        return self._begun().__await__()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        await self._begun()
        assert self._responses is not None
        return await self._responses.__anext__()

    async def aclose(self) -> None:
        """Give up the call if it is still running."""
        if self._responses is not None:
            self._responses.cancel()

    async def __aenter__(self) -> Self:
        return await self._begun()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _begun(self) -> Self:
        if self._responses is None:
            self._responses = await self._begin()
        return self


# ---- graphs -----------------------------------------------------------------------------------


def link(cls: type, on: type) -> type:
    """Link `cls` to `on` in the graph. Return `on`, for the next link of a chain.

    A graph whose entry is linked consists of the linked services; other dependencies are left out.
    Raise ConfigError if `cls` does not depend on `on`.
    """
    spec, target = spec_of(cls), spec_of(on)
    if on not in spec.dependencies.values():
        raise ConfigError(f"{spec.name}.link({target.name}): {spec.name} has no depends() on it")
    links = _links(cls)
    setattr(cls, _LINKS_ATTRIBUTE, [*links, *([on] if on not in links else [])])
    return on


def graph_of(entry: type) -> list[ServiceSpec]:
    """Return the services that `entry` needs, each after those that it calls, `entry` last.

    Raise ConfigError for two services of one name.
    """
    if _links(entry):
        return _reached(entry, _links)
    return _reached(entry, lambda cls: _links(cls) or _dependencies(cls))


def known_services(entry: type) -> list[ServiceSpec]:
    """Return the services of `graph_of` and those that links leave out."""
    return _reached(entry, _dependencies)


def _links(cls: type) -> list[type]:
    return list(vars(cls).get(_LINKS_ATTRIBUTE, ()))


def _dependencies(cls: type) -> list[type]:
    return list(spec_of(cls).dependencies.values())


def _reached(entry: type, following: Callable[[type], list[type]]) -> list[ServiceSpec]:
    # there are no circles: a class can depend only on classes defined before it
    found: dict[type, ServiceSpec] = {}

    def visit(cls: type) -> None:
        if cls in found:
            return
        for on in following(cls):
            visit(on)
        spec = spec_of(cls)
        if any(other.name == spec.name for other in found.values()):
            raise ConfigError(f"two services of this graph are named {spec.name}")
        found[cls] = spec

    visit(entry)
    return list(found.values())

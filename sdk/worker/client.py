"""The calling side: follows the instances of an endpoint and chooses one for each request."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self

from tandem.runtime.address import EndpointAddress
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ConnectionLostError, NotFoundError, TandemError, UnavailableError
from tandem.runtime.plane.client import RequestClient
from tandem.runtime.plane.response_stream import ResponseStream
from tandem.runtime.store.discovery import Discovery, watch_endpoint
from tandem.runtime.wire.cluster_messages import Instance
from tandem.runtime.wire.decoding import decode_value
from tandem.sdk.wire.values import encode_call
from tandem.sdk.worker.annotated import Annotated
from tandem.sdk.worker.context import Context

AVOID_S = 2.0  # for which an instance that did not answer is tried last


class Responses:
    """The items of one call, in order; belongs to one reader.

    Iteration raises the handler's error, ConnectionLostError when the instance was lost,
    IncompleteError when the instance gave up the request. Leaving `async with`, or dropping the
    object, before the end kills the request.
    """

    __slots__ = ("_annotated", "_has_begun", "_loop", "_open_next", "_stream")

    def __init__(
        self,
        stream: ResponseStream,
        open_next: Callable[[TandemError], Awaitable[ResponseStream]] | None,
        annotated: bool,
    ) -> None:
        self._stream = stream
        self._open_next = open_next
        self._annotated = annotated
        self._has_begun = False
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        value = decode_value(await self._next())
        return Annotated(value) if self._annotated else value

    async def _next(self) -> bytes:
        while True:
            try:
                item = await self._stream.__anext__()
            except (ConnectionLostError, UnavailableError) as error:
                if self._has_begun or self._open_next is None:
                    raise
                self._stream = await self._open_next(error)
                continue
            self._has_begun = True
            return item

    def cancel(self) -> None:
        """Kill the request; idempotent."""
        self._stream.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        # Dropped in the middle of a loop: the instance must not continue without a reader.
        if not self._stream.is_done and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stream.cancel)


class Client:
    """Calls an endpoint on any of its instances, which it follows as they come and go.

    A request goes to another instance when the chosen one cannot be reached, refuses, or is lost
    before its first item; `direct` tries only its own.
    """

    def __init__(
        self, address: EndpointAddress, requests: RequestClient, discovery: Discovery
    ) -> None:
        self.address = address
        self._name = str(address)
        self._requests = requests
        self._view = watch_endpoint(discovery, address)
        self._ids: list[str] = []
        self._num_calls = 0
        self._avoided: dict[str, float] = {}  # instance id |-> until when
        self._view.subscribe(self._changed)

    async def ready(self) -> None:
        """Wait until the present instances are known."""
        await self._view.ready()

    async def close(self) -> None:
        """Stop following; running calls continue."""
        await self._view.close()

    # ---- instances ----------------------------------------------------------------------------

    def instance_ids(self) -> list[str]:
        """Return the ids of the known instances, sorted."""
        return list(self._ids)

    endpoint_ids = instance_ids

    def available_ids(self) -> list[str]:
        """Return the known instances, those that answered lately if there are any."""
        return list(self._candidates(set()))

    def instances(self) -> list[Instance]:
        """Return the known instances, sorted by id."""
        return [self._view.items[instance_id] for instance_id in self._ids]

    async def wait_for_instances(self, timeout_s: float | None = None) -> list[str]:
        """Wait for the first instance; return all. Raise DeadlineError after `timeout_s`."""
        limit_s = float("inf") if timeout_s is None else timeout_s
        await self._view.wait_for(bool, limit_s)
        return self.instance_ids()

    def _changed(self, instance_id: str, instance: Instance | None) -> None:
        self._ids = sorted(self._view.items)
        if instance is None:
            self._avoided.pop(instance_id, None)

    # ---- calls --------------------------------------------------------------------------------

    async def round_robin(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> Responses:
        """Call the instances in turn. Raise UnavailableError when none takes the request."""
        self._num_calls += 1
        first = self._num_calls
        return await self.chosen(request, lambda ids: ids[first % len(ids)], annotated, context)

    generate = round_robin

    async def random(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> Responses:
        """Call an instance drawn at random. Raise UnavailableError when none takes it."""
        return await self.chosen(request, random.choice, annotated, context)

    async def chosen(
        self,
        request: Any,
        choose: Callable[[list[str]], str],
        annotated: bool = True,
        context: Context | None = None,
    ) -> Responses:
        """Call the instance that `choose` takes of `available_ids`, and then of those left.

        Raise UnavailableError when none takes the request.
        """
        payload = encode_call(request)
        request_context = _request_context(context)
        tried: set[str] = set()
        trying = ""

        async def open_next(error: TandemError | None) -> ResponseStream:
            nonlocal trying
            while True:
                if error is not None:
                    self._avoided[trying] = time.perf_counter() + AVOID_S
                candidates = self._candidates(tried)
                if not candidates:
                    raise error or UnavailableError(f"{self._name} has no instance")
                trying = choose(candidates)
                tried.add(trying)
                try:
                    instance = self._view.items[trying]
                    return await self._open(instance, payload, request_context)
                except ConnectionLostError as lost:
                    error = lost

        return Responses(await open_next(None), open_next, annotated)

    async def direct(
        self, request: Any, instance_id: str, annotated: bool = True, context: Context | None = None
    ) -> Responses:
        """Call one instance. Raise NotFoundError when it is unknown, ConnectionLostError."""
        instance = self._view.items.get(instance_id)
        if instance is None:
            raise NotFoundError(f"{self._name} has no instance {instance_id!r}")
        stream = await self._open(instance, encode_call(request), _request_context(context))
        return Responses(stream, None, annotated)

    def _candidates(self, tried: set[str]) -> list[str]:
        """Return the untried instances, those that answered lately if there are any."""
        if not tried and not self._avoided:
            return self._ids
        now_s = time.perf_counter()
        self._avoided = {who: until_s for who, until_s in self._avoided.items() if until_s > now_s}
        left = [instance_id for instance_id in self._ids if instance_id not in tried]
        return [instance_id for instance_id in left if instance_id not in self._avoided] or left

    async def _open(
        self, instance: Instance, payload: bytes, context: RequestContext
    ) -> ResponseStream:
        return await self._requests.open(instance.address, self._name, payload, context)


def _request_context(context: Context | None) -> RequestContext:
    return RequestContext() if context is None else context.request_context

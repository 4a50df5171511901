"""A worker and a caller in this process, each with its own connection to the cluster."""

import asyncio
from collections.abc import Callable
from typing import Any, Self

from tandem.runtime.config import RuntimeConfig
from tandem.sdk import Client, Context, DistributedRuntime, Responses

PATIENCE_S = 60.0


async def data_of(responses: Responses) -> list[Any]:
    return [item.data() async for item in responses]


class Pair:
    """A worker and its caller; `serve` starts an endpoint and returns the caller's client of it."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.worker = DistributedRuntime(config)
        self.caller = DistributedRuntime(config)
        self.serving: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self.worker.connect()
        await self.caller.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.worker.shutdown()
        for task in self.serving:
            task.cancel()
        await asyncio.gather(*self.serving, return_exceptions=True)
        await self.caller.close()
        await self.worker.close()

    async def serve(self, handler: Callable[..., Any], path: str = "a.b.c", **how: Any) -> Client:
        endpoint = self.worker.endpoint(path)
        self.serving.append(asyncio.create_task(endpoint.serve_endpoint(handler, **how)))
        client = await self.caller.endpoint(path).client()
        await client.wait_for_instances(PATIENCE_S)
        return client


class Seen:
    """A handler that yields until it is stopped, and keeps the contexts of its calls."""

    def __init__(self, *, heeds_stop: bool = True) -> None:
        self.contexts: list[Context] = []
        self.is_closed = asyncio.Event()
        self.has_ended = asyncio.Event()
        self._heeds_stop = heeds_stop

    async def generate(self, request: Any, context: Context) -> Any:
        self.contexts.append(context)
        try:
            number = 0
            while not (self._heeds_stop and context.is_stopped()):
                yield number
                number += 1
                await asyncio.sleep(0.002)
            yield "the end"
        except GeneratorExit:
            self.is_closed.set()
            raise
        finally:
            self.has_ended.set()

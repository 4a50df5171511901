"""A real frontend, and workers of the kit that register models with it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import httpx

from tandem.frontend.config import FrontendConfig
from tandem.frontend.serving.server import FrontendServer
from tandem.frontend.tokens.tokenizer import ModelText
from tandem.models.paths import BUNDLED_MODEL
from tandem.router.config import RouterConfig
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.membership.node import Node
from tandem.sdk import DistributedRuntime, Endpoint, LLMEngine
from tandem.sdk.engine.worker_config import WorkerConfig
from tests.sdk.engine.engine_stack import serving
from tests.services import eventually

Register = Callable[[Endpoint], Awaitable[None]]


class ModelStack:
    """The frontend, an HTTP client of it, and the workers that a test adds."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config.model_copy(update={"drain_timeout_s": 0.3})
        self.serving: dict[DistributedRuntime, list[asyncio.Task[None]]] = {}

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            node = Node(self.config, component="frontend", serves=False)
            await stack.enter_async_context(node)
            self.server = FrontendServer(
                FrontendConfig(port=0, return_wait_s=0), RouterConfig(), node
            )
            stack.push_async_callback(self.server.stop)
            await self.server.start()
            self.http = await stack.enter_async_context(
                httpx.AsyncClient(base_url=f"http://{self.server.address}", timeout=60)
            )
            self._exits = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        for runtime in list(self.serving):
            await self.stop(runtime)
        await self._exits.aclose()

    async def worker(
        self, path: str, register: Register, handler: Callable[..., Any]
    ) -> DistributedRuntime:
        """Start a worker of its own runtime: call `register`, and serve `handler`."""
        runtime = DistributedRuntime(self.config)
        await runtime.connect()
        await self.serve(runtime, path, register, handler)
        return runtime

    async def serve(
        self,
        runtime: DistributedRuntime,
        path: str,
        register: Register,
        handler: Callable[..., Any],
    ) -> None:
        """Serve one more endpoint of that runtime."""
        endpoint = runtime.endpoint(path)
        before = len(self.cards(runtime))
        await register(endpoint)
        task = asyncio.create_task(endpoint.serve_endpoint(handler))
        self.serving.setdefault(runtime, []).append(task)
        await eventually(lambda: len(self.cards(runtime)) > before)

    async def stop(self, runtime: DistributedRuntime) -> None:
        """Shut one runtime down."""
        runtime.shutdown()
        await asyncio.gather(*self.serving.pop(runtime))
        await runtime.close()

    def cards(self, runtime: DistributedRuntime) -> list[str]:
        """Return the models of this runtime in the frontend's catalog."""
        return [
            model.card.name
            for model in self.server.catalog.models
            if runtime.instance_id in model.instances
        ]

    async def listed(self) -> list[str]:
        """Return the models of /v1/models."""
        answer = (await self.http.get("/v1/models")).json()
        return [each["id"] for each in answer["data"]]

    async def chat(self, model: str, **fields: Any) -> dict[str, Any]:
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}]} | fields
        answer: dict[str, Any] = (await self.http.post("/v1/chat/completions", json=body)).json()
        return answer

    async def complete(self, model: str, **fields: Any) -> dict[str, Any]:
        body = {"model": model, "prompt": "Hi"} | fields
        answer: dict[str, Any] = (await self.http.post("/v1/completions", json=body)).json()
        return answer


@asynccontextmanager
async def with_engine(
    engine: LLMEngine, config: WorkerConfig, cluster: RuntimeConfig
) -> AsyncIterator[ModelStack]:
    """A frontend that has the model of an engine."""
    async with ModelStack(cluster) as stack, serving(engine, config, cluster) as worker:
        await eventually(lambda: bool(stack.cards(worker.runtime)))
        yield stack


def bundled_tokens(text: str) -> list[int]:
    """Return the tokens of a text by the bundled model's tokenizer."""
    names = ("tokenizer.json", "tokenizer_config.json")
    model_text = ModelText({name: (BUNDLED_MODEL / name).read_bytes() for name in names})
    return model_text.encode(text, is_chat=True)


def template(folder: Path) -> Path:
    """Write a chat template that differs from the bundled model's."""
    path = folder / "own.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return path

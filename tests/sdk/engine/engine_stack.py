"""Engines and their workers for tests: run in this process, against real NATS and etcd."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Self

from tandem.runtime.config import RuntimeConfig
from tandem.sdk.engine.llm_engine import LLMEngine
from tandem.sdk.engine.metrics import SnapshotPublisher
from tandem.sdk.engine.types import EngineConfig, GenerateChunk, GenerateRequest
from tandem.sdk.engine.worker_config import WorkerConfig
from tandem.sdk.engine_worker.worker import EngineWorker
from tandem.sdk.worker.client import Client
from tandem.sdk.worker.context import Context
from tandem.sdk.worker.distributed_runtime import DistributedRuntime

PATIENCE_S = 60.0
Chunks = AsyncGenerator[GenerateChunk, None]


class ToyEngine(LLMEngine):
    """Records its calls; between its two tokens it waits while `may_go_on` is clear."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.requests: list[GenerateRequest] = []
        self.is_waiting = asyncio.Event()  # a request stands in the middle of its answer
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.aborted: list[str] = []

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        return cls(), config_of()

    async def start(self, worker_id: int) -> EngineConfig:
        assert 0 <= worker_id < 2**63
        self.calls.append("start")
        return EngineConfig(model="tandem-tiny", served_model_name="toy", total_kv_blocks=8)

    async def generate(self, request: GenerateRequest, context: Context) -> Chunks:
        self.requests.append(request)
        yield {"token_ids": [1], "index": 0}
        if not self.may_go_on.is_set():
            self.is_waiting.set()
            ended = asyncio.create_task(context.async_killed_or_stopped())
            going_on = asyncio.create_task(self.may_go_on.wait())
            try:
                await asyncio.wait({ended, going_on}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                ended.cancel()
                going_on.cancel()
                self.calls.append("generate over")
        reason = "cancelled" if context.is_stopped() else "stop"
        yield {"token_ids": [2], "index": 0, "finish_reason": reason}

    async def abort(self, context: Context) -> None:
        self.aborted.append(context.id())

    async def drain(self) -> None:
        self.calls.append("drain")

    async def cleanup(self) -> None:
        self.calls.append("cleanup")


class Publishing(ToyEngine):
    """Has a publisher of snapshots for its one rank."""

    publisher: SnapshotPublisher

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: SnapshotPublisher) -> None:
        self.publisher = publisher


def config_of(**fields: Any) -> WorkerConfig:
    return WorkerConfig(**{"namespace": "pipe", "model_name": "tandem-tiny"} | fields)


@contextlib.asynccontextmanager
async def serving(
    engine: LLMEngine, config: WorkerConfig, runtime_config: RuntimeConfig
) -> AsyncIterator[EngineWorker]:
    """Run the engine's worker, in discovery; shut it down at the end if it still runs."""
    worker = EngineWorker(engine, config, runtime_config)
    running = asyncio.create_task(worker.run())
    async with client_of(worker) as client:
        await client.wait_for_instances(PATIENCE_S)
    try:
        yield worker
    finally:
        worker.shutdown()
        async with asyncio.timeout(PATIENCE_S):
            await running


@contextlib.asynccontextmanager
async def client_of(worker: EngineWorker) -> AsyncIterator[Client]:
    """Yield a client of the worker's endpoint on its cluster."""
    async with DistributedRuntime(worker.runtime.config) as runtime:
        client = await runtime.endpoint(str(worker.address)).client()
        try:
            yield client
        finally:
            await client.close()


async def begun(engine: ToyEngine, client: Client, request: Any) -> asyncio.Task[list[Any]]:
    """Return the reading of an answer in whose middle the engine waits."""
    asking = asyncio.create_task(answer_of(client, request))
    await asyncio.wait_for(engine.is_waiting.wait(), PATIENCE_S)
    return asking


async def answer_of(client: Client, request: Any, context: Context | None = None) -> list[Any]:
    """Return all items of one answer."""
    return [item async for item in await client.generate(request, False, context)]

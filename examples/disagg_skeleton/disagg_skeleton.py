"""Prefill and decode on separate workers, without a GPU: a real queue and real KV transfers.

    tandem run disagg_skeleton:DecodeWorker --PrefillWorker.ServiceArgs.workers=2
    python client.py "the quick brown fox jumps"      # in another terminal

Only the engines are fake. The KV of a word is its letters, eight bytes per block. Decoding reads
the letters back in capitals, so an answer is right only if its KV is in the right blocks.

1. DecodeWorker takes a request and reserves blocks of its cache for it.
2. It prefills a short prompt itself. It puts a longer one on a JetStream queue, and the next free
   PrefillWorker pulls it.
3. PrefillWorker computes the KV in its own blocks and writes them into those of the decode worker,
   which gets a notification after the data.
4. DecodeWorker decodes. If the KV does not arrive in time, it prefills the prompt itself.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import nats.errors
import numpy as np
from nats.js.api import RetentionPolicy, StreamConfig
from numpy.typing import NDArray
from pydantic import BaseModel

from tandem.sdk import async_on_start, depends, dynamo_context, endpoint, on_shutdown, service
from tandem.sdk.nixl import NixlConnector

NAMESPACE = "disagg-skeleton"
STREAM, SUBJECT, GROUP = "disagg-skeleton", "disagg-skeleton.prefill", "prefill"
NUM_BLOCKS, BLOCK_BYTES = 256, 8

logger = logging.getLogger(__name__)


class Words(BaseModel):
    """The request of a client."""

    text: str


class RemotePrefillRequest(msgspec.Struct, frozen=True):
    """An entry of the queue: the words to compute, and the destination blocks."""

    request_id: str
    engine_id: str
    words: list[str]
    block_ids: list[int]


class KvCache:
    """The blocks of one worker; a word takes one."""

    def __init__(self, engine_id: str) -> None:
        self.blocks: NDArray[np.uint8] = np.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self.free = list(range(NUM_BLOCKS))
        self.connector = NixlConnector(engine_id)
        self.connector.register_kv_caches(self.blocks)

    def allocate(self, num_blocks: int) -> list[int]:
        if num_blocks > len(self.free):
            raise ValueError(f"{num_blocks} blocks are needed, {len(self.free)} are free")
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        return taken

    def prefill(self, words: list[str], block_ids: list[int]) -> None:
        """Run the fake engine's forward pass."""
        for word, block_id in zip(words, block_ids, strict=True):
            letters = word.encode()[:BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0")
            self.blocks[block_id] = np.frombuffer(letters, dtype=np.uint8)

    def decode(self, block_id: int) -> str:
        """Run the fake engine's step, from the KV alone."""
        letters: bytes = self.blocks[block_id].tobytes()
        return letters.rstrip(b"\0").decode(errors="replace").upper()


async def open_queue(runtime: Any) -> Any:
    """Return JetStream; create the stream of this example if it is missing."""
    jetstream = runtime.nats.client.jetstream()
    config = StreamConfig(STREAM, subjects=[SUBJECT], retention=RetentionPolicy.WORK_QUEUE)
    await jetstream.add_stream(config)
    return jetstream


@service(dynamo={"namespace": NAMESPACE}, workers=1)
class PrefillWorker:
    """A worker that pulls prompts from the queue; it has no endpoint."""

    @async_on_start
    async def start(self) -> None:
        self.runtime = dynamo_context["runtime"]
        self.cache = KvCache(dynamo_context["instance_id"])
        self.known: set[str] = set()
        self.decode_workers = await self.runtime.endpoint(
            f"{NAMESPACE}.DecodeWorker.kv_metadata"
        ).client()
        jetstream = await open_queue(self.runtime)
        self.queue = await jetstream.pull_subscribe(SUBJECT, durable=GROUP)
        self.pulling = asyncio.create_task(self.pull())

    async def pull(self) -> None:
        while True:
            try:
                (message,) = await self.queue.fetch(1, timeout=5)
            except (TimeoutError, nats.errors.TimeoutError):
                continue
            request = msgspec.json.decode(message.data, type=RemotePrefillRequest)
            try:
                await self.prefill(request)
            except Exception:  # the decode worker prefills the prompt after its timeout
                logger.exception("request %s was not prefilled", request.request_id)
            await message.ack()

    async def prefill(self, request: RemotePrefillRequest) -> None:
        await self.connect(request.engine_id)
        mine = self.cache.allocate(len(request.words))
        try:
            self.cache.prefill(request.words, mine)
            await self.cache.connector.write_blocks(
                mine, request.block_ids, request.request_id, engine_id=request.engine_id
            )
        finally:
            self.cache.free += mine
        logger.info("prefilled %s for %s", request.request_id, request.engine_id)

    async def connect(self, engine_id: str) -> None:
        """Fetch the location of a decode worker's blocks, once per worker."""
        if engine_id not in self.known:
            await self.decode_workers.wait_for_instances(timeout_s=5)  # it may just be starting
            answer = await self.decode_workers.direct(None, engine_id, annotated=False)
            async for metadata, block_descs in answer:
                self.cache.connector.add_remote_agent(engine_id, metadata, block_descs)
            self.known.add(engine_id)

    @on_shutdown
    async def stop(self) -> None:
        self.pulling.cancel()
        await asyncio.wait([self.pulling])
        self.cache.connector.close()


class DecodeSettings(BaseModel):
    """The settings of `--DecodeWorker.key=value`."""

    max_local_prefill_length: int = 3  # words
    prefill_timeout_s: float = 5.0


@service(dynamo={"namespace": NAMESPACE}, settings=DecodeSettings)
class DecodeWorker:
    """The entry for clients."""

    prefill_worker = depends(PrefillWorker)  # `tandem run` starts it as well

    @async_on_start
    async def start(self) -> None:
        self.settings: DecodeSettings = dynamo_context["config"]
        self.engine_id: str = dynamo_context["instance_id"]
        self.cache = KvCache(self.engine_id)
        self.landed: dict[str, asyncio.Event] = {}
        self.late: dict[str, list[int]] = {}
        self.queue = await open_queue(dynamo_context["runtime"])
        self.listening = asyncio.create_task(self.listen())

    @endpoint()
    async def kv_metadata(self, request: None) -> AsyncIterator[tuple[bytes, bytes]]:
        """Yield the metadata by which prefill workers reach this worker's blocks."""
        yield self.cache.connector.get_agent_metadata()

    @endpoint()
    async def generate(self, request: Words) -> AsyncIterator[dict[str, str]]:
        words = request.text.split()
        block_ids = self.cache.allocate(len(words))
        place = "local"
        if len(words) > self.settings.max_local_prefill_length:
            if await self.prefill_remotely(words, block_ids):
                place = "remote"
            else:
                block_ids = self.cache.allocate(len(words))
        try:
            if place == "local":
                self.cache.prefill(words, block_ids)
            for block_id in block_ids:
                yield {"word": self.cache.decode(block_id), "prefill": place}
        finally:
            self.cache.free += block_ids

    async def prefill_remotely(self, words: list[str], block_ids: list[int]) -> bool:
        """Return False after a timeout. The blocks are then freed when the KV has arrived."""
        request_id = uuid.uuid4().hex
        landed = self.landed[request_id] = asyncio.Event()
        job = RemotePrefillRequest(request_id, self.engine_id, words, block_ids)
        try:
            async with asyncio.timeout(self.settings.prefill_timeout_s):
                await self.queue.publish(SUBJECT, msgspec.json.encode(job))
                await landed.wait()
            return True
        except (TimeoutError, nats.errors.Error):
            return False
        finally:
            del self.landed[request_id]
            if not landed.is_set():
                self.late[request_id] = block_ids

    async def listen(self) -> None:
        """Poll for notifications."""
        while True:
            for messages in self.cache.connector.get_new_notifs().values():
                for request_id in map(bytes.decode, messages):
                    if (landed := self.landed.get(request_id)) is not None:
                        landed.set()
                    self.cache.free += self.late.pop(request_id, [])
            await asyncio.sleep(0.001)

    @on_shutdown
    async def stop(self) -> None:
        self.listening.cancel()
        await asyncio.wait([self.listening])
        self.cache.connector.close()

"""Handoffs of served processes: two topologies in turns, one that streams by layers, one not.

Every prompt is prefilled remotely, one request at a time, in turns. The figures come from the
workers' own timelines.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tandem.bench.client.openai import OpenAIClient, PreparedRequest
from tandem.bench.client.record import RequestRecord
from tandem.bench.client.wire import BodyBuilder
from tandem.bench.load.workload import token_ids
from tandem.bench.stack.near_zero import write_near_zero_model
from tandem.bench.stack.served_stack import ServedStack, served
from tandem.models.random_model import ModelShape
from tandem.runtime.errors import ServiceError
from tandem.runtime.tracing.timeline import course

# Little to compute for much KV: 2 KiB per token, and 32k tokens take seconds on one core.
SHAPE = ModelShape(
    hidden_size=64,
    num_layers=4,
    num_heads=1,
    num_kv_heads=1,
    head_dim=64,
    intermediate_size=64,
    max_position_embeddings=40_960,
)
BLOCK_TOKENS = 16
CHUNK_TOKENS = 2048  # of one step
BLOCK_BYTES = SHAPE.num_layers * 2 * SHAPE.num_kv_heads * BLOCK_TOKENS * SHAPE.head_dim * 4
OUTPUT_TOKENS = 6
HEADERS = {"x-tandem-timeline": "true", "x-tandem-prefill": "remote"}
WARMUP_TIMEOUT_S = 30.0
FLAGS = (
    "--disagg.policy=always_remote",
    "--disagg.claim_timeout_ms=30000",  # a busy machine delays a figure and does not lose it
    f"--engine.max_num_batched_tokens={CHUNK_TOKENS}",
    f"--engine.block_size={BLOCK_TOKENS}",
)

Streaming = Literal["by layers", "whole"]
STREAMING: tuple[Streaming, ...] = get_args(Streaming)


@dataclass(frozen=True, slots=True)
class Course:
    """One request: its stages, in ms since its decode worker received it; its client's times."""

    num_tokens: int
    stages_ms: Mapping[str, float]
    ttft_ms: float
    step_ms: float  # a decode step, by the client's later tokens; 0: not known

    def between(self, begin: str, end: str) -> float:
        """Return the milliseconds from one stage to another; 0 when the end came first."""
        return max(0.0, self.stages_ms[end] - self.stages_ms[begin])

    @property
    def handover_ms(self) -> float:
        """From the prompt's last KV until it was proven at the decode worker."""
        return self.between("computed", "verified")

    @property
    def second_token_ms(self) -> float:
        """From the prompt's last KV until the first decode step was over, and its token sent."""
        return self.between("computed", "first_step")


def last_chunk_tokens(num_tokens: int) -> int:
    """Return the tokens of a prompt's last step, whose KV can't have left before."""
    return (num_tokens - 1) % CHUNK_TOKENS + 1


class Topology:
    """A topology under measurement."""

    def __init__(self, streaming: Streaming, stack: ServedStack, seed: str) -> None:
        self.streaming = streaming
        self.stack = stack
        self._seed = seed
        self._num_sent = 0
        self._client = OpenAIClient(stack.url, headers=HEADERS, timeout_s=120.0)
        self._body: BodyBuilder | None = None

    async def ask(self, num_tokens: int) -> Course:
        """Send a new prompt. Raises ServiceError unless it was handed off."""
        if self._body is None:
            (model, *_) = await self._client.served_models()
            self._body = BodyBuilder(model.id)
        self._num_sent += 1
        prompt = token_ids(
            f"{self._seed}/{self.streaming}/{self._num_sent}", num_tokens, SHAPE.vocab_size
        )
        request = PreparedRequest(self._body.encode(prompt, OUTPUT_TOKENS), OUTPUT_TOKENS)
        record = RequestRecord(self._num_sent, 0.0)
        await self._client.send(request, record, time.perf_counter())
        if record.error or course(record.timeline_ms) != "remote" or record.ttft_s is None:
            what = record.error_message or f"it went {course(record.timeline_ms)}"
            raise ServiceError(f"a prompt of {num_tokens} tokens gives no figure: {what}")
        times_s = record.output_times_s
        step_s = 0.0
        if len(times_s) > 2:  # the first gap holds the handover
            step_s = (times_s[-1] - times_s[1]) / (OUTPUT_TOKENS - 2)
        return Course(num_tokens, record.timeline_ms, record.ttft_s * 1e3, step_s * 1e3)

    async def warm_up(self) -> None:
        """Send prompts until one is handed off: roles learn of one another after the launcher."""
        async with asyncio.timeout(WARMUP_TIMEOUT_S):
            while True:
                with contextlib.suppress(ServiceError):
                    await self.ask(CHUNK_TOKENS)
                    return
                await asyncio.sleep(0.1)

    async def decode_share(self, until: Coroutine[Any, Any, object]) -> float:
        """Return the decode worker's share of a core until the end of `until`."""
        before, started_at = self.stack.cpu_s()["decode"], time.perf_counter()
        await until
        return (self.stack.cpu_s()["decode"] - before) / (time.perf_counter() - started_at)

    def close(self) -> None:
        self._client.close()


@contextlib.asynccontextmanager
async def both_topologies(
    run_dir: Path, streamings: Sequence[Streaming] = STREAMING
) -> AsyncIterator[dict[Streaming, Topology]]:
    """Run topologies of one prefill and one decode worker; one streams by layers, one not."""
    model = run_dir / "model"
    write_near_zero_model(model, SHAPE)
    async with contextlib.AsyncExitStack() as stack:
        topologies: dict[Streaming, Topology] = {}
        for streaming in streamings:
            folder = run_dir / streaming.replace(" ", "-")
            flags = [*FLAGS, f"--transfer.stream_layers={str(streaming == 'by layers').lower()}"]
            running = await stack.enter_async_context(served(model, "disagg-1p1d", flags, folder))
            topologies[streaming] = Topology(streaming, running, run_dir.name)
            stack.callback(topologies[streaming].close)
            await topologies[streaming].warm_up()
        yield topologies


async def in_turns(
    topologies: Mapping[Streaming, Topology], num_tokens: int, count: int
) -> dict[Streaming, list[Course]]:
    """Send `count` requests to each topology, alternately."""
    courses: dict[Streaming, list[Course]] = {streaming: [] for streaming in topologies}
    for index in range(count):
        order = list(topologies.items())
        for streaming, topology in order if index % 2 else reversed(order):
            courses[streaming].append(await topology.ask(num_tokens))
    return courses


async def share_while_waiting(
    topology: Topology, num_tokens: int, duration_s: float
) -> tuple[float, Course]:
    """Return the decode worker's share of a core while a long prompt is computed for it.

    It is measured for `duration_s` seconds, or until the prompt is there.
    """
    asking = asyncio.create_task(topology.ask(num_tokens))
    share = await topology.decode_share(asyncio.wait([asking], timeout=duration_s))
    return share, await asking

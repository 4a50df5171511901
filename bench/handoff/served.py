"""Handoffs of served processes: two topologies side by side, one that streams by layers, one not.

Every prompt is prefilled remotely, one request at a time, in turns. What the workers say of their
own course is what is measured.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tandem.bench.load.client import OpenAIClient, PreparedRequest
from tandem.bench.load.metrics import RequestRecord
from tandem.bench.load.openai_wire import BodyBuilder
from tandem.bench.load.workload import token_ids
from tandem.bench.stack.near_zero import write_near_zero_model
from tandem.bench.stack.served_stack import ServedStack, served
from tandem.models.random_model import ModelShape
from tandem.runtime.errors import ServiceError
from tandem.runtime.timeline import course

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
FLAGS = (
    "--disagg.policy=always_remote",
    f"--engine.max_num_batched_tokens={CHUNK_TOKENS}",
    f"--engine.block_size={BLOCK_TOKENS}",
)

Way = Literal["by layers", "whole"]
WAYS: tuple[Way, ...] = get_args(Way)


@dataclass(frozen=True, slots=True)
class Course:
    """One request: its stages, in ms since its decode worker received it; what its client saw."""

    num_tokens: int
    stages_ms: Mapping[str, float]
    ttft_ms: float
    step_ms: float  # a decode step, by the client's later tokens; 0: not known

    def between(self, begin: str, end: str) -> float:
        """Milliseconds from one stage to another; 0 when the end came first."""
        return max(0.0, self.stages_ms[end] - self.stages_ms[begin])

    @property
    def exposed_ms(self) -> float:
        """From the prompt's last KV until all of it had landed."""
        return self.between("computed", "landed")

    @property
    def handover_ms(self) -> float:
        """From the prompt's last KV until it was proven at the decode worker."""
        return self.between("computed", "verified")

    @property
    def second_token_ms(self) -> float:
        """From the prompt's last KV until the first decode step was over, and its token sent."""
        return self.between("computed", "first_step")


def last_chunk_tokens(num_tokens: int) -> int:
    """Tokens of the last step of a prompt, whose KV can't have left before."""
    return (num_tokens - 1) % CHUNK_TOKENS + 1


class Side:
    """One topology under measurement."""

    def __init__(self, way: Way, stack: ServedStack, seed: str) -> None:
        self.way = way
        self.stack = stack
        self._seed = seed
        self._num_sent = 0
        self._client = OpenAIClient(stack.url, headers=HEADERS, timeout_s=120.0)
        self._body: BodyBuilder | None = None

    async def ask(self, num_tokens: int) -> Course:
        """Send a prompt that was never sent before. ServiceError unless it went by a handoff."""
        if self._body is None:
            (model, *_) = await self._client.list_models()
            self._body = BodyBuilder(model, "completions", True, ignore_eos=True, temperature=0.0)
        self._num_sent += 1
        prompt = token_ids(
            f"{self._seed}/{self.way}/{self._num_sent}", num_tokens, SHAPE.vocab_size
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

    async def resting_share(self, duration_s: float) -> float:
        """The share of a core that the decode worker takes in the next `duration_s` seconds."""
        before, started_at = self.stack.cpu_s()["decode"], time.perf_counter()
        await asyncio.sleep(duration_s)
        return (self.stack.cpu_s()["decode"] - before) / (time.perf_counter() - started_at)

    def close(self) -> None:
        self._client.close()


@contextlib.asynccontextmanager
async def both_sides(run_dir: Path, ways: Sequence[Way] = WAYS) -> AsyncIterator[dict[Way, Side]]:
    """Topologies of one prefill and one decode worker that differ in their way of streaming."""
    model = run_dir / "model"
    write_near_zero_model(model, SHAPE)
    async with contextlib.AsyncExitStack() as stack:
        sides: dict[Way, Side] = {}
        for way in ways:
            folder = run_dir / way.replace(" ", "-")
            folder.mkdir()
            flags = [*FLAGS, f"--transfer.stream_layers={str(way == 'by layers').lower()}"]
            running = await stack.enter_async_context(served(model, "disagg-1p1d", flags, folder))
            sides[way] = Side(way, running, run_dir.name)
            stack.callback(sides[way].close)
        yield sides


async def in_turns(
    sides: Mapping[Way, Side], num_tokens: int, count: int
) -> dict[Way, list[Course]]:
    """`count` requests to each side, alternately."""
    courses: dict[Way, list[Course]] = {way: [] for way in sides}
    for index in range(count):
        order = list(sides.items())
        for way, side in order if index % 2 else reversed(order):
            courses[way].append(await side.ask(num_tokens))
    return courses


async def share_while_waiting(
    side: Side, num_tokens: int, duration_s: float
) -> tuple[float, Course]:
    """The decode worker's share of a core while another computes a long prompt for it.

    At most over `duration_s` seconds, and less if the prompt is there sooner.
    """
    asking = asyncio.create_task(side.ask(num_tokens))
    before, started_at = side.stack.cpu_s()["decode"], time.perf_counter()
    await asyncio.wait([asking], timeout=duration_s)
    share = (side.stack.cpu_s()["decode"] - before) / (time.perf_counter() - started_at)
    return share, await asking

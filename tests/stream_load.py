"""Callers that stream answers all the time, each compared with its undisturbed reference."""

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.services import eventually

NUM_PROMPTS = 12
PROMPT_TOKENS = (40, 200)
RETRY_S = 0.1
PAUSE_S = 0.1  # of a caller between answers: workers that start need the processor, too
TIMEOUT_S = 90.0


@dataclass
class Record:
    """What became of the requests, and how long their tokens kept a caller waiting."""

    num_right: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # no connection, 503, or broken off
    num_remote: int = 0  # answers whose prompt another worker computed
    why_local: Counter[str] = field(default_factory=Counter)  # reasons of the others
    pauses_s: list[float] = field(default_factory=list)  # the longest one of each answer

    def judge(self, what: str) -> None:
        """Print the figures. Fail unless every request had an answer, and a right one."""
        pauses_s = sorted(self.pauses_s)
        print(
            f"{what}: {self.num_right} right, {self.num_remote} of them prefilled elsewhere, "
            f"the others for {dict(self.why_local)}, "
            f"{len(self.wrong)} wrong, {len(self.failed)} failed; longest "
            f"pause of an answer {pauses_s[-1]:.2f} s, median {pauses_s[len(pauses_s) // 2]:.2f} s"
        )
        assert self.num_right > 0
        assert not self.wrong, self.wrong[:2]
        assert not self.failed, self.failed[:2]


class StreamLoad:
    """Requests to the frontend whose address `url` returns now."""

    def __init__(self, url: Callable[[], str | None], model: str, max_tokens: int = 32) -> None:
        self._url, self._model, self._max_tokens = url, model, max_tokens
        draw = random.Random(38)
        self._prompts = [
            [draw.randrange(3, 300) for _ in range(draw.randint(*PROMPT_TOKENS))]
            for _ in range(NUM_PROMPTS)
        ]
        self._references: list[str] = []
        self._http: aiohttp.ClientSession

    async def __aenter__(self) -> "StreamLoad":
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def take_references(self) -> None:
        """Answer every prompt once, undisturbed."""
        record = Record()
        self._references = [await self._ask(index, record) for index in range(NUM_PROMPTS)]
        assert len(set(self._references)) > NUM_PROMPTS // 2, "answers must tell prompts apart"

    async def first_answer_s(self) -> float:
        """Return the time until an answer comes whole; requests that fail are sent again (s)."""
        begun_s = time.perf_counter()

        async def answers() -> bool:
            try:
                await self._ask(0, Record())
            except (aiohttp.ClientError, ConnectionError, TimeoutError):
                return False
            return True

        await eventually(answers, timeout_s=TIMEOUT_S, pause_s=RETRY_S)
        return time.perf_counter() - begun_s

    @asynccontextmanager
    async def running(
        self, num_callers: int = 3, *, hangs_up: bool = False
    ) -> AsyncIterator[Record]:
        """Ask all the time while the body runs, then finish; the record is whole at the end.

        `hangs_up`: requests are given up at the end; a host that is lost does not end them.
        """
        record, stop = Record(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            callers = [
                group.create_task(self._keep_asking(caller, record, stop))
                for caller in range(num_callers)
            ]
            try:
                await eventually(lambda: record.num_right >= num_callers)
                yield record
            finally:
                stop.set()
                for caller in callers if hangs_up else ():
                    caller.cancel()

    async def _keep_asking(self, caller: int, record: Record, stop: asyncio.Event) -> None:
        draw = random.Random(caller)
        while not stop.is_set():
            index = draw.randrange(NUM_PROMPTS)
            try:
                text = await self._ask(index, record)
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                record.failed.append(repr(error))
                await asyncio.sleep(RETRY_S)
            else:
                reference = self._references[index]
                if text == reference:
                    record.num_right += 1
                else:
                    record.wrong.append(f"{text!r} in place of {reference!r}")
                await asyncio.sleep(PAUSE_S)

    async def _ask(self, index: int, record: Record) -> str:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": self._prompts[index],
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "cache_salt": f"{time.monotonic_ns()}",  # each prompt is computed anew
        }
        parts: list[str] = []
        pause_s, last_s = 0.0, time.perf_counter()
        async with self._http.post(f"{self._url()}/v1/completions", json=body) as response:
            if response.status != 200:
                raise ConnectionError(f"{response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    record.pauses_s.append(pause_s)
                    if response.headers["x-tandem-prefill"] == "remote":
                        record.num_remote += 1
                    else:
                        reason = response.headers["x-tandem-prefill-reason"]
                        record.why_local[re.sub(r"\d+", "N", reason)] += 1
                    return "".join(parts)
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ConnectionError(str(event["error"]))
                    now_s = time.perf_counter()
                    pause_s, last_s = max(pause_s, now_s - last_s), now_s
                    parts += [choice["text"] for choice in event["choices"]]
        raise ConnectionError("the stream broke off")


@asynccontextmanager
async def ready_load(url: Callable[[], str | None], model: str) -> AsyncIterator[StreamLoad]:
    """Callers of a cluster that answers, with the references of their answers."""
    async with StreamLoad(url, model) as load:
        print(f"first answer after {await load.first_answer_s():.2f} s")
        await load.take_references()
        yield load

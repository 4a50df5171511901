"""Whole clusters of emulated workers, by `tandem serve`: every answer is judged."""

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from tandem.bench.stack.served_stack import served
from tests.emulation.harness import VOCAB_SIZE, is_true

NUM_REQUESTS, NUM_CALLERS, NUM_TOKENS, BLOCK_SIZE = 90, 9, 40, 64
FLAGS = (
    *("--engine.emulate=h100/llama-3.1-8b", "--workers=3", "--runtime.pace=2"),
    *("--disagg.policy=threshold", "--disagg.max_local_prefill_length=1000"),
)


def has_torch(process: psutil.Process) -> bool:
    return any("libtorch" in each.path for each in process.memory_maps())


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_answers_are_true_where_they_were_handed_over_and_when_their_worker_is_killed(
    tmp_path: Path,
) -> None:
    rng, places, wrong, num_done, num_cached = random.Random(7), Counter[str](), 0, 0, 0
    turns: list[list[int]] = []  # prompts with their answers
    async with (
        served(Path("bundled"), None, FLAGS, tmp_path / "run") as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=120) as client,
    ):
        assert not any(map(has_torch, stack.processes["decode"]))
        (model,) = (await client.get("/v1/models")).json()["data"]

        async def ask(seed: int) -> None:
            nonlocal wrong, num_done, num_cached
            earlier = rng.choice(turns) if turns and rng.random() < 0.4 else []
            num_new = rng.choice((200, 900, 1500, 4000))
            prompt = earlier + rng.choices(range(3, VOCAB_SIZE), k=num_new)
            body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "seed": seed, "model": model["id"]}
            answer = await client.post("/v1/completions", json=body | {"return_token_ids": True})
            assert answer.status_code == 200, answer.text
            token_ids = answer.json()["choices"][0]["token_ids"]
            assert len(token_ids) == NUM_TOKENS
            turns.append(prompt + token_ids)
            wrong += not is_true(turns[-1], len(prompt), seed, BLOCK_SIZE)
            num_cached += answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            places[answer.headers["x-tandem-prefill"]] += 1
            num_done += 1
            if num_done == NUM_REQUESTS // 3:
                os.kill(stack.processes["decode"][0].pid, signal.SIGKILL)

        async def call(first: int) -> None:
            for seed in range(first, NUM_REQUESTS, NUM_CALLERS):
                await ask(seed + 1)

        async with asyncio.TaskGroup() as callers:
            for first in range(NUM_CALLERS):
                callers.create_task(call(first))
    assert wrong == 0 and num_done == NUM_REQUESTS
    assert min(places["local"], places["remote"]) >= NUM_REQUESTS // 10
    assert num_cached > 0

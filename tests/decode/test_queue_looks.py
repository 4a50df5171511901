"""A decode worker looks at the queue often only while its depth may decide something."""

import asyncio
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from tandem.runtime.config import RuntimeConfig
from tests.decode.prefill_peer import PROMPT, Stage
from tests.handoff_peer import fresh_prompt
from tests.services import eventually


@pytest.fixture
def idle_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.decode.worker.LOOK_INTERVAL_S", 0.02)
    monkeypatch.setattr("tandem.decode.worker.IDLE_LOOK_INTERVAL_S", 3600.0)


@pytest.mark.usefixtures("idle_for_ever")
async def test_a_request_that_may_go_to_the_queue_begins_the_looks_and_its_end_ends_them(
    runtime_config: RuntimeConfig, tiny_model: Path
) -> None:
    async with Stage(runtime_config, tiny_model) as stage:
        depth = AsyncMock(wraps=stage.worker.queue.depth)
        stage.worker.queue.depth = depth  # type: ignore[method-assign]
        answer = await stage.ask(PROMPT)
        await eventually(lambda: depth.await_count >= 3)
        await stage.deliver(await stage.claimed())
        assert await answer.whole() == stage.undisturbed(PROMPT)
        await stage.balanced()
        await eventually(lambda: is_quiet(depth))


@pytest.mark.usefixtures("idle_for_ever")
async def test_requests_whose_prompts_stay_here_begin_no_look(
    runtime_config: RuntimeConfig, tiny_model: Path
) -> None:
    async with Stage(runtime_config, tiny_model, policy="always_local") as stage:
        depth = AsyncMock(wraps=stage.worker.queue.depth)
        stage.worker.queue.depth = depth  # type: ignore[method-assign]
        await eventually(lambda: is_quiet(depth))
        num_looks = depth.await_count
        for seed in range(3):
            prompt = fresh_prompt(9, seed)
            assert await (await stage.ask(prompt)).whole() == stage.undisturbed(prompt)
        assert depth.await_count == num_looks


async def is_quiet(depth: AsyncMock) -> bool:
    """Return True when no look comes in several of their intervals."""
    num_looks = depth.await_count
    await asyncio.sleep(0.2)
    return depth.await_count == num_looks

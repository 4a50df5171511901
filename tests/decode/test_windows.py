"""Answers of a model whose last layer has a window, from prompts that were computed elsewhere."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tandem.runtime.config import RuntimeConfig
from tests.decode.prefill_peer import Stage
from tests.handoff_peer import fresh_prompt, write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")  # as the stage's


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stage(
    module_config: RuntimeConfig, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    async with Stage(
        module_config, write_tiny_model(tmp_path_factory.mktemp("model"), window=8)
    ) as running:
        yield running


async def test_an_answer_follows_from_the_blocks_that_it_reads(stage: Stage) -> None:
    prompt = fresh_prompt(43, seed=1)
    answer, work = await stage.handoff(prompt)
    # Ordinals are those of a table with two entries for each four tokens.
    assert [ordinal for ordinal, _ in work.grant.fill] == [*range(0, 22, 2), 17, 19, 21]
    await stage.deliver(work)
    assert await answer.whole() == stage.undisturbed(prompt)


async def test_a_cached_prefix_ends_with_a_window_and_nothing_else_of_it_is_read(
    stage: Stage,
) -> None:
    first = await stage.ask(fresh_prompt(43, seed=1))
    await stage.deliver(await stage.claimed())
    await first.whole()
    prompt = [*fresh_prompt(43, seed=1)[:40], 7, 8]
    again, work = await stage.handoff(prompt)
    cached = work.grant.cached_ordinals
    assert cached == sorted([*range(0, 20, 2), 17, 19])
    assert [ordinal for ordinal, _ in work.grant.fill] == [20, 21]
    answer = await stage.ask_for_prefix(work, cached)
    assert [ordinal for ordinal, _ in answer.blocks] == cached
    assert (await stage.ask_for_prefix(work, [1])).blocks == []
    await stage.deliver(work)
    assert await again.whole() == stage.undisturbed(prompt)

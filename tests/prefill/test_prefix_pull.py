"""Taking a prompt's prefix over from the decode worker that has it cached."""

import pytest

from tests.handoff_peer import BLOCK_SIZE
from tests.prefill.decode_peer import Stage, fresh_prompt

SLOW, FAST = 1.0, 1e-9  # seconds per token of computing
PROMPT = fresh_prompt(43)
NUM_CACHED = 10  # blocks


@pytest.fixture
async def warm_stage(stage: Stage) -> Stage:
    """The decode worker alone has the first 40 tokens of the prompt cached."""
    stage.undisturbed([*PROMPT[:40], 5, 6, 7], salt="")
    return stage


async def test_a_prefix_is_read_where_computing_it_takes_longer(warm_stage: Stage) -> None:
    warm_stage.worker._prompts.rate.s_per_token = SLOW
    offer = await warm_stage.offer(PROMPT)
    text = await warm_stage.text(offer)
    assert text.token_ids == warm_stage.undisturbed(PROMPT).token_ids
    assert offer.pulled == list(range(NUM_CACHED))
    assert offer.first is not None
    assert offer.first.num_cached_tokens == NUM_CACHED * BLOCK_SIZE
    assert "prefix_pulled" in offer.first.timeline_ms
    await warm_stage.balanced()


async def test_what_was_read_is_cached_and_is_not_read_again(warm_stage: Stage) -> None:
    warm_stage.worker._prompts.rate.s_per_token = SLOW
    await warm_stage.text(await warm_stage.offer(PROMPT))
    again = await warm_stage.offer([*PROMPT[:40], 8, 9])
    await warm_stage.text(again)
    assert again.pulled == [] and again.first is not None
    assert again.first.num_cached_tokens == NUM_CACHED * BLOCK_SIZE


async def test_a_prefix_is_computed_where_that_is_faster(warm_stage: Stage) -> None:
    warm_stage.worker._prompts.rate.s_per_token = FAST
    offer = await warm_stage.offer(PROMPT)
    await warm_stage.text(offer)
    assert offer.pulled == [] and offer.first is not None and offer.first.num_cached_tokens == 0


async def test_a_prefix_that_is_not_what_the_decode_worker_has_is_computed(
    warm_stage: Stage,
) -> None:
    """As when its blocks were taken by others while they were read."""
    warm_stage.worker._prompts.rate.s_per_token = SLOW
    offer = warm_stage.prepare(PROMPT)
    offer.spoils_pulls = 1
    await warm_stage.publish(offer)
    text = await warm_stage.text(offer)
    assert text.token_ids == warm_stage.undisturbed(PROMPT).token_ids
    assert offer.pulled and offer.first is not None and offer.first.num_cached_tokens == 0
    await warm_stage.balanced()

"""Taking a prompt's prefix over from the decode worker that has it cached."""

import pytest

from tandem.engine.core.engine import Engine
from tandem.prefill import prefix_pull
from tandem.runtime.errors import TransferError
from tandem.transfer.agents.group import TransferGroup
from tests.handoff_peer import BLOCK_SIZE, fresh_prompt
from tests.prefill.decode_peer import Stage
from tests.services import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")  # as the stage's

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


@pytest.mark.parametrize(("late_s", "num_kept"), [(0.0, 0), (3600.0, NUM_CACHED)])
async def test_blocks_of_a_read_that_failed_are_kept_while_it_may_still_land(
    warm_stage: Stage, monkeypatch: pytest.MonkeyPatch, late_s: float, num_kept: int
) -> None:
    async def read(*_: object) -> list[int]:
        raise TransferError("a transfer took more than 2.0 s")

    worker = warm_stage.worker
    worker._prompts.rate.s_per_token = SLOW
    monkeypatch.setattr(TransferGroup, "read", read)
    monkeypatch.setattr(prefix_pull, "LATE_BYTES_S", late_s)
    offer = await warm_stage.offer(PROMPT)
    text = await warm_stage.text(offer)
    assert text.token_ids == warm_stage.undisturbed(PROMPT).token_ids
    assert offer.pulled
    await eventually(lambda: not worker._jobs)
    await worker.loop.call(lambda engine: engine.check_invariants())
    await eventually(lambda: worker.engine.block_pool.num_held == num_kept)
    await worker.loop.call(free_all)


def free_all(engine: Engine) -> None:
    for name in list(engine.scheduler.pulls._pulls):
        engine.adopt_prefix(name, proven=False)

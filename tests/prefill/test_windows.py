"""Prompts of a model whose second layer has a window: what is handed over, and what is read."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.wire.handoff_messages import Claimed
from tests.handoff_peer import BLOCK_SIZE, MODEL, fresh_prompt, write_tiny_model
from tests.prefill.decode_peer import Stage

pytestmark = pytest.mark.asyncio(loop_scope="module")  # as the stage's

WINDOW = 8
PROMPT = fresh_prompt(43)
# (ordinal block, group) |-> 2 * ordinal block + group; the last query of 43 tokens sees 35 to 42.
FULL, WINDOWED = list(range(0, 22, 2)), [17, 19, 21]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stage(
    module_config: RuntimeConfig, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    async with Stage(
        module_config, write_tiny_model(tmp_path_factory.mktemp("model"), WINDOW)
    ) as running:
        assert running.peer.engine.block_pool.windows == (0, WINDOW)
        yield running


async def test_only_the_blocks_that_will_be_read_are_sent(stage: Stage) -> None:
    written = stage.worker.metrics._written_bytes.labels(MODEL)._value
    num_bytes_before = written.get()
    offer = await stage.offer(PROMPT)
    assert isinstance(offer.answer, Claimed)
    assert [ordinal for ordinal, _ in offer.answer.fill] == FULL + WINDOWED
    text = await stage.text(offer)
    assert text.token_ids == stage.undisturbed(PROMPT).token_ids
    num_bytes = len(FULL + WINDOWED) * stage.peer.group.layout.block_bytes
    assert written.get() - num_bytes_before == num_bytes


async def test_a_prefix_is_read_as_far_as_the_window_of_later_tokens_reaches(stage: Stage) -> None:
    stage.undisturbed([*PROMPT[:40], 5, 6, 7], salt="")
    stage.worker._prompts.rate.s_per_token = 1.0
    offer = await stage.offer(PROMPT)
    text = await stage.text(offer)
    assert text.token_ids == stage.undisturbed(PROMPT).token_ids
    assert offer.pulled == sorted(FULL[:10] + WINDOWED[:2])
    assert offer.first is not None and offer.first.num_cached_tokens == 10 * BLOCK_SIZE

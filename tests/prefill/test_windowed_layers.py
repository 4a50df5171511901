"""The last chunk of a prompt, layer by layer, where some of the layers have a window."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from msgspec import structs

from tandem.engine.schedule.sequence import LayerProgress
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.wire.handoff_messages import Claimed
from tandem.transfer.loopback import LoopbackFabric
from tests.handoff_peer import (
    BLOCK_SIZE,
    FREE_WRITES,
    MODEL,
    TRANSFER,
    fresh_prompt,
    write_tiny_model,
)
from tests.prefill.decode_peer import Offer, Stage
from tests.services import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")  # as the stage's

WINDOW = 8
LAYERS = "wwfwwfw"  # as in Gemma 3; a block has room for two layers
WINDOWS = (0, WINDOW, WINDOW, WINDOW)
LONG = fresh_prompt(43)  # two chunks; the last query sees 35 to 42, ordinal blocks 8 to 10
LAST = [8, 9, 10]


def entries(group: int, ordinals: list[int]) -> list[int]:
    """Entries of a block table, of which ordinal block i has four, one for each group."""
    return [4 * ordinal + group for ordinal in ordinals]


# Layers of blocks and the entries of the blocks, of each write of LONG: the full blocks of the
# first chunk, then one write per layer of the last. Group 3 has one layer, and room for another.
WHOLE, LOWER, UPPER = (0, 2), (0, 1), (1, 2)
WRITES = [
    (WHOLE, entries(0, list(range(8)))), (LOWER, entries(1, LAST)), (UPPER, entries(1, LAST)),
    (LOWER, entries(0, LAST)), (LOWER, entries(2, LAST)), (UPPER, entries(2, LAST)),
    (UPPER, entries(0, LAST)), (WHOLE, entries(3, LAST)),
]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stage(
    module_config: RuntimeConfig, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    model = write_tiny_model(tmp_path_factory.mktemp("model"), WINDOW, LAYERS)
    # Tests hold writes, and a ticket that came again would be settled twice.
    transfer = TRANSFER.model_copy(update={"write_timeout_s": 60.0})
    async with Stage(module_config, model, transfer=transfer, ack_wait_s=60.0) as running:
        assert running.peer.engine.block_pool.windows == WINDOWS
        running.rates = FREE_WRITES
        yield running


def writes(stage: Stage, offer: Offer) -> list[tuple[tuple[int, int], list[int]]]:
    return [
        ((notice.layers.start, notice.layers.stop), [ordinal for ordinal, _ in notice.blocks])
        for notice in stage.landed(offer)
    ]


@asynccontextmanager
async def stopped_at(stage: Stage, num_layers: int) -> AsyncIterator[asyncio.Event]:
    """Within, the engine waits once so many layers are there; the event says that it does."""
    engine, loop = stage.worker.engine, asyncio.get_running_loop()
    gate, reached, announce = threading.Event(), asyncio.Event(), engine.on_layers
    assert announce is not None

    def announce_and_wait(progress: list[LayerProgress]) -> None:
        announce(progress)
        if progress[0].num_layers == num_layers:
            loop.call_soon_threadsafe(reached.set)
            gate.wait(60)

    engine.on_layers = announce_and_wait
    try:
        yield reached
    finally:
        engine.on_layers = announce
        gate.set()


async def test_each_layer_goes_when_it_is_there_and_only_blocks_that_will_be_read_go(
    stage: Stage,
) -> None:
    written = stage.worker.metrics._written_bytes.labels(MODEL)._value
    for num_layers in range(1, len(LAYERS)):
        prompt, num_bytes_before = fresh_prompt(len(LONG), seed=num_layers), written.get()
        async with stopped_at(stage, num_layers) as reached:
            offer = await stage.offer(prompt)
            await reached.wait()
            # Everything that is announced arrives, although no further layer is computed.
            await eventually(lambda offer=offer, n=num_layers: len(stage.landed(offer)) > n)  # type: ignore[misc]
            assert writes(stage, offer) == WRITES[: 1 + num_layers]
            assert offer.first is None and not offer.settled
        text = await stage.text(offer)
        assert text.token_ids == stage.undisturbed(prompt).token_ids
        assert writes(stage, offer) == WRITES
        assert isinstance(offer.answer, Claimed)
        num_bytes = len(offer.answer.fill) * stage.peer.group.layout.block_bytes
        assert written.get() - num_bytes_before == num_bytes


async def test_prompts_of_any_length_give_the_text_of_one_computed_at_home(stage: Stage) -> None:
    """The second prompt of each pair has its head in the worker's own prefix cache."""
    stage.peer.engine.block_pool.enable_prefix_cache = False
    for num_tokens in (1, 5, 32, 33, 100):
        head = fresh_prompt(num_tokens)
        for prompt in (head, [*head, 9, 8, 7]):
            offer = await stage.offer(prompt)
            text = await stage.text(offer)
            assert text.token_ids == stage.undisturbed(prompt).token_ids
            assert {notice.layers for notice in stage.landed(offer)} > {range(2)}


async def test_a_layer_that_fails_ends_the_handoff_and_the_next_is_delivered(
    stage: Stage, fabric: LoopbackFabric
) -> None:
    """The layers below have landed. Those above may be posted before the failure is known."""
    name = f"{stage.peer.node.instance_id}.{stage.peer.node.epoch}.0"
    async with stopped_at(stage, 3) as reached:
        offer = await stage.offer(LONG)
        await reached.wait()
        await eventually(lambda: len(stage.landed(offer)) == 4)
        fabric.failing.add(name)
    settled = await stage.settled(offer)
    fabric.failing.discard(name)
    assert settled.num_completed == 4 and settled.num_failed and "failed" in settled.error
    assert writes(stage, offer) == WRITES[:4]
    await stage.balanced()
    text = await stage.text(await stage.offer(LONG[:41]))
    assert text.token_ids == stage.undisturbed(LONG[:41]).token_ids


async def test_a_prompt_retracted_between_layers_posts_no_other_and_holds_nothing(
    stage: Stage,
) -> None:
    async with stopped_at(stage, 4) as reached:
        offer = await stage.offer(LONG)
        await reached.wait()
        await eventually(lambda: len(stage.landed(offer)) == 5)
        offer.retract()
        settled = await stage.settled(offer)
        assert (settled.num_completed, settled.num_failed) == (5, 0) and settled.error
    await stage.balanced()
    assert offer.first is None and writes(stage, offer) == WRITES[:5]


async def test_layers_under_way_keep_all_blocks_of_a_retracted_prompt(
    stage: Stage, fabric: LoopbackFabric
) -> None:
    fabric.held = True
    async with stopped_at(stage, 4) as reached:
        offer = await stage.offer(LONG)
        await reached.wait()
        await eventually(lambda: len(fabric.pending) == 5)
        offer.retract()
        await eventually(lambda: not stage.worker._prompts.open)
    await eventually(lambda: stage.num_held == 11 + 3 * len(LAST))  # of the full group, of others
    assert not offer.settled
    fabric.held = False
    for write in fabric.pending:
        write.copy()
        write.finish()
    fabric.pending.clear()
    settled = await stage.settled(offer)
    assert (settled.num_completed, settled.num_failed) == (5, 0) and settled.error
    await eventually(lambda: writes(stage, offer) == WRITES[:5])
    assert offer.first is None


async def test_a_prefix_is_read_as_far_as_the_window_of_later_tokens_reaches(stage: Stage) -> None:
    stage.undisturbed([*LONG[:40], 5, 6, 7], salt="")
    stage.worker._prompts.rate.s_per_token = 1.0
    offer = await stage.offer(LONG)
    text = await stage.text(offer)
    assert text.token_ids == stage.undisturbed(LONG).token_ids
    windowed = [entry for group in (1, 2, 3) for entry in entries(group, [8, 9])]
    assert offer.pulled == sorted(entries(0, list(range(10))) + windowed)
    assert offer.first is not None and offer.first.num_cached_tokens == 10 * BLOCK_SIZE


async def test_a_grant_that_asks_for_a_block_behind_the_window_is_refused_before_any_layer(
    stage: Stage,
) -> None:
    """In a prompt of one chunk the block is still there while its layers are computed."""
    offer = stage.prepare(LONG[:31])
    assert isinstance(offer.answer, Claimed)
    offer.answer = structs.replace(offer.answer, fill=[(1, 0)])
    await stage.publish(offer)
    settled = await stage.settled(offer)
    assert settled.num_completed == 0 and "a window has passed" in settled.error

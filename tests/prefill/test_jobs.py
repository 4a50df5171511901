"""A prefill worker against a decode side that refuses, retracts, vanishes, or lies."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from tandem.prefill.job import GIVE_WAY_DELAY_S, PEER_DELAY_S
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ServiceError
from tandem.runtime.process.lifecycle import State
from tandem.runtime.store.discovery import register_transfer, transfer_prefix
from tandem.runtime.wire.handoff_messages import ClaimAnswer, Claimed, ClaimRefused
from tandem.runtime.wire.messages import SamplingParams, StopConditions, encode, pack_tokens
from tandem.transfer.handoff import claimant
from tandem.transfer.loopback import LoopbackFabric
from tests.handoff_peer import BLOCK_SIZE, FREE_WRITES, TRANSFER, fresh_prompt
from tests.prefill.decode_peer import Offer, Stage
from tests.services import NatsServer, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")  # as the stage's

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=7, logprobs=2)
LONG = 100  # tokens: four steps of 32


def changed(offer: Offer, **fields: object) -> None:
    offer.answer = msgspec.structs.replace(offer.answer, **fields)


async def publish_again(stage: Stage, offer: Offer) -> None:
    """As a broker does that missed the acknowledgement: no header tells that it is the same."""
    queue = stage.peer.queue
    subject = f"{queue._names.subject}.{offer.job.num_uncached_tokens}"
    await queue._jetstream.publish(subject, encode(offer.job))


# ---- what must arrive --------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, BLOCK_SIZE, BLOCK_SIZE + 1, 32, 33, 64, LONG])
async def test_a_decode_worker_goes_on_with_the_same_text(stage: Stage, num_tokens: int) -> None:
    """Twice: the second time the worker has the prompt in its own prefix cache."""
    prompt = fresh_prompt(num_tokens)
    expected = stage.undisturbed(prompt, SAMPLED)
    cached = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    for num_cached in (0, cached):
        stage.peer.engine.block_pool.enable_prefix_cache = False
        offer = await stage.offer(prompt, sampling=SAMPLED)
        text = await stage.text(offer)
        assert (text.token_ids, text.finish_reason) == (expected.token_ids, "length")
        assert text.logprobs[0].logprob == pytest.approx(expected.logprobs[0].logprob, abs=1e-4)
        assert offer.first is not None and offer.first.num_cached_tokens == num_cached


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (StopConditions(6, ignore_eos=True), [8, 9, 8, 9, 8, 9]),
        (StopConditions(6, min_tokens=3, stop_token_ids=[8], ignore_eos=True), [9, 9, 9]),
    ],
    ids=["penalties", "min_tokens"],
)
async def test_a_first_token_counts_what_of_the_answer_was_said_elsewhere(
    stage: Stage, stop: StopConditions, expected: list[int]
) -> None:
    prompt = fresh_prompt(30)
    sampling = SamplingParams(0, frequency_penalty=20.0, logit_bias={8: 100.0, 9: 90.0})
    whole = stage.undisturbed(prompt, sampling, stop)
    assert whole.token_ids == expected
    for cut in range(1, len(expected) + (whole.finish_reason == "stop")):
        given = prompt + expected[:cut]
        offer = await stage.offer(given, sampling=sampling, stop=stop, num_generated=cut)
        rest = await stage.text(offer)
        assert rest.token_ids == expected[cut:]
        assert rest.finish_reason == whole.finish_reason


async def test_blocks_are_written_as_soon_as_a_step_has_filled_them(stage: Stage) -> None:
    offer = await stage.offer(fresh_prompt(LONG))
    await stage.text(offer)
    written = {tuple(ordinal for ordinal, _ in each.blocks) for each in stage.landed(offer)}
    # Over a link that looks slow, as on a busy machine, the last ones are written layer by layer.
    assert written == {tuple(range(i, min(i + 8, 25))) for i in range(0, 25, 8)}


async def test_what_the_decode_worker_holds_already_is_not_sent(stage: Stage) -> None:
    prompt = fresh_prompt(40)
    expected = stage.undisturbed([*prompt, 9, 9, 9])
    await stage.text(await stage.offer(prompt))
    offer = await stage.offer([*prompt, 9, 9, 9])
    assert await stage.text(offer) == expected
    assert {ordinal for notice in stage.landed(offer) for ordinal, _ in notice.blocks} == {10}


async def test_the_first_token_may_end_the_answer(stage: Stage) -> None:
    prompt = fresh_prompt(21)
    first = stage.undisturbed(prompt).token_ids[0]
    for stop in (
        StopConditions(max_tokens=1, ignore_eos=True),
        StopConditions(max_tokens=5, stop_token_ids=[first]),
        StopConditions(max_tokens=5, stop_token_ids=[first], min_tokens=2),
    ):
        expected = stage.undisturbed(prompt, stop=stop)
        assert await stage.text(await stage.offer(prompt, stop=stop)) == expected


@pytest.mark.parametrize(
    "backend", ["nixl", pytest.param("ucx", marks=[pytest.mark.ucx, pytest.mark.slow])]
)
async def test_blocks_arrive_by_real_transports_as_well(
    runtime_config: RuntimeConfig, tiny_model: Path, backend: str
) -> None:
    if backend == "ucx" and find_spec("ucxx") is None:
        pytest.skip("ucxx is not installed")
    transfer = TRANSFER.model_copy(update={"backend": backend})
    async with Stage(runtime_config, tiny_model, transfer=transfer) as stage:
        offer = await stage.offer(fresh_prompt(LONG))
        assert await stage.text(offer) == stage.undisturbed(fresh_prompt(LONG))
        await stage.balanced()


async def test_many_jobs_at_once_do_not_mix(stage: Stage) -> None:
    prompts = [fresh_prompt(12 + seed, seed) for seed in range(6)]
    expected = [stage.undisturbed(prompt) for prompt in prompts]
    offers = [await stage.offer(prompt) for prompt in prompts]
    assert [await stage.text(offer) for offer in offers] == expected


# ---- what is not begun -------------------------------------------------------------------------


async def test_a_refused_or_stale_ticket_costs_nothing_and_does_not_come_again(
    stage: Stage,
) -> None:
    for reason in ("stale", "cancelled", "expired", "unknown"):
        offer = stage.prepare(fresh_prompt(9))
        offer.answer = ClaimRefused(reason)
        await stage.publish(offer)
        await eventually(partial(len, offer.claims))  # NATS may count a job late
        await stage.balanced()
        assert len(offer.claims) == 1 and not offer.settled
    stale = []
    for field in ("deployment", "decode_epoch"):
        offer = stage.prepare(fresh_prompt(9))
        stale.append(offer)
        await stage.peer.queue.publish(msgspec.structs.replace(offer.job, **{field: "old"}))
    await stage.text(await stage.offer(fresh_prompt(9)))  # it comes after them
    await stage.balanced()
    assert not any(offer.claims for offer in stale)


async def test_a_ticket_that_gives_way_to_others_comes_again(stage: Stage) -> None:
    offer = stage.prepare(fresh_prompt(9))
    granted, offer.answer = offer.answer, ClaimRefused("late")
    offer.may_answer.set()
    published_at = time.perf_counter()
    await stage.peer.queue.publish(offer.job)
    await eventually(lambda: len(offer.claims) == 1)
    offer.answer = granted
    assert await stage.text(offer) == stage.undisturbed(fresh_prompt(9))
    assert len(offer.claims) == 2
    assert time.perf_counter() - published_at > 0.9 * GIVE_WAY_DELAY_S


async def test_only_a_registered_decode_worker_is_dialed(own_stage: Stage) -> None:
    offer = own_stage.prepare(fresh_prompt(9))
    stranger = msgspec.structs.replace(offer.job, decode_instance="a stranger")
    await own_stage.peer.queue.publish(stranger)
    await own_stage.balanced()
    assert not offer.claims
    await own_stage.peer.node.server.stop()
    await own_stage.peer.queue.publish(offer.job)
    await own_stage.balanced()


async def test_the_ticket_of_a_new_decode_worker_waits_for_its_metadata(stage: Stage) -> None:
    node = stage.peer.node
    await node.discovery.delete(transfer_prefix(node.config.namespace) + node.instance_id)
    await eventually(lambda: node.instance_id not in stage.worker._peers.items)
    offer = await stage.offer(fresh_prompt(9))
    await register_transfer(node.discovery, node.config.namespace, stage.metadata)
    assert await stage.text(offer) == stage.undisturbed(fresh_prompt(9))


async def test_tickets_of_strangers_take_no_place_of_another_job(
    runtime_config: RuntimeConfig, tiny_model: Path
) -> None:
    async with Stage(runtime_config, tiny_model, max_batch_jobs=1) as stage:
        offer = stage.prepare(fresh_prompt(9))
        for number in range(100):
            handoff_id = number.to_bytes(16, "little")
            odd = msgspec.structs.replace(offer.job, handoff_id=handoff_id, decode_instance="x")
            await stage.peer.queue.publish(odd)
        async with asyncio.timeout(100 * PEER_DELAY_S):  # they wait side by side
            await stage.publish(offer)
            assert await stage.text(offer) == stage.undisturbed(fresh_prompt(9))
            await stage.balanced()


async def test_a_claim_without_an_answer_is_given_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claimant, "CLAIM_TIMEOUT_S", 0.2)
    offer = await stage.offer(fresh_prompt(9), waits=True)
    settled = await stage.settled(offer)
    assert "no answer to the claim" in settled.error
    await stage.balanced()


async def test_one_attempt_never_runs_twice_at_the_same_time(stage: Stage) -> None:
    with stage.frozen_engine():
        offer = await stage.offer(fresh_prompt(LONG))
        await eventually(lambda: bool(offer.claims))
        await publish_again(stage, offer)
        other = await stage.offer(fresh_prompt(5))  # comes after it from the queue
        await eventually(lambda: bool(other.claims))
    assert await stage.text(offer) == stage.undisturbed(fresh_prompt(LONG))
    await stage.text(other)
    assert len(offer.claims) == 1
    offer.answer = ClaimRefused("unknown")
    await publish_again(stage, offer)
    await eventually(lambda: len(offer.claims) == 2)
    await stage.balanced()
    assert len(offer.settled) == 1


async def test_jobs_over_the_budget_are_left_to_others(
    runtime_config: RuntimeConfig, tiny_model: Path
) -> None:
    async with Stage(runtime_config, tiny_model, max_batch_tokens=20) as stage:
        large = await stage.offer(fresh_prompt(25), waits=True)
        await eventually(lambda: bool(large.claims))
        offers = [await stage.offer(fresh_prompt(12, seed), waits=True) for seed in range(4)]
        large.may_answer.set()
        await stage.text(large)
        await eventually(lambda: sum(len(offer.claims) for offer in offers) == 2)
        assert (await stage.peer.queue.depth()).num_jobs == 2
        for offer in offers:
            offer.may_answer.set()
        for offer in offers:
            await stage.text(offer)
        await stage.balanced()


# ---- every way out settles ---------------------------------------------------------------------


async def before_the_answer(stage: Stage, offer: Offer) -> None:
    await eventually(lambda: bool(offer.claims))


async def before_the_first_step(stage: Stage, offer: Offer) -> None:
    offer.may_answer.set()
    await eventually(lambda: bool(stage.worker._prompts.open))


def stop(stage: Stage, offer: Offer) -> Awaitable[None]:
    return stage.process.stop()


async def retract(stage: Stage, offer: Offer) -> None:
    offer.retract()


async def end_the_stream(stage: Stage, offer: Offer) -> None:
    offer.ended.set()


@pytest.mark.parametrize(
    ("moment", "end"),
    [
        (before_the_answer, stop),
        (before_the_first_step, stop),
        (before_the_first_step, retract),
        (before_the_first_step, end_the_stream),
    ],
)
async def test_a_job_that_is_broken_off_settles(
    runtime_config: RuntimeConfig,
    tiny_model: Path,
    moment: Callable[[Stage, Offer], Awaitable[None]],
    end: Callable[[Stage, Offer], Awaitable[None]],
) -> None:
    async with Stage(runtime_config, tiny_model) as stage:
        with stage.frozen_engine():
            offer = await stage.offer(fresh_prompt(LONG), waits=True)
            await moment(stage, offer)
            ending = asyncio.ensure_future(end(stage, offer))
            steps = list(stage.worker._prompts.open.values())
            await eventually(lambda: bool(offer.settled or (steps and steps[0].qsize())))
        settled = await stage.settled(offer)
        assert (settled.num_completed, settled.num_failed) == (0, 0) and settled.error
        assert offer.first is None and not stage.landed(offer)
        await ending
        await eventually(lambda: not stage.worker._jobs)


async def test_source_blocks_stay_while_a_write_may_read_them(
    stage: Stage, fabric: LoopbackFabric
) -> None:
    """Retracted with a write under way: neither settled nor freed until it has ended."""
    fabric.held = True
    offer = await stage.offer(fresh_prompt(21))
    await eventually(lambda: len(fabric.pending) == 1 and offer.first is not None)
    offer.retract()
    assert stage.num_held == 6 and not offer.settled
    (write,) = fabric.pending
    fabric.pending.clear()
    fabric.held = False
    write.copy()
    write.finish()
    assert await stage.text(offer) == stage.undisturbed(fresh_prompt(21))


async def test_a_retracted_job_posts_no_further_write(stage: Stage, fabric: LoopbackFabric) -> None:
    fabric.held = True
    offer = await stage.offer(fresh_prompt(LONG), waits=True)
    with stage.frozen_engine():
        await before_the_first_step(stage, offer)
    await eventually(lambda: bool(fabric.pending))
    offer.retract()
    fabric.held = False
    for write in fabric.pending:
        write.copy()
        write.finish()
    num_writes = len(fabric.pending)
    fabric.pending.clear()
    settled = await stage.settled(offer)
    assert settled.num_completed >= num_writes and settled.num_failed == 0


async def test_a_failed_write_is_settled_as_such_and_the_next_job_connects_anew(
    stage: Stage, fabric: LoopbackFabric
) -> None:
    name = f"{stage.peer.node.instance_id}.{stage.peer.node.epoch}.0"
    fabric.failing.add(name)
    settled = await stage.settled(await stage.offer(fresh_prompt(21)))
    fabric.failing.discard(name)
    assert settled.num_completed == 0 and settled.num_failed and "failed" in settled.error
    await stage.text(await stage.offer(fresh_prompt(22)))


async def test_a_first_token_that_is_not_taken_fails_the_handoff_at_once(stage: Stage) -> None:
    offer = stage.prepare(fresh_prompt(21))
    offer.refuses_first = True
    await stage.publish(offer)
    settled = await stage.settled(offer)
    assert (settled.num_completed, settled.num_failed) == (1, 0)
    assert "first token" in settled.error


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"token_ids": bytes(4 * 300)}, "300 tokens"),
        ({"fill": [(0, 0), (99, 1)]}, "not every block"),
        ({"fill": [(0, 10**6)]}, "out of range"),
        ({"lease_ms": 1}, "lease"),
    ],
)
async def test_a_grant_that_cannot_be_served_is_settled_with_the_reason(
    stage: Stage, fields: dict[str, object], error: str
) -> None:
    offer = stage.prepare(fresh_prompt(21))
    changed(offer, **fields)
    await stage.publish(offer)
    assert error in (await stage.settled(offer)).error


async def test_a_step_that_fails_is_settled_and_the_worker_goes_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(chunks: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(stage.worker.engine.runner, "launch", fail)
        settled = await stage.settled(await stage.offer(fresh_prompt(21)))
    assert settled.num_completed == 0 and "engine failed" in settled.error
    assert await stage.text(await stage.offer(fresh_prompt(21))) == stage.undisturbed(
        fresh_prompt(21)
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": SamplingParams(repetition_penalty=1e-40)},
        {"sampling": SamplingParams(top_k=2**63)},
        {"sampling": SamplingParams(logit_bias={5: float("nan")})},
        {"stop": StopConditions(max_tokens=6, min_tokens=2**63 - 1)},
        {"token_ids": pack_tokens([3, 2**31])},
        {"token_ids": b"odd"},
    ],
    ids=["repetition_penalty", "top_k", "logit_bias", "min_tokens", "token", "tokens"],
)
async def test_a_grant_with_a_bad_number_is_given_up_and_no_other(
    stage: Stage, fields: dict[str, object]
) -> None:
    beside = await stage.offer(fresh_prompt(LONG))
    offer = stage.prepare(fresh_prompt(21))
    changed(offer, **fields)
    await stage.publish(offer)
    await eventually(lambda: bool(offer.settled))
    assert await stage.text(beside) == stage.undisturbed(fresh_prompt(LONG))
    assert len(offer.claims) == len(offer.settled) == 1 and offer.settled[0].error
    assert offer.first is None and stage.landed(offer) == []


async def test_poison_is_tried_a_few_times_then_dead_and_the_worker_lives(
    runtime_config: RuntimeConfig,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("CRITICAL")
    decode = claimant._decode_answer
    async with Stage(runtime_config, tiny_model, max_deliver=3) as stage:
        queue, offer = stage.peer.queue, stage.prepare(fresh_prompt(21))
        await queue._jetstream.publish(f"{queue._names.subject}.1", b"no job at all")

        def poisoned(answer: bytes | memoryview) -> ClaimAnswer:
            if isinstance(offer.answer, Claimed) and offer.answer.secret in bytes(answer):
                raise RuntimeError("the end of any worker that begins this ticket")
            return decode(answer)

        monkeypatch.setattr(claimant, "_decode_answer", poisoned)
        await stage.publish(offer)
        await stage.text(await stage.offer(fresh_prompt(22)))
        while (await queue.depth()).num_dead < 2:
            await asyncio.sleep(0.05)
        assert len(offer.claims) == 3
        await stage.balanced()


async def test_a_malformed_answer_to_a_claim_ends_the_ticket(stage: Stage) -> None:
    offer = stage.prepare(fresh_prompt(21))
    changed(offer, cache_salt=5)
    await stage.publish(offer)
    await eventually(lambda: bool(offer.settled))
    assert "cache_salt" in offer.settled[0].error
    await stage.text(await stage.offer(fresh_prompt(22)))
    assert len(offer.claims) == len(offer.settled) == 1


# ---- drain, and a lost queue -------------------------------------------------------------------


async def test_a_draining_worker_finishes_its_jobs_and_takes_no_other(own_stage: Stage) -> None:
    with own_stage.frozen_engine():
        offer = await own_stage.offer(fresh_prompt(LONG))
        await eventually(lambda: bool(own_stage.worker._prompts.open))
        draining = asyncio.create_task(own_stage.process.drain())
        await eventually(lambda: not own_stage.worker.node._records)
    assert await own_stage.text(offer) == own_stage.undisturbed(fresh_prompt(LONG))
    await draining
    late = await own_stage.offer(fresh_prompt(9))
    (delivery,) = await own_stage.peer.queue.receive(1, 60.0)
    assert delivery.job == late.job and not late.claims
    await delivery.ack()


async def test_a_worker_that_is_ended_before_it_is_up_ends_quietly(
    runtime_config: RuntimeConfig, tiny_model: Path
) -> None:
    stage = Stage(runtime_config, tiny_model)
    stage.process.lifecycle.shut_down("changed my mind")
    await stage.process.run(stage.worker)
    assert stage.process.lifecycle.state is State.STOPPED


async def test_a_job_in_hand_outlives_the_queue_and_pulling_goes_on_when_it_is_back(
    runtime_config: RuntimeConfig, tiny_model: Path
) -> None:
    with NatsServer() as nats:
        config = runtime_config.model_copy(update={"nats_url": nats.url})
        async with Stage(config, tiny_model) as stage:
            with stage.frozen_engine():
                offer = await stage.offer(fresh_prompt(LONG))
                await eventually(lambda: bool(stage.worker._prompts.open))
                nats.kill()
            assert await stage.text(offer) == stage.undisturbed(fresh_prompt(LONG))
            nats.start()
            late = stage.prepare(fresh_prompt(9))

            async def is_published() -> bool:
                try:
                    await stage.publish(late)
                except ServiceError:  # the server is there before its streams are
                    return False
                return True

            await eventually(is_published)
            await stage.text(late)
            await stage.balanced()


async def test_the_end_of_a_prompt_goes_by_groups_of_layers_where_that_is_faster(
    stage: Stage,
) -> None:
    stage.worker._group.links[stage.peer.node.instance_id].rates = FREE_WRITES
    offer = await stage.offer(fresh_prompt(LONG))
    assert await stage.text(offer) == stage.undisturbed(fresh_prompt(LONG))
    spans = [(notice.layers, notice.blocks[0][0]) for notice in stage.landed(offer)]
    whole = [(range(2), 0), (range(2), 8), (range(2), 16)]
    assert spans == [*whole, (range(1), 24), (range(1, 2), 24)]


async def test_layers_do_not_go_by_groups_where_the_config_says_so(
    runtime_config: RuntimeConfig, tiny_model: Path
) -> None:
    transfer = TRANSFER.model_copy(update={"stream_layers": False})
    async with Stage(runtime_config, tiny_model, transfer=transfer) as stage:
        stage.worker._group.links[stage.peer.node.instance_id].rates = FREE_WRITES
        offer = await stage.offer(fresh_prompt(LONG))
        await stage.text(offer)
        assert {notice.layers for notice in stage.landed(offer)} == {range(2)}

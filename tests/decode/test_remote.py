"""A decode worker against a prefill side that is late, wrong, double, or gone."""

import os
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path

import msgspec
import pytest

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.wire.handoff_messages import ClaimRefused
from tandem.runtime.wire.messages import SamplingParams, StopConditions, Targets, encode
from tests.decode.prefill_peer import PROMPT, Stage, Work, count
from tests.handoff_peer import BLOCK_SIZE, TRANSFER, fresh_prompt
from tests.services import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")  # as the stage's

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.5, seed=7)
WITH_LOGPROBS = msgspec.structs.replace(SAMPLED, logprobs=2)


# ---- a first token before its KV ---------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["delivered", "given up"])
async def test_with_both_targets_a_first_token_comes_as_its_answer_goes_on(
    stage: Stage, outcome: str
) -> None:
    targets = Targets(ttft_ms=600_000, itl_ms=50)
    answer, work = await stage.handoff(PROMPT, sampling=WITH_LOGPROBS, targets=targets)
    if outcome == "delivered":
        await stage.deliver(work)
    else:
        await stage.send_first(work)
        await stage.settle(work, error="the test gave up")
    assert await answer.whole() == stage.undisturbed(PROMPT, WITH_LOGPROBS)
    assert answer.places == ["remote" if outcome == "delivered" else "local"]
    assert answer.report is not None
    if outcome == "delivered":
        assert answer.report.timeline_ms["first_token"] >= answer.report.timeline_ms["verified"]
    await stage.balanced()


@pytest.mark.parametrize(
    "targets",
    [None, Targets(ttft_ms=600_000), Targets(itl_ms=50), Targets(ttft_ms=100, itl_ms=50)],
    ids=["no target", "only TTFT", "only ITL", "TTFT is near"],
)
async def test_else_a_first_token_comes_before_its_kv(
    stage: Stage, targets: Targets | None
) -> None:
    answer, work = await stage.handoff(PROMPT, targets=targets)
    await stage.send_first(work)
    assert work.first is not None
    await eventually(lambda: answer.text.token_ids == [work.first.token_id])
    await stage.deliver(work)
    assert await answer.whole() == stage.undisturbed(PROMPT)
    assert answer.places == ["remote"]


async def test_an_answer_of_one_token_waits_for_no_kv(stage: Stage) -> None:
    targets = Targets(ttft_ms=600_000, itl_ms=50)
    stop = StopConditions(max_tokens=1, ignore_eos=True)
    answer, work = await stage.handoff(PROMPT, stop=stop, targets=targets)
    await stage.send_first(work)
    await eventually(lambda: len(answer.text.token_ids) == 1)
    await stage.deliver(work)
    assert await answer.whole() == stage.undisturbed(PROMPT, stop=stop)


# ---- what arrives in any order, and often ------------------------------------------------------


@pytest.mark.parametrize("order", list(permutations(["first", "notices", "settle"])))
async def test_the_text_is_the_same_in_whatever_order_messages_come(
    stage: Stage, order: tuple[str, ...]
) -> None:
    answer, work = await stage.handoff(PROMPT, sampling=WITH_LOGPROBS)
    half = len(work.grant.fill) // 2
    notices = [
        await stage.write(work, fill=work.grant.fill[half:], notice_is_lost=True),
        await stage.write(work, fill=work.grant.fill[:half], notice_is_lost=True),
    ]
    for step in order:
        match step:
            case "first":
                await stage.send_first(work)
            case "notices":
                for notice in notices:
                    await stage.notify(notice)
            case "settle":
                await stage.settle(work)
    text = await answer.whole()
    assert text == stage.undisturbed(PROMPT, WITH_LOGPROBS)
    assert len(text.logprobs) == len(text.token_ids) and len(text.logprobs[0].top) == 2
    assert answer.report is not None and answer.report.place == "remote"


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
        answer, work = await stage.handoff(PROMPT)
        await stage.deliver(work)
        await stage.settle_by_notice(work)
        assert await answer.whole() == stage.undisturbed(PROMPT)
        assert answer.report is not None and answer.report.place == "remote"
        await stage.balanced()


async def test_every_message_twice_is_as_good_as_once(stage: Stage) -> None:
    answer, work = await stage.handoff(PROMPT)
    again = await stage.claim(work.job)
    assert isinstance(again, Work) and again.grant == work.grant
    for _ in range(2):
        await stage.send_first(work)
    notice = await stage.write(work, fill=work.grant.fill[1:])
    await stage.notify(notice)
    await stage.write(work, fill=work.grant.fill[:1])
    await stage.notify(notice)
    for _ in range(2):
        await stage.settle(work)
        await stage.settle_by_notice(work)
    assert await answer.whole() == stage.undisturbed(PROMPT)
    await stage.send_first(work)
    await stage.notify(notice)
    assert await stage.claim(work.job) == ClaimRefused("unknown")


@pytest.mark.parametrize("num_tokens", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 20, 33])
async def test_prompts_of_every_length_around_a_block(stage: Stage, num_tokens: int) -> None:
    """The second time, all full blocks but the one of the last token are cached here."""
    prompt = fresh_prompt(num_tokens, seed=num_tokens)
    expected = stage.undisturbed(prompt)
    num_full = (num_tokens - 1) // BLOCK_SIZE
    for cached in ([], list(range(num_full))):
        answer, work = await stage.handoff(prompt)
        assert work.grant.cached_ordinals == cached
        ordinals = [ordinal for ordinal, _ in work.grant.fill]
        assert cached + ordinals == list(range(-(-num_tokens // BLOCK_SIZE)))
        await stage.deliver(work)
        assert await answer.whole() == expected
        assert answer.report is not None
        assert answer.report.num_cached_tokens == len(cached) * BLOCK_SIZE


# ---- the first token ---------------------------------------------------------------------------


async def test_the_first_token_is_sent_before_the_kv_and_kept_when_that_fails(stage: Stage) -> None:
    answer, work = await stage.handoff(PROMPT, sampling=SAMPLED)
    await stage.send_first(work)
    await eventually(lambda: len(answer.text.token_ids) == 1)
    await stage.settle(work, error="out of memory")
    assert await answer.whole() == stage.undisturbed(PROMPT, SAMPLED)
    assert answer.places == ["remote", "local"]
    assert answer.report is not None and answer.report.cause == "fallback"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", ["max_tokens=1", "stop token", "min_tokens"])
async def test_a_first_token_that_may_be_the_last(stage: Stage, kind: str, fails: bool) -> None:
    first = stage.undisturbed(PROMPT).token_ids[0]
    stop = {
        "max_tokens=1": StopConditions(max_tokens=1, ignore_eos=True),
        "stop token": StopConditions(max_tokens=5, stop_token_ids=[first]),
        "min_tokens": StopConditions(max_tokens=5, stop_token_ids=[first], min_tokens=2),
    }[kind]
    expected = stage.undisturbed(PROMPT, stop=stop)
    answer, work = await stage.handoff(PROMPT, stop=stop)
    await stage.send_first(work)
    if fails:
        await stage.settle(work, error="failed")
    else:
        await stage.deliver(work)
    assert await answer.whole() == expected


# ---- what must not be believed -----------------------------------------------------------------


async def test_a_flipped_bit_is_caught_and_its_block_stays_in_quarantine(stage: Stage) -> None:
    answer, work = await stage.handoff(PROMPT)
    await stage.send_first(work)
    await stage.write(work, fill=work.grant.fill[:3])
    await stage.write(work, fill=work.grant.fill[3:], flip=1 << 63)
    assert await answer.whole() == stage.undisturbed(PROMPT)
    await stage.retracted(work)
    assert stage.num_quarantined == len(work.grant.fill)
    await stage.settle_by_notice(work)
    await eventually(lambda: stage.num_quarantined == 0)


async def test_messages_of_others_are_not_applied(stage: Stage) -> None:
    """Noise, a wrong secret, another attempt, another claimant."""
    answer, work = await stage.handoff(PROMPT)
    await stage.notify(b"TNDMnoise")
    forged = Work(work.job, msgspec.structs.replace(work.grant, secret=bytes(16)), work.stream)
    forged.blocks = list(reversed(work.blocks))
    await stage.write(forged, fill=[(ordinal, block) for ordinal, block in work.grant.fill])
    await stage.settle_by_notice(forged)
    stale = msgspec.structs.replace(work.job, attempt=2)
    assert await stage.claim(stale) == ClaimRefused("stale")
    await stage.settle(Work(stale, work.grant, work.stream), error="stale")
    assert await stage.claim(work.job, run=b"another") == ClaimRefused("stale")
    assert work.first is not None
    for field in ("secret", "run"):
        first = msgspec.structs.replace(work.first, **{field: bytes(16), "token_id": 7})
        await stage.tell("first_token", encode(first))
    assert not answer.ended.is_set() and stage.worker.handoffs.num_open == 1
    await stage.deliver(work)
    assert await answer.whole() == stage.undisturbed(PROMPT)


async def test_a_claim_is_granted_to_registered_prefill_workers_only(stage: Stage) -> None:
    answer = await stage.ask(PROMPT)
    job = await stage.ticket()
    decode_instance = stage.worker.node.instance_id
    for stranger in (
        {"instance_id": "a stranger"},
        {"epoch": "e"},
        {"instance_id": decode_instance},
    ):
        assert await stage.claim(job, **stranger) == ClaimRefused("unregistered")
    remote = stage.worker.handoffs.find(job.handoff_id)
    assert remote is not None and remote.is_unclaimed and not answer.ended.is_set()
    work = await stage.claim(job)
    assert isinstance(work, Work)
    await stage.settle(work, error="enough")
    assert await answer.whole() == stage.undisturbed(PROMPT)


# A prompt of 9 tokens takes 3 blocks of 4, its answer one more, PROMPT 6 and 7; one is spared.
@pytest.mark.parametrize("engine", [{"max_num_seqs": 1}, {"num_blocks": 9}], ids=["row", "blocks"])
async def test_prompts_that_wait_for_room_go_away_in_turn_once_they_have_it(
    runtime_config: RuntimeConfig, tiny_model: Path, engine: dict[str, int]
) -> None:
    async with Stage(runtime_config, tiny_model, engine=engine) as stage:
        waiting = stage.worker.engine.scheduler.waiting
        answer, work = await stage.handoff(PROMPT)
        prompts = [fresh_prompt(9, seed) for seed in range(3)]
        later = []
        for number, prompt in enumerate(prompts, start=1):
            later.append(await stage.ask(prompt))
            await eventually(lambda number=number: len(waiting) == number)
        assert (await stage.peer.queue.depth()).num_jobs == 0
        later[1].context.cancel("gone")  # its caller leaves before it has one
        await eventually(lambda: len(waiting) == 2)
        await stage.deliver(work)
        assert await answer.whole() == stage.undisturbed(PROMPT)
        for number in (0, 2):
            await stage.deliver(await stage.claimed())
            assert await later[number].whole() == stage.undisturbed(prompts[number])
            assert later[number].places == ["remote"]
        await stage.balanced()


async def test_a_prefill_worker_that_does_not_fit_is_asked_nothing(stage: Stage) -> None:
    stage.peer.node.deployment = "another"
    await stage.register(os.getpid())
    before = count("decode_prefills_total", cause="no_prefill_worker", place="local")
    answer = await stage.ask(PROMPT)
    assert await answer.whole() == stage.undisturbed(PROMPT)
    assert count("decode_prefills_total", cause="no_prefill_worker", place="local") == before + 1
    assert (await stage.peer.queue.depth()).num_jobs == 0
    stage.peer.node.deployment = stage.peer.deployment
    await stage.register(os.getpid())
    answer = await stage.ask(fresh_prompt(21, 5))
    await stage.deliver(await stage.claimed())
    await answer.whole()
    assert answer.report is not None and answer.report.place == "remote"


async def test_a_write_to_a_place_that_was_not_granted_ends_the_handoff(stage: Stage) -> None:
    answer, work = await stage.handoff(PROMPT)
    work.blocks.append(work.blocks[0])
    before = count("decode_handoffs_total", end="failed")
    await stage.write(work, fill=[(len(work.blocks) - 1, work.grant.fill[0][1])])
    assert await answer.whole() == stage.undisturbed(PROMPT)
    assert count("decode_handoffs_total", end="failed") == before + 1
    await stage.settle(work)


async def test_a_prefill_worker_that_delivers_corrupt_kv_repeatedly_gets_no_more_work(
    runtime_config: RuntimeConfig, tiny_model: Path
) -> None:
    transfer = TRANSFER.model_copy(update={"exclude_after": 2})
    async with Stage(runtime_config, tiny_model, transfer=transfer) as stage:
        for seed in range(2):
            prompt = fresh_prompt(9, seed)
            answer, work = await stage.handoff(prompt)
            await stage.write(work, flip=1)
            await stage.settle(work)
            assert await answer.whole() == stage.undisturbed(prompt)
        status = await stage.status()
        assert status.details["excluded"] == stage.peer.node.instance_id
        before = count("decode_prefills_total", cause="no_prefill_worker", place="local")
        answer = await stage.ask(fresh_prompt(9, seed=2))
        assert await answer.whole() == stage.undisturbed(fresh_prompt(9, seed=2))
        assert (
            count("decode_prefills_total", cause="no_prefill_worker", place="local") == before + 1
        )
        status = await stage.status()
        assert status.details["prompts.local.no_prefill_worker"] == 1
        await stage.balanced()


async def test_the_claimant_can_read_the_prefix_that_is_cached_here(stage: Stage) -> None:
    first = await stage.ask(PROMPT)
    await stage.deliver(await stage.claimed())
    await first.whole()
    again, work = await stage.handoff([*PROMPT[:20], 7, 8])
    ordinals = work.grant.cached_ordinals
    assert ordinals == [0, 1, 2, 3, 4]
    answer = await stage.ask_for_prefix(work, ordinals)
    link, local = await stage.connect(), stage.peer.engine.block_pool.allocate(len(ordinals))
    assert local is not None
    pairs = list(zip(local, [block for _, block in answer.blocks], strict=True))
    assert [await stage.peer.group.read(link, link.rank_pairs[0], pairs)] == answer.checksums
    pool = stage.peer.engine.runner.kv_cache.tensor
    assert pool[local].equal(pool[work.blocks[: len(ordinals)]])  # what we computed ourselves
    stage.peer.engine.block_pool.free(local)
    await stage.deliver(work)
    await again.whole()
    assert (await stage.ask_for_prefix(work, ordinals)).blocks == []  # the claim is over


async def test_what_is_not_cached_here_cannot_be_read(stage: Stage) -> None:
    answer, work = await stage.handoff(PROMPT)
    assert (await stage.ask_for_prefix(work, [0])).blocks == []
    await stage.deliver(work)
    await answer.whole()

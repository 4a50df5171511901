"""A decode worker whose clients cancel, whose prefill side or queue is lost, or that stops."""

import asyncio
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from tandem.decode.admission import MAX_WAYS_GIVEN, SOONER_HERE, decide
from tandem.decode.prefill_view import REPORT_LIFETIME_S
from tandem.queue.jetstream import JetStreamQueue
from tandem.runtime.bus.events import load_subject
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import (
    IncompleteError,
    InvalidRequestError,
    ServiceError,
    TransferError,
    UnavailableError,
)
from tandem.runtime.store.discovery import transfer_prefix
from tandem.runtime.wire.cluster_messages import LoadReport, StepCosts
from tandem.runtime.wire.handoff_messages import ClaimRefused, PrefillJob
from tandem.runtime.wire.messages import StopConditions, Targets, encode
from tests.decode.prefill_peer import PROMPT, Stage, count
from tests.handoff_peer import TRANSFER, fresh_prompt
from tests.services import NatsServer, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")  # as the stage's


# Between looks at the claimant's process: longer than the grace, at whose end there is one too.
CHECK_S = 0.15


@pytest.fixture
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.transfer.handoff.receiver.CLAIMANT_CHECK_INTERVAL_S", CHECK_S)


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def sleeping_process() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "60"])


@pytest.mark.parametrize("state", ["queued", "claimed", "writing", "settled", "admitted"])
async def test_a_cancelled_request_leaves_nothing_behind(stage: Stage, state: str) -> None:
    answer = await stage.ask(PROMPT, stop=StopConditions(max_tokens=150, ignore_eos=True))
    if state == "queued":
        await eventually(lambda: stage.worker.handoffs.num_open == 1)
        answer.context.cancel("enough")
        await stage.balanced()
        assert await stage.claim(await stage.ticket()) == ClaimRefused("unknown")
        return
    work = await stage.claimed()
    await stage.send_first(work)
    if state == "writing":
        await stage.write(work, fill=work.grant.fill[:2])
    elif state == "settled":
        await stage.write(work, fill=work.grant.fill[:2])
        await stage.settle(work)
    elif state == "admitted":
        await stage.deliver(work)
        await eventually(lambda: len(answer.text.token_ids) > 1)
    answer.context.cancel("enough")
    if state in ("claimed", "writing"):
        await stage.retracted(work)
        await eventually(lambda: stage.num_quarantined == len(work.grant.fill))
        await stage.write(work, fill=work.grant.fill[2:])  # was under way: lands in quarantine
        await stage.settle(work)
    await stage.balanced()


async def test_a_request_cancelled_after_its_handoff_failed_stops_computing(stage: Stage) -> None:
    """The handoff is still open, for its quarantine, while the sequence runs here."""
    endless = StopConditions(max_tokens=200, ignore_eos=True)
    answer, work = await stage.handoff(PROMPT, stop=endless, request_id="same")
    await stage.write(work, flip=1)
    await eventually(lambda: len(answer.text.token_ids) > 2)
    answer.context.cancel("enough")
    await eventually(lambda: not stage.worker.active)
    load = await stage.worker.loop.call(lambda engine: engine.load())
    assert load.num_running == load.num_waiting == 0
    assert stage.num_quarantined == len(work.grant.fill)
    again = await stage.ask(PROMPT, request_id="same")
    works = [work, await stage.claimed()]
    await stage.settle(works[0])
    await stage.deliver(works[1])
    assert await again.whole() == stage.undisturbed(PROMPT)


async def test_a_request_id_that_runs_already_is_refused_and_the_first_goes_on(
    stage: Stage,
) -> None:
    answer, work = await stage.handoff(PROMPT, request_id="same")
    with pytest.raises(InvalidRequestError, match="same"):
        await (await stage.ask(PROMPT, request_id="same")).whole()
    await stage.deliver(work)
    assert await answer.whole() == stage.undisturbed(PROMPT)


# ---- the prefill worker or the queue is lost ---------------------------------------------------


@pytest.mark.parametrize("is_dead", [True, False], ids=["dead", "only silent"])
async def test_a_lost_prefill_worker_s_blocks_wait_for_its_death_or_its_lease(
    runtime_config: RuntimeConfig, tiny_model: Path, is_dead: bool
) -> None:
    handoff_timeout_ms = 60_000 if is_dead else 500
    async with Stage(runtime_config, tiny_model, handoff_timeout_ms=handoff_timeout_ms) as stage:
        await stage.register(dead_pid() if is_dead else os.getpid())
        answer = await stage.ask(PROMPT)
        claimed_at = time.perf_counter()
        work = await stage.claimed()
        await stage.write(work, fill=work.grant.fill[:1])
        work.stream.cancel()
        assert await answer.whole() == stage.undisturbed(PROMPT)
        assert answer.report is not None and answer.report.prefill_instance is None
        if not is_dead:
            assert stage.num_quarantined == len(work.grant.fill)
            agent = stage.worker.handoffs.group._first
            assert agent._num_expected == 0, "it polls often for what counts no more"
        await stage.balanced()
        held_s = time.perf_counter() - claimed_at
        lease_s = (work.grant.lease_ms + TRANSFER.grace_ms) / 1e3
        assert (held_s >= lease_s) is not is_dead


@pytest.mark.parametrize("is_rank", [False, True], ids=["its own", "a rank of a dead one"])
async def test_blocks_stay_in_quarantine_while_the_claimant_s_process_stands_still(
    runtime_config: RuntimeConfig, tiny_model: Path, is_rank: bool, quick_checks: None
) -> None:
    """It may be in the middle of a post, which goes on with the process, whatever its lease."""
    sleeper = sleeping_process()
    pids = (dead_pid(), sleeper.pid) if is_rank else (sleeper.pid,)
    try:
        async with Stage(runtime_config, tiny_model, handoff_timeout_ms=1000) as stage:
            await stage.register(*pids)
            answer, work = await stage.handoff(PROMPT)
            sleeper.send_signal(signal.SIGSTOP)
            work.stream.cancel()
            assert await answer.whole() == stage.undisturbed(PROMPT)
            remote = stage.worker.handoffs.find(work.job.handoff_id)
            assert remote is not None and remote.machine.next_tick is not None
            lease_ends_at = remote.machine.next_tick
            await eventually(lambda: time.perf_counter() > lease_ends_at + 3 * CHECK_S)
            assert stage.num_quarantined == len(work.grant.fill)
            sleeper.send_signal(signal.SIGCONT)
            await stage.balanced()
    finally:
        sleeper.kill()
        sleeper.wait()


async def test_blocks_wait_for_the_death_of_every_rank_and_no_longer(
    runtime_config: RuntimeConfig, tiny_model: Path, quick_checks: None
) -> None:
    rank = sleeping_process()
    try:
        async with Stage(runtime_config, tiny_model, handoff_timeout_ms=60_000) as stage:
            await stage.register(dead_pid(), rank.pid)
            answer, work = await stage.handoff(PROMPT)
            work.stream.cancel()
            assert await answer.whole() == stage.undisturbed(PROMPT)
            given_up_at = time.perf_counter()
            await eventually(lambda: time.perf_counter() > given_up_at + 3 * CHECK_S)
            assert stage.num_quarantined == len(work.grant.fill)
            rank.kill()
            await stage.balanced()
            assert time.perf_counter() - given_up_at < work.grant.lease_ms / 1e3
    finally:
        rank.kill()
        rank.wait()


@pytest.mark.parametrize("claimed", [False, True])
async def test_a_handoff_ends_by_its_deadline_whatever_is_lost(
    runtime_config: RuntimeConfig, tiny_model: Path, claimed: bool
) -> None:
    limits = {"handoff_timeout_ms": 1000, "claim_timeout_ms": 1000 if claimed else 100}
    async with Stage(runtime_config, tiny_model, **limits) as stage:
        answer = await stage.ask(PROMPT)
        if claimed:
            work = await stage.claimed()
            await stage.write(work)
            await stage.settle(work)  # and the first token never comes
        assert await answer.whole() == stage.undisturbed(PROMPT)
        assert answer.report is not None and answer.report.place == "local"
        await stage.balanced()


async def test_a_ticket_outlasts_its_time_while_a_worker_that_reports_is_predicted_to_be_better(
    runtime_config: RuntimeConfig, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.decode.transfer_cost.FIXED_S", 0.0)  # so that remote is better
    limits = {"policy": "adaptive", "max_local_prefill_length": 0, "claim_timeout_ms": 1500}
    async with Stage(runtime_config, tiny_model, **limits) as stage:
        async with reporting(stage):
            waits = await stage.ask(PROMPT)
            asked_at = time.perf_counter()
            await eventually(lambda: time.perf_counter() > asked_at + 0.8)
            assert stage.worker.handoffs.num_open == 1
            await stage.deliver(await stage.claimed())
        assert await waits.whole() == stage.undisturbed(PROMPT)
        assert waits.report is not None and waits.report.place == "remote"
        silent = await stage.ask(fresh_prompt(12, seed=2))
        assert await silent.whole() == stage.undisturbed(fresh_prompt(12, seed=2))
        assert silent.report is not None and silent.report.place == "local"
        assert silent.report.reason == "remote failed: no worker was free to claim it in time"
        ends_at = time.perf_counter() + REPORT_LIFETIME_S  # of the last report
        await eventually(lambda: time.perf_counter() > ends_at)
        later = await stage.ask(fresh_prompt(12, seed=3), place="remote")
        assert await later.whole() == stage.undisturbed(fresh_prompt(12, seed=3))
        assert later.report is not None and later.report.place == "local"
        assert later.report.reason == "no prefill worker has reported its load lately"
        await stage.balanced()


async def test_a_ticket_is_taken_back_once_its_own_worker_is_predicted_to_be_better(
    runtime_config: RuntimeConfig, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.decode.transfer_cost.FIXED_S", 0.0)
    limits = {"policy": "adaptive", "max_local_prefill_length": 0}
    async with Stage(runtime_config, tiny_model, **limits) as stage, reporting(stage) as loads:
        answer = await stage.ask(PROMPT)
        await eventually(lambda: stage.worker.handoffs.num_open == 1)
        loads.append(replace(loads[0], num_waiting_tokens=2**40))  # 1.1 s of prompts come first
        assert await answer.whole() == stage.undisturbed(PROMPT)
        assert answer.report is not None
        assert answer.report.reason == f"remote failed: {SOONER_HERE}"
        await stage.balanced()


async def test_the_time_to_claim_a_ticket_begins_once_it_is_on_the_queue(
    runtime_config: RuntimeConfig, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_publish, publish = asyncio.Event(), JetStreamQueue.publish

    async def late(queue: JetStreamQueue, job: PrefillJob) -> None:
        await may_publish.wait()
        await publish(queue, job)

    monkeypatch.setattr(JetStreamQueue, "publish", late)
    async with Stage(runtime_config, tiny_model, claim_timeout_ms=200) as stage:
        answer = await stage.ask(PROMPT)
        await eventually(lambda: stage.worker.handoffs.num_unclaimed == 1)
        opened_at = time.perf_counter()
        await eventually(lambda: time.perf_counter() > opened_at + 0.6)
        assert stage.worker.handoffs.num_unclaimed == 1
        may_publish.set()
        assert await answer.whole() == stage.undisturbed(PROMPT)
        assert answer.report is not None
        assert "no worker was free to claim it in time" in answer.report.reason


async def test_a_ticket_whose_target_is_lost_gives_way_while_others_wait(
    runtime_config: RuntimeConfig, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.decode.transfer_cost.FIXED_S", 0.0)
    limits = {"policy": "adaptive", "max_local_prefill_length": 0}
    async with Stage(runtime_config, tiny_model, **limits) as stage, reporting(stage):
        view = stage.worker.prefill_view
        prompts = [PROMPT, fresh_prompt(12, seed=2)]
        target = Targets(ttft_ms=1e-3)  # of these requests alone
        decided = Mock(wraps=decide)
        monkeypatch.setattr("tandem.decode.worker.decide", decided)
        answers = [await stage.ask(prompt, targets=target) for prompt in prompts]
        first = await stage.ticket()
        await eventually(lambda: view.queue_depth.num_jobs == 1)
        assert [call.args[0].ttft_target_ms for call in decided.call_args_list] == [1e-3] * 2
        refusals = [await stage.claim(first) for _ in range(MAX_WAYS_GIVEN)]
        assert refusals == [ClaimRefused("late")] * MAX_WAYS_GIVEN
        await stage.deliver(await stage.claimed(first))  # it does not starve
        second = await stage.ticket()
        await eventually(lambda: view.queue_depth.num_jobs == 0)
        await stage.deliver(await stage.claimed(second))  # no other waits
        for prompt, answer in zip(prompts, answers, strict=True):
            assert await answer.whole() == stage.undisturbed(prompt)
            assert answer.report is not None and answer.report.place == "remote"
        await stage.balanced()


@asynccontextmanager
async def reporting(stage: Stage) -> AsyncIterator[list[LoadReport]]:
    """The puppet reports that it computes a prompt in no time, after one was computed here.

    It yields its reports, of which the last one counts. No prompt tries the place that seems worse,
    as one in five hundred does here by chance.
    """
    stage.worker._rng = random.Random(0)
    assert await (await stage.ask(fresh_prompt(9, seed=1), place="local")).whole()
    costs = StepCosts((1e-9, 0.0, 0.0), (1e-9, 1e-12, 0.0), 1.0, 4096, 4096)
    puppet = stage.peer.node.instance_id
    loads = [LoadReport(puppet, "", "prefill", 0, 0, 0, 8, 8, 0, costs=costs)]
    subject = load_subject(stage.peer.node.config.namespace, puppet)

    async def report() -> None:
        while True:
            stage.peer.node.events.publish(subject, encode(loads[-1]))
            await asyncio.sleep(0.02)  # as a worker does, more often

    reports = asyncio.create_task(report())
    try:
        await eventually(lambda: puppet in stage.worker.prefill_view._loads)
        yield loads
    finally:
        reports.cancel()


async def test_losing_the_queue_spares_claimed_handoffs_and_no_request(
    runtime_config: RuntimeConfig, tiny_model: Path
) -> None:
    with NatsServer() as nats:
        config = runtime_config.model_copy(update={"nats_url": nats.url})
        async with Stage(config, tiny_model, claim_timeout_ms=2000) as stage:
            prompts = [fresh_prompt(18, seed) for seed in range(5)]
            answers = [await stage.ask(prompt) for prompt in prompts[:2]]
            works = [await stage.claimed(), await stage.claimed()]
            answers.append(await stage.ask(prompts[2]))  # stays unclaimed
            await eventually(lambda: stage.worker.handoffs.num_open == 3)
            nats.kill()
            answers += [await stage.ask(prompt) for prompt in prompts[3:]]
            for work in works:
                await stage.deliver(work)
            texts = await asyncio.gather(*(answer.whole() for answer in answers))
            assert texts == [stage.undisturbed(prompt) for prompt in prompts]
            places = [answer.report.place for answer in answers if answer.report is not None]
            assert places == ["remote", "remote", "local", "local", "local"]
            await stage.balanced()


async def test_a_late_answer_of_the_broker_does_not_undo_a_claim(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, claimed = stage.worker.queue.publish, asyncio.Event()

    async def publish_late(job: PrefillJob) -> None:
        await publish(job)
        await claimed.wait()
        raise ServiceError("no answer within 0.5 s")

    monkeypatch.setattr(stage.worker.queue, "publish", publish_late)
    answer, work = await stage.handoff(PROMPT)
    claimed.set()
    await eventually(lambda: not stage.worker.handoffs._tasks)
    await stage.deliver(work)
    assert await answer.whole() == stage.undisturbed(PROMPT)
    assert answer.report is not None and answer.report.place == "remote"


async def test_kv_that_cannot_be_verified_is_not_used(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> list[int]:
        raise TransferError("the transfer thread is gone")

    monkeypatch.setattr(stage.worker.handoffs.group, "checksums", fail)
    answer, work = await stage.handoff(PROMPT)
    await stage.deliver(work)
    assert await answer.whole() == stage.undisturbed(PROMPT)


# ---- load, drain and stop ----------------------------------------------------------------------


async def test_a_burst_does_not_queue_more_than_its_limit(
    runtime_config: RuntimeConfig, tiny_model: Path
) -> None:
    limits = {"policy": "threshold", "max_local_prefill_length": 0, "max_prefill_queue_size": 2}
    async with Stage(runtime_config, tiny_model, claim_timeout_ms=150, **limits) as stage:
        prompts = [fresh_prompt(12, seed) for seed in range(8)]
        before = count("decode_prefills_total", cause="queue_full", place="local")
        gate = threading.Event()
        stage.worker.loop.post(lambda engine: gate.wait(60))  # the whole burst waits behind it
        answers = [await stage.ask(prompt) for prompt in prompts]
        await eventually(lambda: len(stage.worker.active) == len(prompts))
        gate.set()
        texts = await asyncio.gather(*(answer.whole() for answer in answers))
        assert texts == [stage.undisturbed(prompt) for prompt in prompts]
        assert count("decode_prefills_total", cause="queue_full", place="local") == before + 6
        await stage.balanced()


async def test_a_draining_worker_finishes_its_remote_prefills(own_stage: Stage) -> None:
    answers = [await own_stage.ask(PROMPT), await own_stage.ask(fresh_prompt(9, seed=1))]
    work = await own_stage.claimed()
    draining = asyncio.create_task(own_stage.worker.drain())
    await eventually(lambda: own_stage.worker._is_draining)
    with pytest.raises(UnavailableError, match="draining"):
        await (await own_stage.ask(PROMPT)).whole()
    discovery, namespace = own_stage.peer.node.discovery, own_stage.peer.node.config.namespace
    assert len(await discovery.get_prefix(transfer_prefix(namespace))) == 1
    await own_stage.deliver(await own_stage.claimed())
    await own_stage.deliver(work)
    texts = [await answer.whole() for answer in answers]
    assert texts == [own_stage.undisturbed(PROMPT), own_stage.undisturbed(fresh_prompt(9, seed=1))]
    assert all(answer.report and answer.report.place == "remote" for answer in answers)
    await draining


async def test_a_stopped_worker_retracts_its_claims_and_fails_its_requests(
    runtime_config: RuntimeConfig, tiny_model: Path
) -> None:
    async with Stage(runtime_config, tiny_model) as stage:
        answers = [await stage.ask(PROMPT), await stage.ask(fresh_prompt(9, seed=1))]
        work = await stage.claimed()
        await stage.process.stop()
        await stage.retracted(work)
        for answer in answers:
            with pytest.raises(IncompleteError, match="stopped"):
                await answer.whole()

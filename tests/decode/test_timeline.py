"""A request's timeline on its decode worker: its marks, its last delta, metrics and trace."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from tandem.decode.config import DisaggConfig
from tandem.decode.decision import Decision, PlacementCause
from tandem.decode.metrics import DecodeMetrics
from tandem.decode.requests import ActiveRequest
from tandem.engine.schedule.outputs import LoadStats, SequenceOutput
from tandem.engine.schedule.sequence import Sequence
from tandem.queue.prefill_queue import QueueDepth
from tandem.runtime.address import new_id
from tandem.runtime.context import RequestContext
from tandem.runtime.errors import CapacityError
from tandem.runtime.tracing.trace import TraceFile
from tandem.runtime.wire.messages import (
    GenerateRequest,
    PrefillPlace,
    SamplingParams,
    StopConditions,
    TokenDelta,
    pack_tokens,
)
from tests.decode.prefill_peer import PROMPT as LONG_PROMPT
from tests.decode.prefill_peer import Stage
from tests.handoff_peer import MODEL
from tests.services import eventually

PROMPT = [1, 2, 3]
JOB = {"first_write": 3.0, "computed": 6.0, "last_write": 9.0}


class Listener:
    """A client: what it is sent."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []

    def send(self, payload: bytes) -> None:
        self.deltas.append(msgspec.msgpack.decode(payload, type=TokenDelta))

    def end(self) -> None:
        assert self.deltas[-1].finish_reason is not None


def request(place: PrefillPlace = "local") -> tuple[ActiveRequest, list[TokenDelta]]:
    sampling, stop = SamplingParams(), StopConditions(max_tokens=8)
    asked = GenerateRequest("r-1", "m", pack_tokens(PROMPT), sampling, stop, deadline_ms=1000)
    seq = Sequence("r-1", list(PROMPT), len(PROMPT), sampling, stop)
    client: Any = Listener()
    done = asyncio.get_running_loop().create_future()
    active = ActiveRequest(asked, seq, RequestContext(), client, done)
    active.decision = Decision(
        place, PlacementCause.LONG if place == "remote" else PlacementCause.SHORT
    )
    return active, client.deltas


def handed_off() -> tuple[ActiveRequest, list[TokenDelta]]:
    """As it is when the KV of a remote prefill is proven; its client has the first token."""
    active, deltas = request("remote")
    active.timeline.started_at -= 0.1
    active.timeline.mark("queued", active.timeline.started_at + 0.002)
    active.timeline.mark("claimed", active.timeline.started_at + 0.004)
    active.timeline.merge(JOB, "claimed")
    active.handoff_id = "ab"
    active.send([7], None)
    active.timeline.mark("landed")
    active.timeline.mark("verified")
    return active, deltas


async def test_the_report_of_a_first_token_has_its_prediction_after_the_wait_for_placement() -> (
    None
):
    active, deltas = request()
    active.timeline.started_at -= 0.1
    active.place(Decision("local", PlacementCause.SHORT, local_ms=12.0, remote_ms=99.0))
    active.send([7], None)
    assert deltas[0].prefill is not None
    assert (
        112.0
        <= deltas[0].prefill.predicted_ms
        == pytest.approx(active.uncounted_ms + 12.0, abs=1e-3)
    )
    stages_ms = deltas[0].prefill.timeline_ms
    assert active.uncounted_ms <= stages_ms["first_token"] + 1e-3


async def test_a_placement_without_learned_costs_predicts_nothing() -> None:
    active, deltas = request()
    active.place(Decision("local", PlacementCause.SHORT))
    active.send([7], None)
    assert deltas[0].prefill is not None
    assert deltas[0].prefill.predicted_ms == 0.0


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"tandem_{name}", labels) or 0.0


async def test_only_the_last_delta_carries_the_whole_timeline() -> None:
    active, deltas = handed_off()
    for token in (8, 9):
        active.emit(SequenceOutput("r-1", [token]))
    active.emit(SequenceOutput("r-1", [10], finish_reason="length"))
    assert [delta.timeline_ms is None for delta in deltas] == [True, True, True, False]
    assert deltas[-1].timeline_ms == active.timeline.ms()
    assert list(active.timeline.ms()) == [
        "received", "queued", "claimed", "first_write", "computed", "last_write", "first_token",
        "landed", "verified", "first_step",
    ]  # fmt: skip
    report = deltas[0].prefill
    assert report is not None and "landed" not in report.timeline_ms


async def test_the_first_step_is_the_second_token_even_one_that_is_not_sent() -> None:
    active, deltas = request()
    active.emit(SequenceOutput("r-1", [7]))
    assert "first_step" not in active.timeline.ms()
    active.emit(SequenceOutput("r-1", [], finish_reason="stop", stop_token_id=2))
    stages = active.timeline.ms()
    assert stages["first_token"] <= stages["first_step"]
    assert deltas[-1].timeline_ms == stages


@pytest.mark.parametrize("stop_token_id", [None, 2])
async def test_an_answer_of_one_token_has_no_first_step(stop_token_id: int | None) -> None:
    active, deltas = request()
    tokens = [] if stop_token_id else [7]
    active.emit(SequenceOutput("r-1", tokens, finish_reason="stop", stop_token_id=stop_token_id))
    assert deltas[-1].timeline_ms is not None
    assert list(deltas[-1].timeline_ms) == ["received", "first_token"]


async def test_a_handoff_is_observed_by_stage_and_by_interval() -> None:
    model = new_id()
    metrics = DecodeMetrics(model)
    active, _ = handed_off()
    active.emit(SequenceOutput("r-1", [8], finish_reason="length"))
    metrics.finished(active, active.outcome)
    for stage in ("queued", "computed", "last_write", "landed", "verified", "first_step"):
        assert value("decode_handoff_stage_seconds_count", model=model, stage=stage) == 1, stage
    for stage in ("received", "first_token"):
        assert value("decode_handoff_stage_seconds_count", model=model, stage=stage) == 0, stage
    sums = {
        interval: value("decode_handoff_interval_seconds_sum", model=model, interval=interval)
        for interval in ("queue", "compute", "exposed_transfer", "prefix_pull")
    }
    assert (sums["queue"], sums["compute"]) == pytest.approx((0.002, 0.006))
    assert sums["exposed_transfer"] >= 0.089 and sums["prefix_pull"] == 0
    assert value("decode_first_token_seconds_count", model=model, place="remote") == 1
    assert value("decode_requests_total", model=model, outcome="finished") == 1


async def test_local_and_taken_back_prompts_are_no_handoffs() -> None:
    model = new_id()
    metrics = DecodeMetrics(model)
    local, _ = request()
    taken_back, _ = request()
    taken_back.timeline.mark("queued")
    for active in (local, taken_back):
        active.emit(SequenceOutput("r-1", [7]))
        active.emit(SequenceOutput("r-1", [8], finish_reason="length"))
        metrics.finished(active, active.outcome)
    assert value("decode_first_token_seconds_count", model=model, place="local") == 2
    stages = {
        stage: value("decode_handoff_stage_seconds_count", model=model, stage=stage)
        for stage in ("queued", "first_step")
    }
    assert stages == {"queued": 1, "first_step": 0}
    for interval in ("placement", "queue", "first_step"):
        name = "decode_handoff_interval_seconds_count"
        assert value(name, model=model, interval=interval) == 0


def test_the_pools_state_and_preemptions_are_shown() -> None:
    model = new_id()
    metrics = DecodeMetrics(model)
    for num_preemptions in (2, 5):
        metrics.loaded(
            LoadStats(
                num_running=1,
                num_waiting=2,
                num_remote=3,
                num_waiting_tokens=4,
                num_blocks=50,
                num_free_blocks=6,
                num_cached_blocks=7,
                num_quarantined_blocks=8,
                num_preemptions=num_preemptions,
            )
        )
    blocks = {
        state: value("decode_kv_blocks", model=model, state=state)
        for state in ("total", "free", "cached", "quarantined")
    }
    assert blocks == {"total": 50, "free": 6, "cached": 7, "quarantined": 8}
    assert value("decode_sequences", model=model, state="remote") == 3
    assert value("decode_preemptions_total", model=model) == 5


def test_the_queue_and_the_targets_in_force_are_shown() -> None:
    model = new_id()
    metrics = DecodeMetrics(model)
    metrics.queued(QueueDepth(num_jobs=3, num_tokens=900, num_in_progress=2, num_dead=1))
    metrics.targets(DisaggConfig(ttft_target_ms=250, itl_target_ms=40))
    jobs = {
        state: value("decode_queued_jobs", model=model, state=state)
        for state in ("waiting", "in_progress", "dead")
    }
    assert jobs == {"waiting": 3, "in_progress": 2, "dead": 1}
    assert value("decode_queued_tokens", model=model) == 900
    assert value("decode_target_seconds", model=model, target="ttft") == 0.25
    assert value("decode_target_seconds", model=model, target="itl") == 0.04
    metrics.targets(DisaggConfig(itl_target_ms=40))
    ttft = {"model": model, "target": "ttft"}
    assert REGISTRY.get_sample_value("tandem_decode_target_seconds", ttft) is None
    assert value("decode_target_seconds", model=model, target="itl") == 0.04
    metrics.queued(None)
    assert value("decode_queued_jobs", model=model, state="waiting") == 0
    assert value("decode_queued_jobs", model=model, state="dead") == 1


def test_every_end_of_a_handoff_begins_at_zero() -> None:
    model = new_id()
    DecodeMetrics(model)
    for end in ("admitted", "corrupt", "peer_lost", "unclaimed"):
        labels = {"model": model, "end": end}
        assert REGISTRY.get_sample_value("tandem_decode_handoffs_total", labels) == 0


async def test_a_finished_request_is_a_row_of_the_trace(tmp_path: Path) -> None:
    async with TraceFile(str(tmp_path / "t.json"), "decode", new_id()) as trace:
        active, _ = handed_off()
        active.emit(SequenceOutput("r-1", [8], finish_reason="length"))
        active.record_in(trace)
        failed, _ = request()
        failed.fail(CapacityError("too long"))
        failed.record_in(trace)
    assert trace.path is not None
    events = json.loads(trace.path.read_text())
    first, second = [event["args"] for event in events if event["name"] == "request"]
    assert (first["outcome"], first["place"], first["handoff_id"]) == ("finished", "remote", "ab")
    assert (first["num_prompt_tokens"], first["num_sent_tokens"]) == (3, 2)
    assert (second["outcome"], second["cause"]) == ("capacity", "short")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_real_handoff_is_observed_in_all_its_parts(stage: Stage) -> None:
    parts = ("placement", "queue", "exposed_transfer", "verification", "first_step")

    def counts() -> list[float]:
        name = "decode_handoff_interval_seconds_count"
        return [value(name, model=MODEL, interval=part) for part in (*parts, "compute", "answer")]

    before = counts()
    answer, work = await stage.handoff(LONG_PROMPT)
    assert work.first is not None
    work.first = msgspec.structs.replace(work.first, timeline_ms={"computed": 0.001})
    await stage.deliver(work)
    await answer.whole()
    await eventually(lambda: counts() == [count + 1 for count in before])

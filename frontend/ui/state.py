"""The state that a page shows: what the collector sends, several times a second, as JSON."""

import msgspec

from tandem.router.idle import IdlePrefill
from tandem.runtime.membership.instance_report import InstanceReport
from tandem.runtime.store.progress_report import ProgressReport
from tandem.runtime.wire.cluster_messages import WorkerStatus
from tandem.runtime.wire.messages import PrefillPlace

STOPPED_S = 3.0  # without an answer; a busy worker answers between two steps


class WorkerState(msgspec.Struct, frozen=True):
    """One worker. The counts are those of its last answer."""

    id: str
    role: str
    model: str
    host: str
    state: str
    is_stopped: bool  # it does not answer, or it has left the cluster
    num_ranks: int = 1  # processes that compute its model together
    num_running: int = 0
    num_waiting: int = 0
    num_jobs: int = 0  # prompts of other workers
    num_open_handoffs: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0


class StartState(msgspec.Struct, frozen=True):
    """A worker that does not serve yet."""

    id: str
    name: str
    line: str  # its progress, with the remaining time
    share: float | None  # done, 0 to 1


class QueueState(msgspec.Struct, frozen=True):
    """The prefill queue of one deployment of a model, as a decode worker last read it."""

    model: str
    deployment: str
    num_jobs: int
    num_tokens: int


class Placement(msgspec.Struct, frozen=True):
    """The number of prompts that were computed at one place for one cause."""

    place: PrefillPlace
    cause: str
    num: int
    example: str  # the reason of the last one, with its numbers


class HandoffState(msgspec.Struct, frozen=True):
    """One prompt that went to the prefill queue, and its timeline so far."""

    number: int  # counts up
    place: PrefillPlace  # local: the handoff was given up
    decode_instance: str
    prefill_instance: str
    timeline_ms: dict[str, float]


class Latency(msgspec.Struct, frozen=True):
    """TTFT or ITL of a model; the lists are over time, in equal steps, oldest first."""

    model: str
    kind: str  # ttft | itl
    target_ms: float | None
    num: int
    median_ms: float | None
    p95_ms: float | None
    p95s_ms: list[float | None]


class PageState(msgspec.Struct, frozen=True):
    """All that a page shows."""

    window_s: float  # that latencies and placements cover
    workers: list[WorkerState]
    starting: list[StartState]
    queues: list[QueueState]
    planners: list[str]  # lines: the last reading of each, and its last change of a role
    idle_prefill: list[IdlePrefill]
    thresholds: dict[str, dict[str, str | int | float | bool]]  # model |-> name |-> value
    latencies: list[Latency]
    placements: list[Placement]
    handoffs: list[HandoffState]  # the last ones, oldest first
    begun: list[HandoffState]  # the last remote prompts whose answer began


def start_state(report_id: str, report: ProgressReport) -> StartState:
    """Return the state of a worker that reports its progress."""
    name = f"{report.component} of {report.model} at {report.host} (process {report.pid})"
    return StartState(report_id, name, report.line, report.share)


def worker_state(
    report: InstanceReport, last: WorkerStatus | None, silent_s: float, *, is_gone: bool
) -> WorkerState:
    """Return the state of a worker whose last answer, `last`, came `silent_s` ago."""
    instance, state = report.instance, report.state
    is_stopped = is_gone or silent_s > STOPPED_S
    if is_gone:
        state = f"has left the cluster, {silent_s:.0f} s ago"
    elif is_stopped:
        state = f"does not answer, for {silent_s:.0f} s"
    elif last is not None:
        state = last.state
    if last is None:
        role, model = report.role, instance.model
        return WorkerState(instance.instance_id, role, model, instance.host, state, is_stopped)
    load = last.load
    return WorkerState(
        id=instance.instance_id,
        role=load.role,
        model=instance.model,
        host=instance.host,
        state=state,
        is_stopped=is_stopped,
        num_ranks=last.count("tp") or 1,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_jobs=last.count("num_jobs"),
        num_open_handoffs=last.count("num_open_handoffs"),
        num_blocks=load.num_blocks,
        num_used_blocks=load.num_blocks - load.num_free_blocks - load.num_cached_blocks,
        num_cached_blocks=load.num_cached_blocks,
    )

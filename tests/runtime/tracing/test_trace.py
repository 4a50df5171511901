"""Trace files: what a viewer reads in them, and that writing them never gets in the way."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tandem.runtime.address import new_id
from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError
from tandem.runtime.tracing import trace
from tandem.runtime.tracing.span_record import SpanRecord, SpanRole
from tandem.runtime.tracing.timeline import Stage
from tandem.runtime.tracing.trace import MAX_PENDING_BYTES, TraceFile, trace_path
from tests.runtime.tracing.timelines import aged
from tests.services import eventually

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
HANDOFF: dict[Stage, float] = {
    "queued": 2.0, "claimed": 5.0, "first_write": 12.0, "computed": 20.0, "first_token": 21.0,
    "last_write": 24.0, "landed": 25.0, "verified": 25.5, "first_step": 30.0,
}  # fmt: skip
Event = dict[str, Any]


def ended(
    request_id: str = "r-1",
    stages_ms: dict[Stage, float] = HANDOFF,
    attributes: dict[str, str | int] | None = None,
    headers: dict[str, str] | None = None,
    role: SpanRole = "decode",
) -> SpanRecord:
    """A request that has just ended, after a second."""
    return SpanRecord.of(role, request_id, aged(stages_ms), attributes or {}, headers or {})


def events_in(path: Path) -> list[Event]:
    found: list[Event] = json.loads(path.read_text())
    return found


def sizes(folder: Path) -> dict[Path, int]:
    """Bytes of each file."""
    return {path: path.stat().st_size for path in folder.iterdir()}


def slices(events: list[Event]) -> dict[str, float]:
    """Name |-> ms, the whole request left out."""
    return {e["name"]: e["dur"] / 1e3 for e in events if e["ph"] == "X" and e["name"] != "request"}


async def test_a_handoff_is_a_row_of_slices_that_fill_the_request(tmp_path: Path) -> None:
    async with TraceFile(str(tmp_path / "t.json"), "decode", new_id()) as trace:
        attributes: dict[str, str | int] = {"place": "remote", "num_tokens": 3}
        trace.record(ended(attributes=attributes, headers=HEADERS))
    assert trace.path is not None
    events = events_in(trace.path)
    parts = slices(events)
    assert parts.pop("decode") >= 969
    assert parts == pytest.approx(
        {
            "placement": 2, "queue": 3, "compute": 15, "exposed transfer": 5, "verification": 0.5,
            "first step": 4.5,
        },
        abs=0.01,
    )  # fmt: skip
    (request,) = [event for event in events if event["name"] == "request"]
    assert request["args"] == {
        "request_id": "r-1", "place": "remote", "num_tokens": 3, "trace_id": TRACE_ID,
    }  # fmt: skip
    ticks = [event["name"] for event in events if event["ph"] == "i"]
    assert ticks == ["first_write", "first_token", "last_write"]
    row = [event for event in events if event["ph"] == "X" and event is not request]
    for earlier, later in itertools.pairwise(row):
        assert later["ts"] - earlier["ts"] == pytest.approx(earlier["dur"], abs=1)
    assert row[-1]["ts"] + row[-1]["dur"] <= request["ts"] + request["dur"] + 1


async def test_a_local_prefill_is_one_slice(tmp_path: Path) -> None:
    async with TraceFile(str(tmp_path), "decode", new_id()) as trace:
        trace.record(ended(stages_ms={"first_token": 10.0, "first_step": 14.0}))
    assert trace.path is not None and trace.path.parent == tmp_path
    events = events_in(trace.path)
    assert list(slices(events)) == ["prefill", "first step", "decode"]
    assert not [event for event in events if event["ph"] == "i"]


async def test_two_workers_files_lie_side_by_side(tmp_path: Path) -> None:
    """One clock, a file and a process of its own each, a row per request."""
    path = str(tmp_path / "trace.json")
    async with (
        TraceFile(path, "decode", new_id()) as decode,
        TraceFile(path, "prefill", new_id()) as prefill,
    ):
        decode.record(ended(attributes={"handoff_id": "ab"}))
        decode.record(ended("r-2"))
        job: dict[Stage, float] = {"claimed": 2.0, "computed": 17.0, "last_write": 21.0}
        prefill.record(ended("ab.1", job, {"handoff_id": "ab"}, role="prefill"))
    assert decode.path is not None and prefill.path is not None
    ours, theirs = events_in(decode.path), events_in(prefill.path)
    assert {e["pid"] for e in ours} & {e["pid"] for e in theirs} == set()
    rows = {e["args"]["name"]: e["tid"] for e in ours if e["name"] == "thread_name"}
    assert rows == {"r-1": 1, "r-2": 2}
    assert list(slices(theirs)) == ["claim", "compute", "exposed transfer", "settle"]
    starts = [next(e["ts"] for e in side if e["name"] == "request") for side in (ours, theirs)]
    assert abs(starts[0] - starts[1]) < 10e6
    (name,) = [e["args"]["name"] for e in theirs if e["name"] == "process_name"]
    assert name.startswith("prefill ")


async def test_a_file_that_was_never_closed_can_be_read(tmp_path: Path) -> None:
    """Viewers add the bracket that a killed process did not write."""
    trace = TraceFile(str(tmp_path / "t.json"), "decode", new_id())
    await trace.__aenter__()
    trace.record(ended())
    trace._write(bytes(trace._pending), False)
    assert trace.path is not None
    events = json.loads(trace.path.read_text() + "]")
    assert events[-1]["name"] == "decode"
    trace._pending.clear()
    await trace.__aexit__(None, None, None)


async def test_a_full_disk_ends_the_trace_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    instance = new_id()
    path = str(tmp_path / "t.json")
    trace_path(path, "decode", instance).symlink_to("/dev/full")
    async with TraceFile(path, "decode", instance) as trace:
        trace._write(b"[", False)
        for _ in range(3):
            trace.record(ended())
    assert trace.num_dropped == 3
    assert "ends here" in caplog.text and "3 requests are missing" in caplog.text


async def test_a_full_file_is_put_aside_once_and_a_new_one_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "MAX_FILE_BYTES", 5000)
    monkeypatch.setattr(trace, "FLUSH_INTERVAL_S", 0.01)
    async with TraceFile(str(tmp_path / "t.json"), "decode", new_id()) as traced:
        assert traced.path is not None
        before = trace.before_path(traced.path)
        for number in range(30):
            traced.record(ended(f"r-{number}"))
            await eventually(lambda: not traced._pending)
    files = sizes(tmp_path)
    assert files.keys() == {traced.path, before}
    assert max(files.values()) < 10_000
    rows = [each["args"]["name"] for path in (before, traced.path) for each in events_in(path)
            if each["name"] == "thread_name"]  # fmt: skip
    assert rows == [f"r-{number}" for number in range(30 - len(rows), 30)]
    assert [events_in(path)[0]["name"] for path in files] == ["process_name"] * 2


async def test_a_disk_that_does_not_keep_up_costs_a_bounded_buffer(tmp_path: Path) -> None:
    async with TraceFile(str(tmp_path / "t.json"), "decode", new_id()) as trace:
        trace.record(ended(attributes={"reason": "x" * MAX_PENDING_BYTES}))
        trace.record(ended("r-2"))
    assert trace.num_dropped == 1


async def test_without_a_path_nothing_is_written() -> None:
    async with TraceFile(None, "prefill", new_id()) as trace:
        trace.record(ended())
    assert trace.path is None and not trace._pending


async def test_a_file_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "t.json"
    with pytest.raises(ConfigError, match=r"runtime\.trace_file: cannot write .*missing"):
        await TraceFile(str(missing), "decode", new_id()).__aenter__()


async def test_a_header_that_is_no_traceparent_is_not_passed_on(tmp_path: Path) -> None:
    async with TraceFile(str(tmp_path / "t.json"), "decode", new_id()) as trace:
        trace.record(ended(headers={"traceparent": "00-nothex-01"}))
    assert trace.path is not None and "trace_id" not in trace.path.read_text()


def test_every_worker_has_a_file_of_its_own(tmp_path: Path) -> None:
    assert trace_path("/tmp/t.json", "decode", "ab") == Path("/tmp/t-decode-ab.json")
    assert trace_path("t", "prefill", "ab") == Path("t-prefill-ab")
    assert trace_path("/x/{instance}.json", "decode", "ab") == Path("/x/decode-ab.json")
    assert trace_path(str(tmp_path), "decode", "ab") == tmp_path / "trace-decode-ab.json"


def test_an_empty_trace_file_is_refused() -> None:
    with pytest.raises(ValueError, match="trace_file"):
        RuntimeConfig.model_validate({"trace_file": ""})

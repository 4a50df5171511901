"""Measured runs for pictures."""

from tandem.bench.client.record import RequestRecord
from tandem.bench.load.metrics import DEFINITIONS, summarize
from tandem.bench.load.runs import Document, Plan, RunFigures, Settings, Side
from tandem.bench.report.document import SCHEMA_VERSION

LIMITS = {"ttft": 250.0}


def answered(*times_s: float, at_s: float = 0.0, place: str = "remote") -> RequestRecord:
    """Return a request due at `at_s` whose tokens came at these times since then."""
    times = [at_s + time_s for time_s in times_s]
    return RequestRecord(
        *(0, at_s, at_s, times[-1], times),
        num_output_tokens=len(times),
        has_usage=True,
        prefill_place=place,
        timeline_ms={},
    )


def load(num_requests: int, ttft_s: float, itl_s: float = 0.02) -> list[RequestRecord]:
    """Return a request every 100 ms whose answers have 8 tokens."""
    times = [ttft_s + itl_s * at for at in range(8)]
    return [answered(*times, at_s=0.1 * at) for at in range(num_requests)]


def run(requests: list[RequestRecord]) -> RunFigures:
    return RunFigures(summarize(requests, LIMITS), requests)


def side(label: str, ttft_s: float, rate: float | None = None, curve: str | None = None) -> Side:
    return Side(label, [run(load(40, ttft_s))], rate, curve=curve)


def document(requests: list[RequestRecord], **more: object) -> Document:
    """Return the result of one run."""
    return Document(
        schema_version=SCHEMA_VERSION,
        started_at="2026-11-23T08:00:00+00:00",
        ended_at="2026-11-23T08:01:00+00:00",
        command=("tandem", "bench"),
        commit="abc",
        machine={"cpu": "a CPU", "num_cpus": 2, "memory_bytes": 8 << 30},
        settings=Settings(url="http://127.0.0.1:8000", goodput=("ttft:250",), plan=Plan(4.0)),
        how=DEFINITIONS,
        title="model at http://127.0.0.1:8000",
        summary=summarize(requests, LIMITS),
        requests=tuple(requests),
        **more,  # type: ignore[arg-type]
    )

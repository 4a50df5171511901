"""The measured runs behind a picture, read from the documents that `tandem bench` writes."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tandem.bench.client.record import RequestRecord
from tandem.bench.load.metrics import Summary
from tandem.bench.report.document import SCHEMA_VERSION
from tandem.runtime.errors import ConfigError

MAX_DOCUMENT_BYTES = 2 << 30
ONLY_RUN = "this run"


class RunFigures(msgspec.Struct, frozen=True):
    """One run: its figures, and its requests where the document has them."""

    summary: Summary
    requests: Sequence[RequestRecord] = ()
    warnings: Sequence[str] = ()

    @property
    def good(self) -> list[RequestRecord]:
        return [record for record in self.requests if record.succeeded]

    def value(self, metric: str) -> float | None:
        """Return a figure by its name, as `goodput` or `ttft p50` (ms); None without one."""
        name, _, mark = metric.partition(" ")
        found = self.summary.latencies_ms.get(name) if mark else self.summary
        return None if found is None else getattr(found, mark or name)


@dataclass(frozen=True, slots=True)
class Side:
    """The rounds of one label: a run, a side of a comparison, or a point of a sweep."""

    label: str
    rounds: Sequence[RunFigures]
    request_rate: float | None = None  # offered, per second
    num_workers: int = 1
    curve: str | None = None  # of a sweep's point: the name of the sweep, empty for the only one

    @property
    def good(self) -> list[RequestRecord]:
        return [record for run in self.rounds for record in run.good]

    def value(self, metric: str) -> float | None:
        """Return the median of a figure over the rounds; None where a round lacks it."""
        found = [run.value(metric) for run in self.rounds]
        complete = [value for value in found if value is not None]
        return statistics.median(complete) if found and len(complete) == len(found) else None


class Plan(msgspec.Struct, frozen=True):
    """The part of a document's plan that a picture shows."""

    request_rate: float | None = None


class Settings(msgspec.Struct, frozen=True):
    """The part of a document's settings that a picture shows."""

    url: str = ""
    seed: int | None = None
    workers: Annotated[int, msgspec.Meta(ge=1)] = 1
    goodput: tuple[str, ...] = ()
    workload: dict[str, Any] = {}
    plan: Plan = Plan()


class _Leg(msgspec.Struct, frozen=True):
    label: str


class _Legs(msgspec.Struct, frozen=True):
    legs: dict[str, _Leg]


class _SweepPoint(RunFigures, frozen=True):
    label: str = ""
    request_rate: float | None = None


class Document(msgspec.Struct, frozen=True):
    """A result of `tandem bench`; it has a summary, rounds of two sides, or a sweep."""

    schema_version: int
    started_at: str
    ended_at: str
    command: tuple[str, ...]
    commit: str
    machine: dict[str, Any]
    settings: Settings
    how: dict[str, str]
    title: str = ""  # the model and the address
    interrupted: bool = False
    summary: Summary | None = None
    requests: tuple[RequestRecord, ...] = ()
    warnings: tuple[str, ...] = ()
    comparison: _Legs | None = None
    rounds: dict[str, tuple[RunFigures, ...]] = {}
    sweep: tuple[_SweepPoint, ...] = ()

    def sides(self, name: str = "") -> Iterator[Side]:
        """Yield the measured sides; `name` tells this document from others on the page."""
        begin = f"{name}: " if name else ""
        plan, num_workers = self.settings.plan, self.settings.workers
        load = plan.request_rate, num_workers
        if self.summary is not None:
            run = RunFigures(self.summary, self.requests, self.warnings)
            yield Side(name or ONLY_RUN, [run], *load)
        for leg, found in self.rounds.items():
            label = f"{begin}{leg}"
            if self.comparison is not None and leg in self.comparison.legs:
                label += f": {self.comparison.legs[leg].label}"
            yield Side(label, found, *load)
        for point in self.sweep:
            label = f"{begin}{point.label}"
            yield Side(label, [point], point.request_rate, num_workers, curve=name)


@dataclass(frozen=True, slots=True)
class Pictured:
    """The documents of a page and their sides; sides without a finished run are left out."""

    documents: Sequence[Document]
    sides: Sequence[Side] = field(default_factory=list)

    @classmethod
    def of(cls, documents: Sequence[tuple[str, Document]]) -> "Pictured":
        """Return the sides of named documents; the names show where there are several."""
        several = len(documents) > 1
        sides = [
            side
            for name, document in documents
            for side in document.sides(name if several else "")
            if side.rounds
        ]
        return cls([document for _, document in documents], sides)


def read_document(path: Path) -> Document:
    """Return the document in a file. Raises ConfigError naming the file, and the field at fault."""
    try:
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise ConfigError(f"{path}: a document has {MAX_DOCUMENT_BYTES} bytes at most")
        return document_of(msgspec.json.decode(path.read_bytes()))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no result of tandem bench --output: {error}") from error


def document_of(whole: dict[str, Any]) -> Document:
    """Return a document as types. Raises msgspec.ValidationError naming the field at fault."""
    found = msgspec.convert(whole, Document)
    if found.schema_version != SCHEMA_VERSION:
        raise msgspec.ValidationError(
            f"schema_version is {found.schema_version}, not {SCHEMA_VERSION}"
        )
    if found.summary is None and not found.rounds and not found.sweep:
        raise msgspec.ValidationError("there is no summary, no rounds and no sweep in it")
    return found

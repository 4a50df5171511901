"""The state that `tandem top` shows, kept from one reading to the next. Pure."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem.launch.cluster.status import ClusterReport, place_of
from tandem.launch.top.collect import PROMPTS, Reading
from tandem.launch.top.window import Window, of_kind, quantile_ms
from tandem.runtime.membership.instance_report import InstanceReport
from tandem.runtime.wire.cluster_messages import WorkerStatus

KEEP_GONE_S = 300.0


@dataclass(slots=True)
class Member:
    """A process since it was first seen, with its last answer."""

    report: InstanceReport
    answered_s: float
    last: WorkerStatus | None = None
    is_gone: bool = False

    @property
    def is_well(self) -> bool:
        """True for a process that answers."""
        is_worker = self.report.instance.component != "frontend"
        has_answered = self.report.worker is not None if is_worker else self.report.state == "ready"
        return has_answered and not self.is_gone

    def state(self, now_s: float) -> str:
        """Return the state in words, with the age of an old one."""
        silent = f"{now_s - self.answered_s:.0f} s"
        if self.is_gone:
            return f"left the cluster {silent} ago"
        return self.report.state if self.is_well else f"{self.report.state}, for {silent}"


@dataclass(frozen=True, slots=True)
class Latency:
    """TTFT or ITL of one model over the window."""

    model: str
    kind: str
    median_ms: float
    p95_ms: float | None
    target_ms: float | None

    @property
    def is_missed(self) -> bool:
        return self.target_ms is not None and (self.p95_ms or 0.0) > self.target_ms


@dataclass(slots=True)
class Board:
    """The last reading and the minute before it."""

    report: ClusterReport | None = None
    members: dict[str, Member] = field(default_factory=dict)  # by instance id
    window: Window = field(default_factory=Window)
    problems: tuple[str, ...] = ()
    read_s: float = 0.0  # perf_counter of the last reading

    def add(self, now_s: float, reading: Reading) -> None:
        """Show a new reading."""
        self.report, self.problems, self.read_s = reading.report, reading.problems, now_s
        self.window.add(now_s, reading.counts)
        present = {each.instance.instance_id: each for each in reading.report.instances}
        for instance_id, report in present.items():
            member = self.members.setdefault(instance_id, Member(report, now_s))
            member.report, member.is_gone = report, False
            member.last = report.worker or member.last
            if member.is_well:
                member.answered_s = now_s
        for instance_id, member in list(self.members.items()):
            member.is_gone = instance_id not in present
            if member.is_gone and now_s - member.answered_s > KEEP_GONE_S:
                del self.members[instance_id]

    def in_order(self) -> list[Member]:
        """Return the processes by role, those that do not answer before others of their role."""
        members = self.members.values()
        return sorted(members, key=lambda each: (place_of(each.report), each.is_well))

    def placements(self) -> list[tuple[str, str, int]]:
        """Return place, cause and number of the prompts in the window, the most frequent first."""
        found = of_kind(self.window.grown(), PROMPTS)
        rows = [(place, cause, round(value)) for (place, cause), value in found if value > 0]
        return sorted(rows, key=lambda row: -row[2])

    def latencies(self) -> Iterator[Latency]:
        """Yield TTFT and ITL of each model that answered in the window."""
        grown = self.window.grown()
        for kind in ("ttft", "itl"):
            buckets: dict[str, dict[float, float]] = defaultdict(dict)
            for (model, bound), value in of_kind(grown, kind):
                buckets[model][float(bound)] = value
            for model, of_model in buckets.items():
                median, p95 = (quantile_ms(of_model, share) for share in (0.5, 0.95))
                if median is not None:
                    yield Latency(model, kind, median, p95, self._target_ms(model, kind))

    def _target_ms(self, model: str, kind: str) -> float | None:
        for member in self.members.values():
            if member.last is not None and member.report.instance.model == model:
                target = member.last.details.get(f"disagg.{kind}_target_ms")
                if isinstance(target, int | float):
                    return float(target)
        return None

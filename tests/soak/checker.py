"""Holds every answer of a soak against the undisturbed one, and says what it proves."""

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.soak.faults import Happened
from tests.soak.fleet import BOTH_CREW, FIXED_CREW, PREFILL
from tests.soak.load import Outcome

DRAIN_S = 10.0  # what a decode worker that is restarted lets its streams run
# Codes of changes of roles that had a reason: a worker, or etcd, is away, another change is under
# way, or no other decode worker is known.
CHANGE_REASONS = (
    "unavailable", "connection_lost", "incomplete", "deadline", "service", "invalid_request",
)  # fmt: skip
ERROR_LAG_S = 6.0  # from a decode worker's end, or its return, to the error of its last stream
PERCENTS = (50, 99, 100)
SHOWN = 12  # examples of each violation


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken."""

    kind: str
    what: str


@dataclass(slots=True)
class Flips:
    """Bits flipped in landed blocks, and what became of them."""

    injected: int = 0
    caught: int = 0
    moot: int = 0  # the handoff had ended: nobody reads the block
    lost: int = 0  # the worker died before it answered
    missed: int = 0
    counted: int = 0  # mismatches by the workers' own metric
    corrupt: int = 0  # mismatches that are none of ours


@dataclass(slots=True)
class Verdict:
    """What a soak has shown."""

    counts: dict[str, int]
    violations: list[Violation]
    places: dict[str, int]
    faults: dict[str, int]
    handoffs: dict[str, int]
    flips: Flips
    failovers_s: list[float] = field(default_factory=list)
    changes: dict[str, int] = field(default_factory=dict)  # of roles: what came of them
    changes_s: list[float] = field(default_factory=list)  # those that nothing disturbed
    num_while_all_prefill_dead: int = 0
    num_failed_then: int = 0
    num_unplanned_exits: int = 0
    num_questions: tuple[int, int] = (0, 0)  # drawn, and used: the others hang on rounding
    diary: list[str] = field(default_factory=list)
    duration_s: float = 0.0

    @property
    def is_good(self) -> bool:
        return not self.violations

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_good": self.is_good}


def classify(outcome: Outcome, expected: Outcome, excused: bool) -> str:
    """What an outcome is: the names that begin with `!` are violations."""
    text, right = outcome.text, expected.text
    if outcome.has_hung:
        return "!no outcome: hung"
    if outcome.broken:
        return "!no outcome: broken off"
    if outcome.has_left or outcome.error:
        if not right.startswith(text):
            return f"!{_difference(text, right)}"
        if outcome.has_left:
            return "left by the client"
        return "error of its own decode worker" if excused else "!error without a reason"
    same_end = (outcome.num_tokens, outcome.finish_reason) == (
        expected.num_tokens,
        expected.finish_reason,
    )
    if text != right:
        return f"!{_difference(text, right)}"
    return "right" if same_end else "!duplicated or missing tokens"


def _difference(text: str, right: str) -> str:
    """Tokens too many or too few leave one text a subsequence of the other."""
    shorter, longer = sorted((text, right), key=len)
    rest = iter(longer)
    if all(character in rest for character in shorter):
        return "duplicated or missing tokens"
    return "wrong tokens"


def is_excused(outcome: Outcome, happened: Sequence[Happened]) -> bool:
    """Whether the decode worker of a failed request was struck, or no other one was left."""
    struck: set[str] = set()
    for fault in _decode_deaths(happened):
        drain_s = DRAIN_S if fault.fault.kind == "restart" else 0.0
        if fault.began_at + drain_s > outcome.finished_at:
            continue
        if fault.ended_at + ERROR_LAG_S < outcome.started_at:
            continue
        if outcome.status == 200 and outcome.decode_instance in fault.instance_ids:
            return outcome.finished_at <= fault.ended_at + ERROR_LAG_S
        struck.update(fault.fault.targets)
    return outcome.status != 200 and any(
        struck >= set(crew.decode) for crew in (FIXED_CREW, BOTH_CREW)
    )


def _decode_deaths(happened: Sequence[Happened]) -> list[Happened]:
    """Faults that may end the streams of a decode worker; a lost service does not."""
    return [
        each
        for each in happened
        if set(each.fault.targets) <= {*FIXED_CREW.decode, *BOTH_CREW.decode}
        and (each.fault.kind in ("kill", "stop", "restart") or each.fault.cut == "front")
    ]


def failovers(
    outcomes: Sequence[Outcome], happened: Sequence[Happened], events: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Request id |-> seconds from the end of the prefill worker that had it to its whole answer.

    Requests whose decode worker was struck meanwhile are left out, as are those of a partition:
    nobody died.
    """
    course: dict[str, list[tuple[float, str]]] = {}
    for event in events:
        if event["event"] in ("claimed", "admitted", "local"):
            whose = str(event.get("prefill", ""))
            course.setdefault(str(event["request"]), []).append((float(event["at"]), whose))
    times: dict[str, float] = {}
    finished = [o for o in outcomes if o.num_tokens is not None and o.request_id in course]
    deaths = [
        each
        for each in happened
        if set(each.fault.targets) <= set(PREFILL) and each.fault.kind in ("kill", "stop")
    ]
    others = _decode_deaths(happened)
    for outcome in finished:
        steps = course[outcome.request_id]
        for death in deaths:
            if not death.began_at < outcome.finished_at:
                continue
            last = bisect.bisect_right(steps, (death.began_at, "")) - 1
            if last < 0 or steps[last][1] not in death.instance_ids or not steps[last][1]:
                continue
            if any(
                o.began_at < outcome.finished_at and o.ended_at > death.began_at for o in others
            ):
                continue
            times[outcome.request_id] = outcome.finished_at - death.began_at
    return times


def count_flips(events: Sequence[Mapping[str, Any]]) -> Flips:
    """What became of each flip; those without a word died with their worker."""
    counts = Counter(str(event["event"]) for event in events)
    flips = Flips(
        injected=counts["flip"],
        caught=counts["caught"],
        moot=counts["moot"],
        missed=counts["missed"],
        counted=counts["counted"],
        corrupt=counts["corrupt"],
    )
    flips.lost = flips.injected - flips.caught - flips.moot - flips.missed
    return flips


def judge(
    expected: Mapping[int, Outcome],
    outcomes: Sequence[Outcome],
    happened: Sequence[Happened],
    events: Sequence[Mapping[str, Any]],
    lost_blocks: Mapping[str, int],
    *,
    failover_limit_s: float,
) -> Verdict:
    """The verdict on a soak.

    `lost_blocks`: worker |-> blocks it still held at the end. `failover_limit_s` is infinite where
    the machine is shared: times are told then, and not judged.
    """
    counts: Counter[str] = Counter()
    violations: list[Violation] = []
    verdicts: dict[int, str] = {}
    for outcome in outcomes:
        name = classify(
            outcome, expected[outcome.order.question.number], is_excused(outcome, happened)
        )
        counts[name.removeprefix("!")] += 1
        verdicts[outcome.order.index] = name
        if name.startswith("!"):
            violations.append(Violation(name[1:], describe(outcome, expected)))
    flips = count_flips(events)
    violations += [Violation("missed flip", "a flipped block was read")] * flips.missed
    if flips.counted != flips.caught + flips.corrupt:
        said = f"{flips.counted} counted, {flips.caught} + {flips.corrupt} seen"
        violations.append(Violation("the metric of mismatches is wrong", said))
    if flips.lost and not _decode_deaths(happened):
        violations.append(Violation("missed flip", f"{flips.lost} flips without an answer"))
    violations += [
        Violation("blocks lost", f"{worker}: {count} blocks")
        for worker, count in lost_blocks.items()
    ]
    times = sorted(failovers(outcomes, happened, events).values())
    if times and percentile(times, 99) > failover_limit_s:
        slow = f"p99 {percentile(times, 99):.2f} s, at most {failover_limit_s:g} s"
        violations.append(Violation("slow failover", slow))
    changes = [each for each in happened if each.fault.role is not None]
    violations += [
        Violation("a change of roles failed", f"{each.fault}: {each.error!r}")
        for each in changes
        if each.error is not None and each.error.code not in CHANGE_REASONS
    ]
    alone = _without_prefill(outcomes, happened)
    return Verdict(
        counts=dict(counts),
        violations=violations,
        places=dict(Counter(outcome.place or "none" for outcome in outcomes)),
        faults=dict(Counter(_name(each) for each in happened)),
        handoffs=dict(Counter(str(e["event"]) for e in events)),
        flips=flips,
        failovers_s=times,
        changes=dict(Counter(each.error.code if each.error else "done" for each in changes)),
        changes_s=sorted(_undisturbed_changes(happened)),
        num_while_all_prefill_dead=len(alone),
        diary=[
            f"{h.began_at:.2f}-{h.ended_at:.2f} {h.fault}{f': {h.error}' if h.error else ''}"
            for h in happened
        ],
        num_failed_then=sum(verdicts[o.order.index].startswith("!") for o in alone),
    )


def _undisturbed_changes(happened: Sequence[Happened]) -> list[float]:
    """Seconds of the changes of roles that were done while nothing else struck their worker."""
    others = [each for each in happened if each.fault.role is None]
    return [
        change.ended_at - change.began_at
        for change in happened
        if change.fault.role is not None
        and change.error is None
        and not any(
            other.began_at < change.ended_at
            and change.began_at < other.ended_at
            and {*other.fault.targets} & {*change.fault.targets, "etcd", "nats"}
            for other in others
        )
    ]


def _without_prefill(outcomes: Sequence[Outcome], happened: Sequence[Happened]) -> list[Outcome]:
    """Requests that lived, at least partly, while every prefill worker was dead."""
    gone = [each for each in happened if each.fault.targets == PREFILL and each.strikes("kill")]
    return [
        outcome
        for outcome in outcomes
        if any(g.began_at < outcome.finished_at and outcome.started_at < g.ended_at for g in gone)
    ]


def _name(happened: Happened) -> str:
    fault = happened.fault
    who = "all " * (len(fault.targets) > 1) + fault.targets[0].rstrip("0123456789")
    if fault.role:
        return f"change {who} to {fault.role}"
    if fault.cut:
        return f"cut {fault.cut} of {who}"
    who = "a rank of " * bool(fault.rank) + who
    return f"{fault.kind} {who}{' ' + fault.point if fault.point else ''}"


def describe(outcome: Outcome, expected: Mapping[int, Outcome]) -> str:
    """All that helps to find out why."""
    order, right = outcome.order, expected[outcome.order.question.number]
    return (
        f"request {outcome.request_id or '?'} (#{order.index}, {order.question.sampling}, "
        f"{len(order.question.token_ids)}+{order.question.max_tokens} tokens, salt "
        f"{order.cache_salt}) at {outcome.decode_instance or '?'} prefill {outcome.place or '?'} "
        f"[{outcome.started_at:.2f}-{outcome.finished_at:.2f}] status {outcome.status} "
        f"error {outcome.error or outcome.broken or 'none'}: {outcome.num_tokens} tokens "
        f"{outcome.text!r}, not {right.text!r}"
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order, the nearest rank."""
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * int(percent) // 100) - 1))]


def table(verdict: Verdict) -> str:
    """The verdict for people."""
    flips, times = verdict.flips, verdict.failovers_s
    rows: list[tuple[str, object]] = [
        ("questions drawn, and used", "{}, {}".format(*verdict.num_questions)),
        ("requests", sum(verdict.counts.values())),
        *((f"  {name}", count) for name, count in sorted(verdict.counts.items())),
        ("prefilled", ", ".join(f"{n} {p}" for p, n in sorted(verdict.places.items()))),
        ("handoffs", ", ".join(f"{n} {e}" for e, n in sorted(verdict.handoffs.items()))),
        ("faults", sum(verdict.faults.values())),
        *((f"  {name}", count) for name, count in sorted(verdict.faults.items())),
        ("while every prefill worker was dead", verdict.num_while_all_prefill_dead),
        ("  failed then", verdict.num_failed_then),
        ("bits flipped", flips.injected),
        ("  caught", flips.caught),
        ("  counted by the metric", flips.counted),
        ("  in handoffs that had ended", flips.moot),
        ("  on workers that died before they looked", flips.lost),
        ("  missed", flips.missed),
        ("mismatches that nobody injected", flips.corrupt),
        ("failovers of a dead or stopped prefill worker", len(times)),
    ]
    if times:
        rows += [(f"  p{p} to the whole answer", f"{percentile(times, p):.2f} s") for p in PERCENTS]
    if verdict.changes:
        changed = verdict.changes_s
        rows += [
            ("changes of roles", ", ".join(f"{n} {c}" for c, n in sorted(verdict.changes.items()))),
            ("  done in peace", len(changed)),
            *((f"  p{p} of these", f"{percentile(changed, p):.2f} s") for p in PERCENTS if changed),
        ]
    rows += [
        ("workers that gave up while a service was away", verdict.num_unplanned_exits),
        ("time", f"{verdict.duration_s:.0f} s"),
        ("violations", len(verdict.violations)),
    ]
    lines = [f"{name:<48} {value}" for name, value in rows]
    shown: Counter[str] = Counter()
    for violation in verdict.violations:
        shown[violation.kind] += 1
        if shown[violation.kind] <= SHOWN:
            lines.append(f"! {violation.kind}: {violation.what}")
    return "\n".join(lines)

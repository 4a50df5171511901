"""The default topology under mixed load, while any of its processes is struck at random.

python -m tests.soak.default --duration-s 1800

Two `tandem serve` in one cluster: two workers of the bundled model, one of another. Prints a
verdict, and exits with 1 when a promise was broken: an answer other than the undisturbed one, an
error while the frontend was there, something that is not given back, a log line without a cause.
"""

import argparse
import asyncio
import logging
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import aiohttp

from tandem.launch.cluster.status import read_cluster
from tandem.models.paths import BUNDLED_MODEL
from tests.soak.mixed_load import Answer, Case, ask, cases
from tests.soak.served_cluster import HONEST, LIMITED, Served, Snapshot, Strike, at_rest

MIB = 2**20
NUM_CALLERS = 6
LIMITED_SHARE = 0.2  # of the requests
PAUSE_S = 0.1  # between two requests of a caller, the mean
REFUSED_PAUSE_S = 0.3
STRUCK_SHARE = 0.65  # of the time
WARM_SHARE = 0.15  # after it, for new processes to grow to their size; the rest is judged
STRIKE_PAUSE_S = (4.0, 10.0)
LOG_LAG_S = 15.0  # from the end of a strike to the last line that it causes
GROWTH_BYTES = 48 * MIB  # of a process in the calm part
GROWTH_COUNT = 4  # of its descriptors, threads, tasks
MIN_USED_SHARE = 0.7
FRONTEND = "first/frontend-0"  # that is asked
AWAY = (0, 200, 503)  # no connection, a stream that broke off, no worker known yet
# A busy machine alone causes these: they are counted.
SLOWNESS = (
    "event loop stood for",
    "to claim it in time",
    "computes it sooner by now",
    "DRAM should give",
)
LOUD = re.compile(r"(\S+Z) (WARNING|ERROR|CRITICAL) +(.*)")


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of a soak."""

    duration_s: float = 120.0  # of the load
    seed: int = 1


@dataclass(slots=True)
class Verdict:
    """The outcome of a soak."""

    violations: list[str] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    num_cases: tuple[int, int] = (0, 0)  # in all, and used
    gaps: dict[str, tuple[float, str]] = field(default_factory=dict)
    strikes: list[Strike] = field(default_factory=list)
    growth: dict[str, dict[str, int]] = field(default_factory=dict)
    loud: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        rows = [
            f"{sum(self.answers.values())} answers of {self.num_cases[1]} requests "
            f"({self.num_cases[0] - self.num_cases[1]} hang on rounding)",
            *(f"  {count:>6} {kind}" for kind, count in sorted(self.answers.items())),
            f"{len(self.strikes)} strikes: "
            + ", ".join(f"{n} x {s}" for s, n in sorted(Counter(map(str, self.strikes)).items())),
            *(f"largest pause {when}: {s:.2f} s ({what})" for when, (s, what) in self.gaps.items()),
            *(
                f"  {name} in the calm part: {grown.pop('rss') / MIB:+.1f} MiB, "
                + ", ".join(f"{count:+d} {what}" for what, count in grown.items())
                for name, grown in ((name, dict(each)) for name, each in self.growth.items())
            ),
            *(f"  {count:>4} x {line}" for line, count in self.loud.most_common(40)),
            *(f"! {count} x {each}" for each, count in Counter(self.violations).items()),
        ]
        return "\n".join(rows)


async def reference(
    http: aiohttp.ClientSession, url: str, asked: Sequence[Case]
) -> dict[Case, Answer]:
    """Return the undisturbed answers, of those that are the same alone and in a crowd."""

    async def answers(num_at_once: int) -> list[Answer]:
        room = asyncio.Semaphore(num_at_once)

        async def one(case: Case) -> Answer:
            async with room:
                answer = await ask(http, url, case, HONEST)
            assert answer.status == 200 and answer.has_ended and not answer.error, str(answer)
            return answer

        return list(await asyncio.gather(*map(one, asked)))

    alone, crowded = await answers(1), await answers(12)
    return {a.case: a for a, b in zip(alone, crowded, strict=True) if a.is_like(b)}


async def call(
    http: aiohttp.ClientSession, url: str, asked: Sequence[Case], caller: str, until_s: float
) -> list[Answer]:
    """Ask one thing after another until then."""
    draw = random.Random(caller)
    answers: list[Answer] = []
    while time.monotonic() < until_s:
        key = LIMITED if draw.random() < LIMITED_SHARE else HONEST
        answers.append(await ask(http, url, draw.choice(asked), key, draw))
        refused = answers[-1].status != 200
        await asyncio.sleep(REFUSED_PAUSE_S if refused else draw.expovariate(1 / PAUSE_S))
    return answers


async def soak(plan: Plan, run_dir: Path) -> Verdict:
    """Run a soak with all its processes in `run_dir`, and judge it."""
    draw, verdict = random.Random(plan.seed), Verdict()
    connector = aiohttp.TCPConnector(limit=0)
    async with Served(run_dir) as cluster, aiohttp.ClientSession(connector=connector) as http:
        drawn = cases(plan.seed, BUNDLED_MODEL.name, "sensitive")
        expected = await reference(http, cluster.url, drawn)
        verdict.num_cases = len(drawn), len(expected)
        assert len(expected) > MIN_USED_SHARE * len(drawn), "too many hang on rounding"

        async def load(name: str, duration_s: float) -> list[Answer]:
            until_s = time.monotonic() + duration_s
            callers = [
                call(http, cluster.url, list(expected), f"{name} {plan.seed} {number}", until_s)
                for number in range(NUM_CALLERS)
            ]
            return [each for some in await asyncio.gather(*callers) for each in some]

        first = await cluster.snapshot(http)
        loading = asyncio.create_task(load("struck", plan.duration_s * STRUCK_SHARE))
        while not loading.done():
            await asyncio.wait([loading], timeout=draw.uniform(*STRIKE_PAUSE_S))
            if not loading.done():
                await cluster.strike(draw)
        await cluster.until(at_rest)
        calm_at = time.monotonic()
        answers = await loading + await load("warm", plan.duration_s * WARM_SHARE)
        warm = await cluster.snapshot(http)
        answers += await load("calm", plan.duration_s * (1 - STRUCK_SHARE - WARM_SHARE))
        calm = await cluster.snapshot(http)
        dead = [str(q) for q in (await read_cluster(cluster.effective)).queues if q.num_dead]
    verdict.strikes = cluster.strikes
    verdict.violations += [f"dead letters: {each}" for each in dead]
    judge_answers(verdict, answers, expected, calm_at)
    judge_snapshots(verdict, first, warm, calm)
    judge_logs(verdict, cluster.folders)
    return verdict


def judge_answers(
    verdict: Verdict, answers: Sequence[Answer], expected: Mapping[Case, Answer], calm_at: float
) -> None:
    for answer in answers:
        beside = [
            each for each in verdict.strikes if each.touches(answer.started_at, answer.finished_at)
        ]
        away = answer.status in AWAY and any(FRONTEND in each.victims for each in beside)
        if answer.status == 429 and answer.key == LIMITED:
            kind = "refused: over the key's limit"
        elif answer.error and away and answer.is_beginning_of(expected[answer.case]):
            kind = "ended with the frontend"
        elif answer.error or answer.status != 200:
            kind = "!error"
        elif not answer.is_like(expected[answer.case]):
            kind = "!wrong"
        else:
            kind = "left by the client" if answer.has_left else "right"
        verdict.answers[kind.lstrip("!")] += 1
        if kind.startswith("!"):
            right = expected[answer.case]
            causes = " and ".join(map(str, beside)) or "nothing"
            verdict.violations.append(f"{kind[1:]} beside {causes}: {answer}; right: {right}")
        when = "in the calm part" if answer.started_at > calm_at else "while struck"
        if answer.largest_gap_s > verdict.gaps.get(when, (0.0, ""))[0]:
            causes = " and ".join(map(str, beside)) or "beside nothing"
            verdict.gaps[when] = answer.largest_gap_s, f"{answer.case.name}, {causes}"


def judge_snapshots(verdict: Verdict, first: Snapshot, warm: Snapshot, calm: Snapshot) -> None:
    for name, before in warm.processes.items():
        after = calm.processes.get(name, {})
        grown = {what: after.get(what, 0) - count for what, count in before.items()}
        if grown.pop("pid"):
            verdict.violations.append(f"{name} has ended in the calm part")
            continue
        verdict.growth[name] = grown
        limits = {"rss": GROWTH_BYTES}
        verdict.violations += [
            f"{name} has gained {count} {what} in the calm part"
            for what, count in grown.items()
            if count > limits.get(what, GROWTH_COUNT)
        ]
    for before, after in ((first, warm), (warm, calm)):
        if (before.keys, before.consumers) != (after.keys, after.consumers):
            said = [f"{each.keys} {each.consumers}" for each in (before, after)]
            verdict.violations.append(f"keys or consumers: {said[0]}, later {said[1]}")


def judge_logs(verdict: Verdict, folders: Sequence[Path]) -> None:
    offset_s = time.time() - time.monotonic()
    for log in (each for folder in folders for each in folder.glob("*.log")):
        for line in log.read_text(errors="replace").splitlines():
            if "Traceback (most recent call last)" in line:
                verdict.violations.append(f"{log.stem}: a traceback")
            if (found := LOUD.match(line)) is None:
                continue
            at = datetime.fromisoformat(found[1]).timestamp() - offset_s
            text = re.sub(r"[0-9a-f]{8,}|[0-9]+", "N", f"{found[2]} {found[3]}")[:200]
            is_caused = any(each.touches(at - 1, at, LOG_LAG_S) for each in verdict.strikes)
            if is_caused or any(each in line for each in SLOWNESS):
                verdict.loud[text] += 1
            else:
                verdict.violations.append(f"{log.stem} logs without a cause: {line}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--duration-s", type=float, default=Plan().duration_s, help="of the load")
    parser.add_argument("--seed", type=int, default=Plan().seed, help="of the load and the strikes")
    parser.add_argument("--run-dir", type=Path, help="where logs stay; a temporary one by default")
    options = parser.parse_args()
    logging.getLogger("tandem").setLevel(logging.ERROR)  # services being away is no news here
    with tempfile.TemporaryDirectory(prefix="tandem-default-") as temporary:
        run_dir = options.run_dir or Path(temporary)
        run_dir.mkdir(parents=True, exist_ok=True)
        verdict = asyncio.run(soak(Plan(options.duration_s, options.seed), run_dir))
    print(verdict)
    return 1 if verdict.violations else 0


if __name__ == "__main__":
    sys.exit(main())

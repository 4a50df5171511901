"""The hostile soak: honest streams beside strangers who attack HTTP, NATS, etcd and workers.

python -m tests.soak.hostile --duration-s 60

Prints a verdict, and exits with 1 when an attack hurt anyone: an honest answer that is wrong, late
by seconds or missing, an internal error, an attack that hangs, memory that is not given back.
"""

import argparse
import asyncio
import itertools
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import msgspec
import psutil

from tandem.runtime.local.child_process import ChildProcess
from tests.e2e.cluster import SETTLE_TIMEOUT_S, Cluster, write_sensitive_model
from tests.soak.attacks.target import Target
from tests.soak.checker import classify
from tests.soak.hostile_plan import (
    ATTACKS,
    CLUSTER_TOKEN,
    GOOD_GAP_S,
    HANG_GAP_S,
    LOCAL_LIMIT_S,
    PLAN,
    RSS_GROWTH_BYTES,
    Plan,
)
from tests.soak.load import Order, Outcome, Question, ask, questions, undisturbed
from tests.soak.strangers import Account, Terms

MIB = 2**20
WORKER_FLAGS = ("--engine.num_blocks=1000",)  # a small pool: its pages count once they are used
REFUSED_PAUSE_S = 0.2  # of a client before its next request
NUM_TOKENS = 100  # of an honest answer
MIN_USED_SHARE = 0.5
MAX_LOG_BYTES = 32 * MIB


@dataclass(slots=True)
class Verdict:
    """The outcome of a soak; RSS in bytes by process: before, at most, after."""

    violations: list[str] = field(default_factory=list)
    num_honest: int = 0
    num_ended: int = 0  # honest streams that did not come to their end
    largest_gap: tuple[float, str] = (0.0, "")  # and the attacks that ran beside it
    gaps: dict[str, float] = field(default_factory=dict)  # largest one beside each attack
    longest_wait_s: float = 0.0  # for a first token
    places: Counter[str] = field(default_factory=Counter)  # of prompts of honest answers
    reasons: Counter[str] = field(default_factory=Counter)  # of prompts that had to be remote
    longest_local: tuple[float, str] = (0.0, "")  # no prompt was remote; the attacks beside it
    rss: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    log_bytes: dict[str, int] = field(default_factory=dict)
    accounts: dict[str, Account] = field(default_factory=dict)

    def attacks_beside(self, began_at: float, ended_at: float) -> list[str]:
        """Return the names of the attacks that ran within this time."""
        return [
            name
            for name, account in self.accounts.items()
            if any(begin < ended_at and began_at < end for begin, end in account.runs)
        ]

    def beside(self, began_at: float, ended_at: float) -> str:
        """Return the same as a text."""
        return ", ".join(self.attacks_beside(began_at, ended_at)) or "no attack"

    def __str__(self) -> str:
        gap_s, beside = self.largest_gap
        local_s, beside_local = self.longest_local
        good = "" if gap_s <= GOOD_GAP_S else f", over {GOOD_GAP_S:g} s"
        lines = [
            f"{self.num_honest} honest answers, {self.num_ended} ended early; "
            f"largest gap {gap_s:.2f} s{good} ({beside}), "
            f"longest wait for a first token {self.longest_wait_s:.2f} s",
            f"prompts: {dict(self.places)}; no remote one for at most {local_s:.1f} s "
            f"({beside_local})",
            *(f"  {n:>4} x not remote: {reason}" for reason, n in self.reasons.most_common(5)),
            *(
                f"  {name:<40} {len(each.runs):>3} runs, longest {each.longest_s:6.2f} s, "
                f"gap {self.gaps.get(name, 0.0):.2f} s  {dict(sorted(each.statuses.items())) or ''}"
                for name, each in self.accounts.items()
            ),
            *(
                f"  {name:<12} RSS {before // MIB} MiB, at most {most // MIB}, "
                f"then {after // MIB}; log {self.log_bytes[name] / MIB:.1f} MiB"
                for name, (before, most, after) in self.rss.items()
            ),
            *(f"! {count} x {each}" for each, count in Counter(self.violations).items()),
        ]
        return "\n".join(lines)


async def soak(plan: Plan, run_dir: Path) -> Verdict:
    """Run a soak with all its processes in `run_dir`, and judge it."""
    model = write_sensitive_model(run_dir / "sensitive")
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        Cluster(run_dir, model, CLUSTER_TOKEN) as cluster,
        aiohttp.ClientSession(connector=connector) as http,
    ):
        await cluster.start_all(1, 1, *WORKER_FLAGS)
        asked = [
            replace(question, max_tokens=NUM_TOKENS)
            for question in questions(plan.seed, plan.num_questions)
        ]
        url, name = cluster.base_url, cluster.model_name
        expected = await undisturbed(http, url, name, asked, crowds=(6,))
        assert len(expected) > MIN_USED_SHARE * len(asked), "too many hang on rounding"
        asked = [question for question in asked if question.number in expected]
        memory = Memory(cluster)
        verdict = Verdict()
        attacking = asyncio.create_task(_attack(plan, await _target(cluster), run_dir))
        watching = asyncio.create_task(memory.watch())
        streams = [
            asyncio.create_task(_stream(number, cluster, http, asked, attacking))
            for number in range(plan.num_honest_streams)
        ]
        try:
            outcomes = [each for some in await asyncio.gather(*streams) for each in some]
            verdict.accounts = await attacking
        finally:
            for task in (attacking, watching, *streams):
                task.cancel()
            await asyncio.gather(attacking, watching, *streams, return_exceptions=True)
        judge_answers(verdict, outcomes, expected)
        _judge_attacks(verdict)
        await _judge_cluster(verdict, cluster, memory)
    return verdict


async def _target(cluster: Cluster) -> Target:
    instances = {each.component: each for each in await cluster.instances()}
    return Target(
        http=instances["frontend"].address,
        nats_url=cluster.nats.url,
        etcd_url=cluster.etcd.url,
        decode=instances["decode"].address,
        prefill=instances["prefill"].address,
        namespace=cluster.runtime.namespace,
        model=cluster.model_name,
        deployment=instances["decode"].deployment,
    )


async def _attack(plan: Plan, target: Target, run_dir: Path) -> dict[str, Account]:
    """Run the strangers in a process of their own, so that only the cluster delays the streams."""
    names = [attack.__name__ for attack in plan.attacks]
    terms = Terms(target, names, plan.duration_s, plan.seed, plan.num_attacks_at_once)
    command = [sys.executable, "-m", "tests.soak.strangers", msgspec.json.encode(terms).decode()]
    log = run_dir / "strangers.log"
    child = await ChildProcess.start([*command, str(run_dir / "accounts.json")], log)
    try:
        await child.wait()
    finally:
        child.kill()
    assert child.exit_code == 0, child.log_tail()
    accounts = (run_dir / "accounts.json").read_bytes()
    return msgspec.json.decode(accounts, type=dict[str, Account])


async def _stream(
    number: int,
    cluster: Cluster,
    http: aiohttp.ClientSession,
    asked: Sequence[Question],
    attacking: "asyncio.Task[dict[str, Account]]",
) -> list[Outcome]:
    """Ask one question after another while the attacks last; half of the prompts go remote."""
    draw = random.Random(number)
    outcomes: list[Outcome] = []
    while not attacking.done():
        salt, place = f"honest {number} {len(outcomes)}", draw.choice(("local", "remote"))
        order = Order(len(outcomes), draw.choice(asked), salt, place)
        outcomes.append(await ask(http, cluster.base_url, cluster.model_name, order))
        if outcomes[-1].status != 200:
            await asyncio.sleep(REFUSED_PAUSE_S)
    return outcomes


class Memory:
    """The RSS of a cluster's processes."""

    def __init__(self, cluster: Cluster) -> None:
        servers = {"nats": cluster.nats.child, "etcd": cluster.etcd.child}
        self._own = list(cluster.children)
        self.children: dict[str, ChildProcess] = {**cluster.children, **servers}
        self._processes = {name: psutil.Process(c.pid) for name, c in self.children.items()}
        self.before = self.now()
        self.most = dict(self.before)

    def now(self) -> dict[str, int]:
        """Return the bytes of each process that runs."""
        return {
            name: process.memory_info().rss
            for name, process in self._processes.items()
            if self.children[name].exit_code is None
        }

    async def watch(self) -> None:
        """Keep the largest of all samples."""
        while True:
            for name, rss in self.now().items():
                self.most[name] = max(self.most[name], rss)
            await asyncio.sleep(0.1)

    async def settled(self) -> dict[str, int]:
        """Wait, within a bound, until no process holds much more than before."""
        deadline_at = time.monotonic() + SETTLE_TIMEOUT_S
        while self.grown(self.now()) and time.monotonic() < deadline_at:
            await asyncio.sleep(0.2)
        return self.now()

    def grown(self, now: dict[str, int]) -> dict[str, int]:
        """Return the bytes that processes of Tandem have gained beyond the bound.

        etcd keeps every value that strangers put, and NATS has its own limits.
        """
        gained = {name: now[name] - self.before[name] for name in self._own if name in now}
        return {name: grown for name, grown in gained.items() if grown > RSS_GROWTH_BYTES}


def judge_answers(
    verdict: Verdict, outcomes: Sequence[Outcome], expected: dict[int, Outcome]
) -> None:
    verdict.num_honest = len(outcomes)
    for outcome in outcomes:
        kind = classify(outcome, expected[outcome.order.question.number], excused=False)
        verdict.num_ended += bool(outcome.error or outcome.broken or outcome.has_hung)
        if kind != "right":
            beside = verdict.beside(outcome.started_at, outcome.finished_at)
            reason = outcome.error or outcome.broken
            verdict.violations.append(f"{kind.lstrip('!')}: {outcome.status} {reason} ({beside})")
        gap_s, ended_at = outcome.largest_gap_s, outcome.gap_ended_at
        for name in verdict.attacks_beside(ended_at - gap_s, ended_at):
            verdict.gaps[name] = max(verdict.gaps.get(name, 0.0), gap_s)
        if gap_s > verdict.largest_gap[0]:
            verdict.largest_gap = (gap_s, verdict.beside(ended_at - gap_s, ended_at))
        if outcome.first_event_at is not None:
            wait_s = outcome.first_event_at - outcome.started_at
            verdict.longest_wait_s = max(verdict.longest_wait_s, wait_s)
    if verdict.largest_gap[0] > HANG_GAP_S:
        verdict.violations.append(
            "a stream stood still for {:.1f} s beside {}".format(*verdict.largest_gap)
        )
    if outcomes:
        _judge_places(verdict, outcomes)
    else:
        verdict.violations.append("no honest answer")


def _judge_places(verdict: Verdict, outcomes: Sequence[Outcome]) -> None:
    """Tell how many prompts were remote, why others were not, and the longest time without any."""
    verdict.places = Counter(each.place or "none" for each in outcomes)
    verdict.reasons = Counter(
        each.headers.get("x-tandem-prefill-reason", each.error)
        for each in outcomes
        if each.order.place == "remote" and each.place != "remote"
    )
    remote = [each.first_event_at or 0.0 for each in outcomes if each.place == "remote"]
    ends = [each.finished_at for each in outcomes]
    for before, after in itertools.pairwise(sorted([min(ends), *remote, max(ends)])):
        if after - before > verdict.longest_local[0]:
            verdict.longest_local = (after - before, verdict.beside(before, after))
    if verdict.longest_local[0] > LOCAL_LIMIT_S:
        verdict.violations.append(
            "no prompt was remote for {:.1f} s beside {}".format(*verdict.longest_local)
        )


def _judge_attacks(verdict: Verdict) -> None:
    for name, account in verdict.accounts.items():
        verdict.violations += [f"{name}: {failure}" for failure in set(account.failures)]
        bad = {status for status in account.statuses if status >= 500 and status != 503}
        verdict.violations += [f"{name}: answered {status}" for status in sorted(bad)]


async def _judge_cluster(verdict: Verdict, cluster: Cluster, memory: Memory) -> None:
    """Judge what the attacks leave behind: processes, their memory and blocks, the queue."""
    after = await memory.settled()
    verdict.rss = {
        name: (memory.before[name], memory.most[name], after.get(name, 0)) for name in memory.before
    }
    verdict.violations += [
        f"{name} holds {grown // MIB} MiB more than before"
        for name, grown in memory.grown(after).items()
    ]
    for name, child in memory.children.items():
        assert child.log_path is not None
        verdict.log_bytes[name] = child.log_path.stat().st_size
        if child.exit_code is not None:
            verdict.violations.append(f"{name} has ended: {child.log_tail()}")
        elif verdict.log_bytes[name] > MAX_LOG_BYTES:
            verdict.violations.append(f"the log of {name} is large")
    try:
        await cluster.ready(1, 1)
        await cluster.balanced()
        await cluster.remote_works()
    except (TimeoutError, AssertionError) as error:
        verdict.violations.append(f"the cluster does not recover: {type(error).__name__} {error}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--duration-s", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=PLAN.seed, help="of the order of attacks")
    parser.add_argument("--only", action="append", default=[], help="a part of an attack's name")
    parser.add_argument("--run-dir", type=Path, help="where logs stay; a temporary one by default")
    options = parser.parse_args()
    attacks = tuple(
        each for each in ATTACKS if any(part in each.__name__ for part in options.only or [""])
    )
    plan = replace(PLAN, duration_s=options.duration_s, seed=options.seed, attacks=attacks)
    logging.getLogger("tandem").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="tandem-hostile-") as temporary:
        run_dir = options.run_dir or Path(temporary)
        run_dir.mkdir(parents=True, exist_ok=True)
        verdict = asyncio.run(soak(plan, run_dir))
    print(verdict)
    return 1 if verdict.violations else 0


if __name__ == "__main__":
    sys.exit(main())

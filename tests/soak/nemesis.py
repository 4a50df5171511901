"""The nemesis: many requests against a cluster that is killed, stopped, cut off and corrupted.

PYTHONPATH=. python -m tests.soak.nemesis --requests 10000 --seed 1

Prints a verdict, and exits with 1 when a promise was broken: a wrong, duplicated or missing token,
a request without an outcome, an error without a reason, a block lost, a flipped bit that was read.
"""

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from tests.soak.checker import Verdict, judge, table
from tests.soak.faults import Nemesis
from tests.soak.fleet import Fleet, Terms
from tests.soak.load import Order, Outcome, Question, ask, orders, questions, undisturbed

MIN_USED_SHARE = 0.5
MAX_IN_FLIGHT = 24  # a slow machine gets no more to do than it can


@dataclass(frozen=True, slots=True)
class Plan:
    """A soak. It ends with the last request, or when the time is up."""

    num_requests: int
    seed: int = 1
    num_questions: int = 200
    requests_per_s: float = 20.0
    flip_probability: float = 0.15
    time_limit_s: float = 7200.0
    failover_limit_s: float = 3.0
    flags: tuple[str, ...] = ()  # further ones of the workers
    is_blind: bool = False  # the decode workers take every block for proven
    has_faults: bool = True
    tp: int = 1  # of half of the workers, whose ranks are struck too
    both: bool = False  # four workers of both roles, and changes of roles among the faults


async def soak(plan: Plan, run_dir: Path) -> Verdict:
    """Runs a soak with all its processes in `run_dir`, and judges it."""
    started_at = time.monotonic()
    asked = questions(plan.seed, plan.num_questions)
    terms = Terms(plan.seed, plan.flip_probability, plan.is_blind, plan.flags, plan.both, plan.tp)
    async with (
        Fleet(run_dir, terms) as fleet,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        cluster = fleet.cluster
        expected = await undisturbed(http, cluster.base_url, cluster.model_name, asked)
        asked = [question for question in asked if question.number in expected]
        nemesis = Nemesis(fleet, plan.seed)
        striking = asyncio.create_task(nemesis.run() if plan.has_faults else nemesis.wait())
        try:
            outcomes = await _drive(plan, fleet, http, asked, striking)
            nemesis.end()
            await striking
            await fleet.joined(*fleet.slots)
            lost = await fleet.lost_blocks()
        finally:
            striking.cancel()
            await asyncio.gather(striking, return_exceptions=True)
        verdict = judge(
            expected,
            outcomes,
            nemesis.happened,
            fleet.events(),
            lost,
            failover_limit_s=plan.failover_limit_s,
        )
        verdict.num_unplanned_exits = fleet.num_unplanned_exits
        verdict.num_questions = (plan.num_questions, len(expected))
        assert len(expected) > MIN_USED_SHARE * plan.num_questions, "too many hang on rounding"
    verdict.duration_s = time.monotonic() - started_at
    return verdict


async def _drive(
    plan: Plan,
    fleet: Fleet,
    http: aiohttp.ClientSession,
    asked: list[Question],
    striking: "asyncio.Task[None]",
) -> list[Outcome]:
    """Sends the requests at random moments, and waits for all their outcomes."""
    draw = random.Random(f"arrivals {plan.seed}")
    room = asyncio.Semaphore(MAX_IN_FLIGHT)
    deadline_at = time.monotonic() + plan.time_limit_s
    cluster = fleet.cluster

    async def one(order: Order) -> Outcome:
        try:
            return await ask(http, cluster.base_url, cluster.model_name, order)
        finally:
            room.release()

    asking: list[asyncio.Task[Outcome]] = []
    for order in orders(plan.seed, asked, plan.num_requests):
        if time.monotonic() > deadline_at or striking.done():
            break
        await room.acquire()
        asking.append(asyncio.create_task(one(order)))
        await asyncio.sleep(draw.expovariate(plan.requests_per_s))
    return list(await asyncio.gather(*asking))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1, help="of the requests and of the faults")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--flips", type=float, default=0.15, help="share of landed writes")
    parser.add_argument("--time-limit-s", type=float, default=7200.0, help="of sending requests")
    parser.add_argument(
        "--failover-limit-s", type=float, default=3.0, help="at the 99th percentile"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="for workers"
    )
    parser.add_argument(
        "--both", action="store_true", help="four workers of both roles, which change them"
    )
    parser.add_argument(
        "--tp", type=int, default=1, help="ranks of half of the workers, which are struck too"
    )
    parser.add_argument("--run-dir", type=Path, help="where logs stay; a temporary one by default")
    parser.add_argument("--json", type=Path, help="write the verdict there too")
    options = parser.parse_args()
    plan = Plan(
        num_requests=options.requests,
        seed=options.seed,
        requests_per_s=options.rate,
        flip_probability=options.flips,
        time_limit_s=options.time_limit_s,
        failover_limit_s=options.failover_limit_s,
        flags=tuple(f"--{setting}" for setting in options.set),
        both=options.both,
        tp=options.tp,
    )
    logging.getLogger("tandem").setLevel(logging.ERROR)  # services being away is no news here
    with tempfile.TemporaryDirectory(prefix="tandem-nemesis-") as temporary:
        run_dir = options.run_dir or Path(temporary)
        run_dir.mkdir(parents=True, exist_ok=True)
        verdict = asyncio.run(soak(plan, run_dir))
    print(table(verdict))
    if options.json:
        options.json.write_text(json.dumps(verdict.as_json(), indent=1))
    return 0 if verdict.is_good else 1


if __name__ == "__main__":
    sys.exit(main())

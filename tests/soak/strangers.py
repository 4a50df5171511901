"""A process of strangers: it attacks a cluster for a while and accounts for each attack.

python -m tests.soak.strangers TERMS    ACCOUNTS    (JSON of `Terms`; a file to write)
"""

import asyncio
import os
import random
import sys
import time
from pathlib import Path

import msgspec

from tests.soak.attacks.target import Attack, Target
from tests.soak.hostile_plan import ATTACK_LIMIT_S, ATTACKS

NICENESS = 10  # on a stranger's own machine, this work would cost the cluster nothing


class Terms(msgspec.Struct, frozen=True):
    """A share of a soak: these attacks, each at least once, `num_at_once` side by side."""

    target: Target
    attacks: list[str]  # names
    duration_s: float
    seed: int
    num_at_once: int


class Account(msgspec.Struct):
    """The course of one attack, over all its runs."""

    runs: list[tuple[float, float]] = []  # begin and end, time.monotonic()
    statuses: dict[int, int] = {}  # of HTTP |-> their number
    failures: list[str] = []

    @property
    def longest_s(self) -> float:
        """The longest run."""
        return max((end - begin for begin, end in self.runs), default=0.0)


async def attack_all(terms: Terms) -> dict[str, Account]:
    """Run the attacks in random order, whole rounds of them, until the time is over."""
    known: dict[str, Attack] = {attack.__name__: attack for attack in ATTACKS}
    accounts = {name: Account() for name in terms.attacks}
    draw = random.Random(terms.seed)
    deadline_at = time.monotonic() + terms.duration_s
    turn = draw.sample(terms.attacks, len(terms.attacks))

    async def attack_in_turn() -> None:
        while turn or time.monotonic() < deadline_at:
            if not turn:
                turn.extend(draw.sample(terms.attacks, len(terms.attacks)))
            name = turn.pop()
            await _attack(known[name], terms.target, accounts[name])

    await asyncio.gather(*(attack_in_turn() for _ in range(terms.num_at_once)))
    return accounts


async def _attack(attack: Attack, target: Target, account: Account) -> None:
    begin = time.monotonic()
    try:
        async with asyncio.timeout(ATTACK_LIMIT_S):
            for status in await attack(target):
                account.statuses[status] = account.statuses.get(status, 0) + 1
    except Exception as error:
        account.failures.append(" ".join(f"{type(error).__name__}: {error}".split()))
    account.runs.append((begin, time.monotonic()))


if __name__ == "__main__":
    os.nice(NICENESS)
    accounts = asyncio.run(attack_all(msgspec.json.decode(sys.argv[1], type=Terms)))
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(accounts))

"""Runs many random schedules of handoffs, or one.

python -m tests.transfer.schedules.explore --seeds 0:1000000 [--processes 2]
python -m tests.transfer.schedules.explore --seed 4711 -v
"""

import argparse
import multiprocessing
import random
import sys
import time
import traceback

from tests.transfer.schedules.steps import Schedule

PART = 10_000  # seeds between two signs of life


def first_failure(seeds: range) -> tuple[int, Exception] | None:
    """The first seed whose schedule fails, and how."""
    for seed in seeds:
        try:
            Schedule(random.Random(seed)).run()
        except Exception as error:
            return seed, error
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs random schedules of handoffs.")
    parser.add_argument("--seeds", default="0:20000", help="first:end")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("-v", dest="verbose", action="store_true", help="show what happens")
    options = parser.parse_args()
    if options.seed is not None:
        sys.exit(show(options.seed, options.verbose))
    first, end = (int(number) for number in options.seeds.split(":"))
    parts = [range(seed, min(end, seed + PART)) for seed in range(first, end, PART)]
    started_at = time.perf_counter()
    with multiprocessing.Pool(options.processes) as pool:
        for part, failed in zip(parts, pool.imap(failing_seed, parts), strict=True):
            if failed is not None:
                sys.exit(show(failed, verbose=True))
            elapsed_s = time.perf_counter() - started_at
            print(f"seeds {first} to {part.stop}: all well, {elapsed_s:.0f} s", flush=True)


def failing_seed(seeds: range) -> int | None:
    found = first_failure(seeds)
    return None if found is None else found[0]


def show(seed: int, verbose: bool) -> str | None:
    """Run one seed; what to exit with."""
    log: list[str] = []
    try:
        Schedule(random.Random(seed), log=log).run()
    except Exception:
        print("\n".join([*log, traceback.format_exc()]) if verbose else traceback.format_exc())
        return f"seed {seed} fails"
    print("\n".join(log) if verbose else f"seed {seed}: all well")
    return None


if __name__ == "__main__":
    main()

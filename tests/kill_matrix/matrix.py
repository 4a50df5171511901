"""Which tests notice which mutants of a room's modules.

python -m tests.kill_matrix.matrix router [--most 300] [--tests]
"""

import argparse
import importlib
import json
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from types import CodeType, FrameType

import pytest
from _pytest.runner import runtestprotocol

from tests.kill_matrix.mutants import Mutant, functions, mutants

SERVICES = {"nats", "etcd"}  # a fork must not end what the tests share
LONGEST_S = 4.0  # of CPU, of a test that is run on mutants, while it is looked at
HANGS_S = 60
UNTESTED = frozenset({"check_invariants", "__repr__", "__post_init__"})


@dataclass(frozen=True, slots=True)
class Room:
    """Modules, and the tests that are to notice what is changed in them."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


def _modules(room: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tandem.{room}.{name}" for name in names)


ROOMS = {
    "router": Room(
        _modules(
            "router", "by_cost", "holding", "idle", "in_turn", "kv_index", "load", "load_table",
            "policy", "predict",
        ),
        ("tests/router",),
    ),
    "schedule": Room(
        _modules(
            "engine.schedule", "block_pool", "block_tables", "outputs", "prefix", "scheduler",
            "sequence", "sequence_blocks", "step_cost", "windows",
        ),
        (
            "tests/engine/schedule", "tests/engine/core", "tests/engine/test_prefix_pull.py",
            "tests/engine/step/test_layer_stream.py",
        ),
    ),
    "admission": Room(
        _modules("decode", "admission", "decision", "transfer_cost"),
        ("tests/decode/test_admission.py", "tests/decode/test_transfer_cost.py"),
    ),
    # The machines have schedules, too: tests/transfer/handoff/test_mutants.py.
    "landed": Room(
        _modules("transfer.handoff", "landed"), ("tests/transfer/handoff/test_landed.py",)
    ),
}  # fmt: skip


@dataclass(slots=True)
class Matrix:
    """A plugin for pytest that runs a room's tests on each mutant of its modules."""

    modules: tuple[str, ...]
    most: int  # mutants, evenly spread
    is_whole: bool  # else the first test that notices a mutant is the last that is run on it
    kills: dict[Mutant, set[str]] = field(default_factory=dict)
    tests: dict[str, set[CodeType]] = field(default_factory=dict)  # and the code that they enter
    items: dict[pytest.Item, float] = field(default_factory=dict)  # of these, and their CPU seconds

    def __str__(self) -> str:
        survivors = [mutant for mutant, killers in self.kills.items() if not killers]
        lines = [f"survives: {each.module}:{each.name}\n{each.change}" for each in survivors]
        return "\n".join([*lines, f"{self.share:.1%} of {len(self.kills)} mutants are noticed"])

    @property
    def share(self) -> float:
        """The share of the mutants that a test notices."""
        return sum(map(bool, self.kills.values())) / len(self.kills)

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """Let hypothesis draw the same examples for each mutant, and look for no smaller one."""
        import hypothesis  # pytest looks at it first

        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile(
            "mutants", deadline=None, database=None, derandomize=True, phases=phases,
            suppress_health_check=list(hypothesis.HealthCheck),  # of a machine that is busy
        )  # fmt: skip
        hypothesis.settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        codes = {
            function.__code__
            for path in self.modules
            for function in functions(importlib.import_module(path)).values()
        }
        for item in session.items:
            if not SERVICES & set(getattr(item, "fixturenames", ())):
                self._look_at(item, codes)
        quickest_first = sorted(self.items, key=self.items.__getitem__)
        every = [mutant for path in self.modules for mutant in mutants(path, UNTESTED)]
        for mutant in every[:: -(-len(every) // self.most)]:
            module = importlib.import_module(mutant.module)
            code = functions(module)[mutant.function].__code__
            items = [item for item in quickest_first if code in self.tests[item.nodeid]]
            self.kills[mutant] = self._killers(mutant, items)
        return True

    def _look_at(self, item: pytest.Item, codes: set[CodeType]) -> None:
        """Note the code that a test enters, if it takes little time."""
        entered: set[CodeType] = set()

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code in codes:
                entered.add(frame.f_code)

        started_at = time.process_time()
        sys.setprofile(note)
        assert not _fails(item), item.nodeid
        sys.setprofile(None)
        seconds = time.process_time() - started_at
        if entered and seconds < LONGEST_S:
            self.tests[item.nodeid], self.items[item] = entered, seconds

    def _killers(self, mutant: Mutant, items: list[pytest.Item]) -> set[str]:
        """Run tests on a mutant in a fork of this process, which it may leave in any state."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            with mutant.applied(), os.fdopen(writing, "w") as pipe:
                failing = (item.nodeid for item in items if _fails(item))
                json.dump(list(failing if self.is_whole else islice(failing, 1)), pipe)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            found = pipe.read()
        os.waitpid(child, 0)
        return set(json.loads(found)) if found else {item.nodeid for item in items}


def _fails(item: pytest.Item) -> bool:
    signal.alarm(HANGS_S)  # which ends this process
    failed = any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))
    signal.alarm(0)
    return failed


def matrix(room: str, most: int, *, is_whole: bool = False) -> Matrix:
    """Run the tests of a room on mutants of its modules."""
    found = Matrix(ROOMS[room].modules, most, is_whole)
    options = ["-q", "--tb=no", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
    status = pytest.main([*options, *ROOMS[room].tests], plugins=[found])
    assert status == 0, f"pytest ended with {status}"
    return found


def main() -> None:
    """Print what no test notices, and tests without which all is noticed that is."""
    parser = argparse.ArgumentParser(description="Runs tests on mutants.")
    parser.add_argument("room", choices=ROOMS)
    parser.add_argument("--most", type=int, default=10_000, help="mutants, evenly spread")
    parser.add_argument("--tests", action="store_true", help="run each test on each mutant")
    options = parser.parse_args()
    found = matrix(options.room, options.most, is_whole=options.tests)
    if options.tests:
        num_others = Counter(test for killers in found.kills.values() for test in killers)
        alone = {next(iter(killers)) for killers in found.kills.values() if len(killers) == 1}
        for test in sorted(found.tests.keys() - alone):
            print(f"notices {num_others[test]} mutants, none alone: {test}")
    print(found)


if __name__ == "__main__":
    main()

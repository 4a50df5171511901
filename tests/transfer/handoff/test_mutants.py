"""Every change of a condition, a comparison or a statement of the state machines is noticed."""

import pytest

from tests.kill_matrix.mutants import Mutant, mutants
from tests.transfer.handoff import test_decode, test_prefill
from tests.transfer.handoff.killers import fails_a_test
from tests.transfer.schedules.explore import first_failure

MODULES = [f"tandem.transfer.handoff.{name}" for name in ("coverage", "decode", "prefill")]
UNTESTED = frozenset({"check_invariants", "_claimant_name"})  # asserts, and words for people
ENOUGH = 2_000  # schedules; most mutants fail within a hundred
# These behave like the original.
EQUIVALENT = {
    "DecodeHandoff.__init__ drop 5": "a claim says how many ranks there are, before any is named",
    "DecodeHandoff.__init__ number 0": "the same",
    "DecodeHandoff.__init__ number 2": "a lease is read once there is a claim",
}
EVERY = [mutant for module in MODULES for mutant in mutants(module, UNTESTED)]
ALL = [mutant for mutant in EVERY if mutant.name not in EQUIVALENT]
SOME = ALL[::40]


def is_noticed(mutant: Mutant) -> bool:
    with mutant.applied():
        is_found = fails_a_test(test_decode, test_prefill)
        return is_found or first_failure(range(ENOUGH)) is not None


def test_the_machines_themselves_pass() -> None:
    assert not fails_a_test(test_decode, test_prefill)


@pytest.mark.parametrize("mutant", SOME, ids=lambda mutant: mutant.name)
def test_some_mutants_are_noticed(mutant: Mutant) -> None:
    assert is_noticed(mutant)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_mutant_is_noticed() -> None:
    assert not [f"{mutant.name}\n{mutant.change}" for mutant in ALL if not is_noticed(mutant)]


def test_every_equivalent_mutant_is_one_that_exists() -> None:
    assert {mutant.name for mutant in EVERY} >= EQUIVALENT.keys()

"""Simulated comparisons: their loads, the search for a rate, and the program."""

import itertools
import json
from pathlib import Path

import pytest

from tandem.launch.simulation.arrivals import PHASE_S, corner, highest_rate, of_trace
from tandem.launch.simulation.compared import main
from tandem.runtime.errors import ConfigError
from tests.launch.simulation.setups import write_trace

SMALL = (
    *("--workers", "2", "--seconds", "6", "--seeds", "2", "--guess", "4"),
    *("--contender", "unsplit", "1P 1D", "default"),
)


@pytest.mark.parametrize("guess", [1.0, 16.0, 300.0])
def test_the_highest_rate_is_found_from_any_guess(guess: float) -> None:
    asked: list[float] = []

    def keeps(rate: float) -> bool:
        asked.append(rate)
        return rate <= 17.3

    assert 17.3 / 1.021 < highest_rate(keeps, guess) <= 17.3
    assert len(asked) == len(set(asked)) < 20


def test_a_load_that_is_never_kept_has_no_rate() -> None:
    assert highest_rate(lambda rate: False, 10.0) == 0.0


def test_the_kinds_of_a_mix_come_at_their_shares_and_swing_in_phases_of_their_own() -> None:
    kinds = {6000: 0.2, 300: 0.8}
    for name in ("mix", "swinging"):
        arrivals = corner(name, 50.0, 8 * PHASE_S, seed=1)
        times = [at_s for _, at_s in arrivals]
        assert times == sorted(times)
        for length, share in kinds.items():
            count = sum(each.num_prompt_tokens == length for each, _ in arrivals)
            assert count == pytest.approx(share * 50.0 * 8 * PHASE_S, rel=0.1)
    phases = {(int(at_s / PHASE_S) % 2, each.num_prompt_tokens) for each, at_s in arrivals}
    assert phases == {(0, 6000), (1, 300)}


def test_a_faster_load_has_the_same_requests_closer_together() -> None:
    slow, fast = (corner("long in, short out", rate, 400.0 / rate, seed=3) for rate in (4.0, 8.0))
    assert [2 * at_s for _, at_s in fast] == pytest.approx([at_s for _, at_s in slow])


def test_a_trace_is_replayed_from_a_seeds_place_at_a_rate(tmp_path: Path) -> None:
    entries = [(i * 100.0, 512 if i % 5 else 9000, 8, [i]) for i in range(1000)]
    trace = write_trace(tmp_path / "office.jsonl", *entries)
    arrivals = of_trace(trace, 20.0, 10.0, 1, 64, 1024)
    assert len(arrivals) == 200 and arrivals[0][1] == 0.0
    assert arrivals[-1][1] == pytest.approx(10.0)
    assert {each.num_prompt_tokens for each, _ in arrivals} == {512}  # the others fit nowhere
    assert len(arrivals[0][0].hashes) == 512 // 64
    assert arrivals[0][0].index != of_trace(trace, 20.0, 10.0, 2, 64, 1024)[0][0].index
    with pytest.raises(ConfigError, match="too short"):
        of_trace(trace, 200.0, 10.0, 1, 64, 1024)


@pytest.mark.slow
def test_rates_of_all_contenders_are_compared_in_tables_and_a_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "simulated.json"
    assert main([*SMALL, "--load", "long", "--output", str(output)]) == 0
    (found,) = json.loads(output.read_text())["results"].values()
    assert list(found) == ["unsplit", "1P 1D", "default"]
    # a prompt of 6000 tokens takes an H100 about 0.15 s: two compute 13 a second
    assert all(1 < rate < 16 for each in found.values() for rate in each["rates"])
    assert all(each["share_kept"] > 0.9 for each in found["unsplit"]["low"])
    assert not any(each["share_remote"] for each in found["unsplit"]["high"])
    text = capsys.readouterr().out
    assert "| long in, short out | " in text and "(1P 1D)" in text
    assert text.count("| long in, short out | default |") == 2


def test_requests_of_one_tick_of_a_trace_are_spread_over_it(tmp_path: Path) -> None:
    entries = [(3000.0 * (i // 4), 64, 8, [i]) for i in range(40)]
    trace = write_trace(tmp_path / "ticks.jsonl", *entries)
    arrivals = of_trace(trace, 0.8, 15.0, 1, 64, 1024)
    gaps_s = [later - at_s for (_, at_s), (_, later) in itertools.pairwise(arrivals)]
    assert gaps_s == pytest.approx([15.0 / 11] * 11)


@pytest.mark.parametrize(
    "wrong", [("--load", "huge"), ("--contender", "9P 9D"), ("--emulate", "abacus")]
)
def test_names_that_are_none_are_refused(
    wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *wrong]) == 1
    assert wrong[1] in capsys.readouterr().err


def test_targets_must_be_of_both_kinds() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--targets", "ttft:1000"])
    assert ended.value.code == 2

"""Latencies of layouts at given rates without targets: what users meet who set none."""

import pytest

from tandem.launch.simulation.timed import EXIT_FAILED, TITLES, main


@pytest.mark.parametrize(
    ("load", "rate", "share"), [("mix", "50", 0.95), ("long", "18", 0.8), ("swinging", "45", 1.0)]
)
def test_without_targets_the_default_s_answers_come_sooner_than_unsplit_beside_long_prompts(
    load: str, rate: str, share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--load", load, "--rate", rate, "--seconds", "20", "--seeds", "1"]
    assert main([*given, "--contender", "unsplit", "default"]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    assert titles == list(TITLES)
    named = {row[2]: row for row in rows}
    assert list(named) == ["unsplit", "default"]
    answers_s = {name: float(row[3]) for name, row in named.items()}
    assert answers_s["default"] < share * answers_s["unsplit"]
    assert named["unsplit"][-1] == "0%" and named["default"][-1] != "0%"


def test_it_needs_a_rate_and_a_load_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--load", "mix"])
    assert "--rate" in capsys.readouterr().err
    assert main(["--load", "foo", "--rate", "1"]) == EXIT_FAILED
    assert "--load foo: none of" in "".join(capsys.readouterr())

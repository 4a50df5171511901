from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tandem.bench.report.options import option, parse
from tandem.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Options:
    """Measure something."""

    files: tuple[Path, ...] = option((), "files", is_positional=True)
    rounds: int = option(3, "rounds", least=1)
    rate: float | None = option(None, "rate")
    kind: Literal["a", "b"] = option("a", "kind")
    stream: bool = option(True, "stream")
    pair: tuple[str, str] | None = option(None, "two words")
    names: tuple[str, ...] = option(("x",), "names")

    def __post_init__(self) -> None:
        if self.rate == 7:
            raise ConfigError("7 is no rate")


def parsed(*arguments: str) -> Options:
    return parse(Options, "some.module", ["file", *arguments])


def test_fields_are_flags_with_their_types_and_defaults() -> None:
    assert parsed() == Options((Path("file"),))
    given = parsed(
        *("--rounds", "5", "--rate", "2.5", "--kind", "b", "--no-stream"),
        *("--pair", "one", "two", "--names", "y", "z", "--names", "w"),
    )
    assert given == Options((Path("file"),), 5, 2.5, "b", False, ("one", "two"), ("y", "z", "w"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rounds", "0"), "0 is below 1"),
        (("--kind", "c"), "'c'"),
        (("--speed", "3"), "--speed"),
        (("--round", "3"), "--round"),
        (("--rate", "7"), "7 is no rate"),
    ],
)
def test_a_wrong_option_is_one_line_and_status_2(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(*arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line

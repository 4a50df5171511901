from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec
import pytest

from tandem.bench.kernels.cases import Call, Case
from tandem.bench.kernels.shapes import FAMILIES, Tunable
from tandem.bench.kernels.tune import Choice, main, merged, tune_family
from tandem.bench.report.setting import setting_for
from tandem.kernels.tuned import TABLE


@dataclass(frozen=True, slots=True)
class Config:
    """How much a made-up kernel computes, and whether that is right."""

    num_additions: int
    is_right: bool = True


SLOW, FAST, WRONG = Config(300_000), Config(10), Config(1, is_right=False)

Tune = Callable[[Config], Choice]


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> Tune:
    """tune(current) chooses among WRONG, FAST and SLOW where `current` stands in the table."""

    def tune(current: Config) -> Choice:
        module: Any = ModuleType("made_up")
        module.tuned_config = lambda default, kernel, **shape: default

        def candidates(width: int) -> Iterator[Config]:
            assert width == 7
            yield from (WRONG, FAST, SLOW)

        def launch(_index: int, config: Config | None) -> None:
            if config is None:
                config = module.tuned_config(current, "made_up", width=7, element_bytes=2)
            launched.append(config)
            sum(range(config.num_additions))

        def check(run: Call) -> float:
            run()
            return 0.0 if launched[-1].is_right else 1.0

        launched: list[Config] = []
        module.candidates = candidates
        case = Case(
            name="made up", label="made up", work=1.0, launch=launch, check=check, error_bound=0.1
        )
        tunable = Tunable(module, "made up", lambda: case)
        monkeypatch.setitem(FAMILIES, "made_up", lambda _: iter([tunable]))
        monkeypatch.setattr("tandem.bench.kernels.tune.TINY_CANDIDATES", 3)
        (choice,) = tune_family("made_up", setting_for("cpu"))
        return choice

    return tune


def test_the_fastest_that_is_right_is_chosen(tune: Tune) -> None:
    choice = tune(SLOW)
    assert choice.old == {"num_additions": 300_000, "is_right": True}
    assert choice.new == {"num_additions": 10, "is_right": True}
    assert (choice.kernel, choice.shape) == ("made_up", "width=7 element_bytes=2")
    assert choice.old_s is not None and choice.new_s < choice.old_s
    assert "relative error 1" in choice.rejected["num_additions=1 is_right=False"]


def test_what_stands_in_the_table_loses_when_it_is_wrong(tune: Tune) -> None:
    choice = tune(WRONG)
    assert choice.old_s is None
    assert choice.new["num_additions"] == 10


def test_a_gain_within_noise_changes_nothing(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.bench.kernels.tune.LEAST_GAIN", 1.0)
    choice = tune(SLOW)
    assert choice.new == choice.old


def test_only_what_was_measured_changes_in_the_table(tune: Tune) -> None:
    choice = msgspec.structs.replace(tune(SLOW), arch=90)
    row = {"num_additions": 3}
    before = {"sm_80": {"made_up": {"width=7": row}}, "sm_90": {"other": {"": row}}}
    after = merged(before, [choice])
    assert after["sm_80"] == before["sm_80"] and after["sm_90"]["other"] == {"": row}
    assert after["sm_90"]["made_up"] == {"width=7 element_bytes=2": choice.new}
    assert "made_up" not in before["sm_90"], "the table given is left as it was"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "label"), [("embed", "embed, 8192 tokens"), ("linear", "product of 16 tokens")]
)
def test_a_dry_run_goes_through_a_family_and_writes_nothing(
    family: str, label: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = TABLE.read_bytes()
    assert main(["--device", "cpu", "--family", family]) == 0
    assert label in capsys.readouterr().out
    assert TABLE.read_bytes() == before

import math
from dataclasses import replace

import msgspec
import pytest
import torch

from tandem.bench.kernels.__main__ import against_torch
from tandem.bench.kernels.cases import Call, Case, measure, measure_groups, mismatch, relative_error
from tandem.bench.report.figures import Figure, at_least, at_most
from tandem.bench.report.setting import Setting, setting_for

DRY = setting_for("cpu")


def case(error: float = 0.0) -> Case:
    return Case(
        name="fine",
        label="fine",
        work=1.0,
        launch=lambda *_: None,
        num_sets=2,
        check=lambda run: error,
        error_bound=1e-2,
    )


@pytest.mark.parametrize("errors", [(0.5,), (0.0, 0.5)], ids=["before", "after"])
def test_a_kernel_that_is_or_turns_wrong_gets_no_figure(errors: tuple[float, ...]) -> None:
    found_errors = iter(errors)
    (found,) = measure([replace(case(), check=lambda run: next(found_errors))], DRY)
    assert found.samples == () and "relative error 0.5" in found.failure
    assert found.verdict == "failed"


def test_an_output_that_is_not_finite_is_wrong() -> None:
    assert relative_error(torch.tensor([1.0, math.nan]), torch.ones(2)) == math.inf
    assert relative_error(torch.tensor([1.0, 1.1]), torch.ones(2)) == pytest.approx(
        0.0707, rel=0.01
    )
    assert mismatch(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25
    (found,) = measure([case(error=math.inf)], DRY)
    assert found.failure and found.relative_error is None


def raising(error: BaseException) -> Case:
    def check(_: Call) -> float:
        raise error

    return replace(case(), name="broken", check=check)


def test_a_kernel_that_raises_costs_no_other_its_figure() -> None:
    broken = raising(RuntimeError("out of shared memory"))
    found = {each.name: each for each in measure([broken, case()], DRY)}
    assert "out of shared memory" in found["broken"].failure
    assert len(found["fine"].samples) == 1


def test_a_librarys_call_may_be_unavailable() -> None:
    broken = raising(RuntimeError("no such backend"))
    (found,) = measure([replace(broken, is_ours=False)], DRY)
    assert found.notes == ("unavailable: RuntimeError: no such backend",)
    assert (found.samples, found.verdict) == ((), "")


def test_a_group_that_cannot_be_set_up_costs_no_other_its_figures() -> None:
    def no_memory(_: Setting) -> list[Case]:
        raise RuntimeError("out of memory")

    first, *others = measure_groups({"no memory": no_memory, "a case": lambda _: [case()]}, DRY)
    assert (first.name, first.failure) == ("no memory", "RuntimeError: out of memory")
    assert others[-1].samples


def test_a_case_that_never_ends_is_known_to_be_open() -> None:
    broken = replace(raising(KeyboardInterrupt()), target=at_most(1.0))
    found = measure_groups({"broken": lambda _: [broken]}, DRY)
    announced = next(found)
    with pytest.raises(KeyboardInterrupt):
        next(found)
    assert announced.verdict == "open"


def test_cases_take_turns_in_every_round() -> None:
    order: list[str] = []

    def named(name: str) -> Case:
        return replace(case(), name=name, num_sets=1, launch=lambda *_: order.append(name))

    setting = replace(DRY, rounds=2, num_warmups=1)
    found = list(measure([named("a"), named("b")], setting))
    assert order == ["a", "b"] * 3
    assert [len(each.samples) for each in found] == [2, 2], "the first round is a warm-up"


def test_whole_prompts_are_compared_with_the_fastest_backend_at_their_length() -> None:
    rates = {
        "sdpa_flash_8k": (50.0, 50.0),
        "sdpa_cudnn_8k": (100.0, 100.0),
        "sdpa_cudnn_16k": (900.0, 900.0),
        "prefill_dense_8k_block64": (150.0, 100.0),
        "prefill_paged_8k_block64": (100.0, 100.0),
        "prefill_dense_32k_block64": (100.0, 100.0),
    }
    figures = [Figure(name, name, "TFLOP/s", samples) for name, samples in rates.items()]
    figures.append(Figure("sdpa_efficient_8k", "unavailable", "TFLOP/s"))
    (ratio,) = against_torch(figures)
    assert ratio.name == "prefill_dense_8k_block64_vs_sdpa"
    assert (ratio.samples, ratio.verdict) == ((1.5, 1.0), "met")
    slower = [msgspec.structs.replace(figures[3], samples=(90.0, 90.0)), *figures[:3]]
    (ratio,) = against_torch(slower)
    assert (ratio.target, ratio.verdict) == (at_least(1.0), "missed")

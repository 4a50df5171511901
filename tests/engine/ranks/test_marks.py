"""The marks that a rank's device has passed."""

import pytest

from tandem.engine.ranks.marks import ALL_LAYERS, StepMarks


class Event:
    """Stands for a CUDA event."""

    made: list["Event"]

    def __init__(self) -> None:
        self.has_happened = self.is_recorded = False
        self.made.append(self)

    def record(self) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        assert self.is_recorded
        return self.has_happened


def test_on_a_cpu_a_mark_is_passed_when_it_is_recorded() -> None:
    marks = StepMarks(on_gpu=False)
    marks.record((1, ALL_LAYERS))
    marks.record((2, 3))
    assert marks.has_passed((1, 2)) and marks.has_passed((1, ALL_LAYERS))
    assert marks.has_passed((2, 3))
    assert not marks.has_passed((2, 4)) and not marks.has_passed((3, 1))


def test_on_a_gpu_marks_are_passed_in_the_order_of_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Event.made = []
    monkeypatch.setattr("torch.cuda.Event", Event)
    marks = StepMarks(on_gpu=True)
    for mark in ((1, 2), (1, ALL_LAYERS), (2, ALL_LAYERS)):
        marks.record(mark)
    first, second, third = Event.made
    assert not marks.has_passed((1, 2))
    second.has_happened = True  # looked at after the first alone
    assert not marks.has_passed((1, 2))
    first.has_happened = True
    assert marks.has_passed((1, ALL_LAYERS)) and not marks.has_passed((2, 1))
    third.has_happened = True
    assert marks.has_passed((2, 1))


def test_marks_that_nobody_asks_for_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.made = []
    monkeypatch.setattr("torch.cuda.Event", Event)
    marks = StepMarks(on_gpu=True)
    for number in range(100):
        for event in Event.made:
            event.has_happened = True
        marks.record((number, ALL_LAYERS))
        assert len(marks._ahead) <= 1

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from tandem.engine.step.device_loss import check_device, noticing_device_loss
from tandem.engine.step.launched import HostTiming, LaunchedStep
from tandem.engine.step.outcome import DeviceLostError, UndrawnError

STICKY = "CUDA error: an illegal memory access was encountered"
GPU = torch.device("cuda", 0)


class FailingTokens:
    def read(self) -> None:
        raise RuntimeError(STICKY)


@pytest.fixture(params=[False, True], ids=["passing", "sticky"])
def is_sticky(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Stands for a GPU that fails a wait after a sticky error, and no other."""

    def synchronize(device: torch.device) -> None:
        assert device == GPU
        if request.param:
            raise RuntimeError(STICKY)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return bool(request.param)


def test_a_gpu_is_lost_when_a_wait_after_the_error_fails_too(is_sticky: bool) -> None:
    expected = DeviceLostError if is_sticky else RuntimeError
    with pytest.raises(expected) as raised, noticing_device_loss(GPU):
        raise RuntimeError(STICKY)
    assert str(raised.value) == (f"cuda:0 is lost: {STICKY}" if is_sticky else STICKY)


def test_a_step_whose_tokens_do_not_come_loses_the_device(is_sticky: bool) -> None:
    step = LaunchedStep(GPU, HostTiming(), FailingTokens())  # type: ignore[arg-type]
    with pytest.raises(DeviceLostError if is_sticky else RuntimeError):
        step.tokens()


class DrawnTokens:
    def read(self) -> None:
        raise AssertionError("numbers of an exchange that was broken off are read")


def test_tokens_of_a_step_that_ended_with_a_lost_rank_are_not_read() -> None:
    def check() -> None:
        raise DeviceLostError("rank 1 of 2 was killed by SIGKILL")

    step = LaunchedStep(torch.device("cpu"), HostTiming(), DrawnTokens(), None, check)  # type: ignore[arg-type]
    with pytest.raises(DeviceLostError, match="rank 1 of 2"):
        step.tokens()


class LateTokens:
    def read(self) -> None:
        raise UndrawnError([], {0: None})


def test_a_row_that_waits_for_its_mask_makes_the_host_wait_for_no_other_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    step = LaunchedStep(GPU, HostTiming(), LateTokens())  # type: ignore[arg-type]
    with pytest.raises(UndrawnError):
        step.tokens()
    assert not waits


@pytest.mark.parametrize("error", [None, RuntimeError(STICKY)], ids=["well", "failing"])
def test_a_gpu_without_work_is_asked_without_a_wait(
    error: Exception | None, is_sticky: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream:
        def query(self) -> bool:
            if error is not None:
                raise error
            return False

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    expected: AbstractContextManager[object]
    expected = nullcontext() if error is None else pytest.raises(RuntimeError)
    if error is not None and is_sticky:
        expected = pytest.raises(DeviceLostError)
    with expected:
        check_device(GPU)
    check_device(torch.device("cpu"))


def test_an_error_on_a_cpu_is_only_that_error(is_sticky: bool) -> None:
    with pytest.raises(RuntimeError, match="illegal"), noticing_device_loss(torch.device("cpu")):
        raise RuntimeError(STICKY)

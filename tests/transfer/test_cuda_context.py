import pytest
import torch

from tandem.runtime.errors import TransferError
from tandem.transfer import cuda_context
from tandem.transfer.cuda_context import ensure_cuda_context


class Thread:
    """Stands for a thread of a process with a GPU."""

    def __init__(self, context: bool, binds: bool) -> None:
        self.context = context
        self.binds = binds  # False: torch below 2.9
        self.devices: list[int] = []

    def set_device(self, device_id: int) -> None:
        self.devices.append(device_id)
        self.context = self.binds


def use(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_context, "has_cuda_context", lambda: thread.context)
    monkeypatch.setattr(torch.cuda, "set_device", thread.set_device)


def test_a_thread_without_a_context_gets_that_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thread = Thread(context=False, binds=True)
    use(thread, monkeypatch)
    ensure_cuda_context(2)
    ensure_cuda_context(2)
    assert thread.devices == [2]


def test_the_current_device_of_a_thread_with_a_context_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thread = Thread(context=True, binds=True)
    use(thread, monkeypatch)
    ensure_cuda_context(2)
    assert thread.devices == []


def test_a_torch_that_binds_no_context_is_an_error_and_not_a_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(Thread(context=False, binds=False), monkeypatch)
    with pytest.raises(TransferError, match="GPU 2: this thread has no CUDA context"):
        ensure_cuda_context(2)

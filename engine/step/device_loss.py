"""The loss of a GPU: after some errors every later call of a process to its device fails."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from tandem.engine.step.outcome import DeviceLostError
from tandem.runtime.errors import TandemError

_NOTHING = nullcontext()


def noticing_device_loss(device: torch.device) -> AbstractContextManager[None]:
    """Raise DeviceLostError in place of an error within after which `device` is lost.

    An error that ends a CUDA context is raised again by every later call, also by one that only
    waits. After any other error, as of memory that ran out, the device waits as always. This
    project's own errors say nothing of a device, and wait for none.
    """
    return _noticing_cuda_loss(device) if device.type == "cuda" else _NOTHING


def check_device(device: torch.device) -> None:
    """Raise DeviceLostError where `device` is lost. It waits for no work."""
    if device.type == "cuda":
        with noticing_device_loss(device):
            torch.cuda.current_stream(device).query()


@contextmanager
def _noticing_cuda_loss(device: torch.device) -> Iterator[None]:
    try:
        yield
    except TandemError:
        raise
    except Exception as error:
        try:
            torch.cuda.synchronize(device)
        except Exception:
            raise DeviceLostError(f"{device} is lost: {error}") from error
        raise

"""A launched step: its end, its duration, and its tokens."""

import time
from collections.abc import Callable
from typing import Protocol

import torch

from tandem.engine.step.device_loss import noticing_device_loss
from tandem.engine.step.outcome import SampledToken, ScoredPart
from tandem.engine.step.prompt_scoring import HostScores
from tandem.engine.step.sampler import HostTokens


class Timing(Protocol):
    """A timer of a step's work on its device."""

    def stop(self) -> None:
        """Mark the end of the step's work, all of which has been launched."""

    def wait(self) -> float:
        """Block until the work is done; return its seconds."""


class HostTiming:
    """A timer for a synchronous device: work is finished when the launch returns."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._started

    def wait(self) -> float:
        return self._seconds


class CudaTiming:
    """A timer of the current CUDA stream, the same in the constructor and in `stop`."""

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        # A blocking event: the waiting thread sleeps and leaves its core to others.
        self._end = torch.cuda.Event(  # type: ignore[no-untyped-call]
            enable_timing=True, blocking=True
        )
        self._begin.record()

    def stop(self) -> None:
        self._end.record()

    def wait(self) -> float:
        self._end.synchronize()
        milliseconds: float = self._begin.elapsed_time(self._end)
        return milliseconds / 1e3


def start_timing(device: torch.device) -> Timing:
    """Start a timer of `device`."""
    return CudaTiming() if device.type == "cuda" else HostTiming()


class LaunchedStep:
    """The engine's Step. `seconds`, on the device, is valid once `tokens` has returned."""

    def __init__(
        self,
        device: torch.device,
        timing: Timing,
        on_host: HostTokens | None,
        scores: HostScores | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """`check` raises DeviceLostError where the numbers of the ended work mean nothing."""
        timing.stop()
        self._check = check
        self._device = device
        self._timing = timing
        self._on_host = on_host
        self._scores = scores
        self.seconds = 0.0

    def tokens(self) -> list[SampledToken]:
        """Return one token per chunk that samples, in the order of the chunks.

        Blocks until they are on the host and all K/V of the step is in the pool. Raises
        UndrawnError when a sequence has no token, and DeviceLostError.
        """
        with noticing_device_loss(self._device):
            self.seconds = self._timing.wait()
            if self._check is not None:
                self._check()
            return [] if self._on_host is None else self._on_host.read()

    def prompt_scores(self) -> list[ScoredPart]:
        """Return the log probabilities of prompt tokens; valid once `tokens` has returned."""
        return [] if self._scores is None else self._scores.read()

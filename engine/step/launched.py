"""A step that has been launched: when it is done, how long it took, and its tokens."""

import time
from typing import Protocol

import torch

from tandem.engine.step.sampler import HostTokens, SampledToken


class Timing(Protocol):
    """When a step's work began and ended, on its device."""

    def stop(self) -> None:
        """All of the step has been launched."""

    def wait(self) -> float:
        """Blocks until all of it has happened; the seconds that it took."""


class HostTiming:
    """Of a device whose work is done once it has been launched."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._started

    def wait(self) -> float:
        return self._seconds


class CudaTiming:
    """Of the current CUDA stream, which both the constructor and `stop` must find there."""

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        # The thread sleeps until then: the device has its next step already, and the core is free.
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
    """The clock of `device`, started."""
    return CudaTiming() if device.type == "cuda" else HostTiming()


class LaunchedStep:
    """The engine's Step. `seconds`, of the device, is valid once `tokens` has returned."""

    def __init__(self, timing: Timing, on_host: HostTokens | None) -> None:
        timing.stop()
        self._timing = timing
        self._on_host = on_host
        self.seconds = 0.0

    def tokens(self) -> list[SampledToken]:
        """One token per chunk that samples, in the order of the chunks.

        Blocks until they are on the host and all K/V of the step is in the pool. Raises
        InternalError when a sequence's logits are not finite.
        """
        self.seconds = self._timing.wait()
        return [] if self._on_host is None else self._on_host.read()

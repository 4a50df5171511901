"""A moving average of seconds per token."""

import math
import time
from dataclasses import dataclass


@dataclass(slots=True)
class TokenRate:
    """Seconds per token, as measured recently; None before the first measurement.

    `smoothing` is the weight of the newest measurement. After `lifetime_s` without a measurement
    the rate is forgotten. Times are `time.perf_counter()` readings.
    """

    smoothing: float
    lifetime_s: float = math.inf
    s_per_token: float | None = None
    measured_at: float = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Add the measurement that `num_tokens` tokens took `seconds`."""
        now, sample = time.perf_counter(), seconds / max(1, num_tokens)
        known = self.current(now)
        self.s_per_token = sample if known is None else known + self.smoothing * (sample - known)
        self.measured_at = now

    def current(self, now: float) -> float | None:
        """Return the rate, or None if it was never measured or is too old."""
        return None if now - self.measured_at > self.lifetime_s else self.s_per_token

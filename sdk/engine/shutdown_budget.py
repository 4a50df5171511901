"""The division of a worker's shutdown time."""

import os
from dataclasses import dataclass

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.errors import ConfigError

_GRACE_VARIABLES = ("TANDEM_SHUTDOWN_GRACE_S", "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS")
_TRANSFER_VARIABLES = ("TANDEM_PREFILL_DRAIN_TIMEOUT_S", "DYN_PREFILL_DRAIN_TIMEOUT_S")


@dataclass(frozen=True, slots=True)
class ShutdownBudget:
    """The stages between the signal and the end; seconds.

    `total_s` is the whole time. Time that one stage leaves goes to the next. Cleanup always has
    `cleanup_s`, even when no time is left.
    """

    total_s: float
    grace_s: float
    transfer_s: float
    cleanup_s: float

    @classmethod
    def of(cls, config: RuntimeConfig) -> "ShutdownBudget":
        """Divide `runtime.drain_timeout_s`; the environment may set grace and transfer."""
        total_s = config.drain_timeout_s
        return cls(
            total_s=total_s,
            grace_s=min(_seconds(_GRACE_VARIABLES, 0.25), total_s / 4),
            transfer_s=min(_seconds(_TRANSFER_VARIABLES, 30.0), total_s / 4),
            cleanup_s=min(5.0, total_s / 4),
        )


def _seconds(variables: tuple[str, ...], default: float) -> float:
    name = next((name for name in variables if os.environ.get(name)), None)
    if name is None:
        return default
    try:
        value = float(os.environ[name])
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise ConfigError(f"environment variable {name}: not a number of seconds", param=name)
    return value

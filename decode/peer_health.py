"""Which prefill workers deliver KV that is not what they announced, and get no more work."""

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 60.0  # failures further apart are not held together


@dataclass(slots=True)
class _Record:
    failed_at: deque[float] = field(default_factory=deque)
    excluded_until: float = 0.0


class PeerHealth:
    """Counts failed verifications per process; a restarted worker starts afresh.

    `exclude_after` failures within a minute exclude it for `exclude_for_s`. Times are
    `time.perf_counter()` readings.
    """

    def __init__(self, exclude_after: int, exclude_for_s: float) -> None:
        self._exclude_after = exclude_after
        self._exclude_for_s = exclude_for_s
        self._records: dict[tuple[str, str], _Record] = {}  # (instance, epoch)

    def failed(self, claimant: tuple[str, str], now: float) -> bool:
        """One handoff of (instance, epoch) failed verification; True when that excludes it."""
        self._forget_old(now)
        record = self._records.setdefault(claimant, _Record())
        record.failed_at.append(now)
        if len(record.failed_at) < self._exclude_after or now < record.excluded_until:
            return False
        record.excluded_until = now + self._exclude_for_s
        record.failed_at.clear()
        return True

    def is_excluded(self, claimant: tuple[str, str], now: float) -> bool:
        record = self._records.get(claimant)
        return record is not None and now < record.excluded_until

    def excluded(self, now: float) -> list[str]:
        """The instances that get no work at the moment."""
        records = list(self._records.items())  # other threads ask too
        return [who for (who, _), record in records if now < record.excluded_until]

    def _forget_old(self, now: float) -> None:
        for claimant, record in list(self._records.items()):
            while record.failed_at and now - record.failed_at[0] > WINDOW_S:
                record.failed_at.popleft()
            if not record.failed_at and now >= record.excluded_until:
                del self._records[claimant]

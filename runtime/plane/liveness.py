"""The signs of life of one peer on the request plane. Pure; times are of the caller's clock (s)."""

from tandem.runtime.config import RuntimeConfig
from tandem.runtime.plane.framing import Heartbeat

# A peer may be silent for (misses + _SLACK) intervals, checked every _TICK intervals: with the
# defaults a stopped peer is given up after 1.8 to 1.9 s.
_SLACK = 0.6
_TICK = 0.2
_QUIET = 2.0  # intervals without data, after which a peer is in doubt


class Liveness:
    """The last data and the last progress of a peer. `fault` is asked every `tick_s`."""

    def __init__(self, config: RuntimeConfig, now: float) -> None:
        self._interval_s = config.heartbeat_interval_s
        self._max_silence_s = self._interval_s * (config.heartbeat_misses + _SLACK)
        self._max_stall_s = config.stall_timeout_s
        self.tick_s = self._interval_s * _TICK
        self._heard_s = now
        self._moved_s = now
        self._last_beat = Heartbeat(0, False)
        self._unread_since_s: float | None = None  # set while the peer is not read from
        self._due_s = now  # time of the next tick

    def heard(self, now: float) -> None:
        """Note that data of the peer has arrived."""
        self._heard_s = now

    def progressed(self, beat: Heartbeat, now: float) -> None:
        """Note a heartbeat of the peer."""
        if not beat.busy or beat.progress != self._last_beat.progress:
            self._moved_s = now
        self._last_beat = beat

    @property
    def is_unread(self) -> bool:
        """True while the peer is not read from."""
        return self._unread_since_s is not None

    def unread(self, now: float) -> None:
        """Note that the peer is not read from, because it does not read either."""
        self._unread_since_s = now

    def read_again(self) -> None:
        """Note that the peer reads, and is read from."""
        self._unread_since_s = None

    def is_quiet(self, now: float) -> bool:
        """Return True when a heartbeat of the peer is late: the peer may be lost."""
        return now - self._heard_s > self._interval_s * _QUIET

    def fault(self, now: float) -> str:
        """Return the reason to give the peer up; empty while there is none.

        A time in which this process stood still itself does not count.
        """
        stood_still_s = now - self._due_s
        self._due_s = now + self.tick_s
        if stood_still_s > self._interval_s:  # data that the peer sent meanwhile may be unread
            self._heard_s = max(self._heard_s, now - self._interval_s)
            self._moved_s += stood_still_s
            if self._unread_since_s is not None:
                self._unread_since_s += stood_still_s
        if self._unread_since_s is not None:
            self._heard_s = now  # the peer's heartbeats are not read either
            if now - self._unread_since_s > self._max_stall_s:
                return "does not read"
        if now - self._heard_s > self._max_silence_s:
            return f"has been silent for {now - self._heard_s:.1f} s"
        if self._last_beat.busy and now - self._moved_s > self._max_stall_s:
            return f"is busy without progress ({now - self._moved_s:.0f} s)"
        return ""
